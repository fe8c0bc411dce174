"""Define `Client`, which waits for each reply of the HTTP service, and `AsyncClient`.

They differ in how they wait. `verbs` and `transport` build the requests and read the replies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Generic, TypeVar, cast

import httpx

from queue_workflows.client import transport, verbs
from queue_workflows.requests import catalog, request

T = TypeVar("T")
C = TypeVar("C", verbs.Sync, verbs.Async, covariant=True)
H = TypeVar("H", httpx.Client, httpx.AsyncClient)
_LOST = (httpx.HTTPError, httpx.InvalidURL)


class _Base(verbs.Group[C], Generic[C, H]):
    """The nouns of both clients, and how they connect."""

    _kind: type[H]

    def __init__(
        self,
        url: str = "http://127.0.0.1:8081",
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        retries: int = transport.RETRIES,
        http: H | None = None,
    ) -> None:
        own = cast("C", self)
        super().__init__(own)
        self._conn = transport.connection(url, token, timeout_s, retries)
        self._owned = http is None
        self._http = http or self._kind()
        self.jobs = verbs.Jobs[C](own)
        self.runs = verbs.Runs[C](own)
        self.workers = verbs.Workers[C](own)
        self.queues = verbs.Queues[C](own)
        self.schedules = verbs.Schedules[C](own)
        self.acts = verbs.Acts[C](own)


class Client(_Base[verbs.Sync, httpx.Client]):
    """The service at `url`: a context manager, or call `close`.

    `token`: default QUEUE_WORKFLOWS_TOKEN. `timeout_s`: of a request, besides the time for which
    the service waits on request. `retries`: how often a request is repeated that got no answer, or
    503, and changes nothing twice. `http`: an `httpx.Client` of your own, which stays open.
    Methods raise the errors of the Python API, `AccessDenied`, `RequestRefused`,
    `ServiceUnavailable` and `ServiceFailed`.
    """

    health = verbs.Verb(catalog.Health)
    ready = verbs.Verb(catalog.Ready)
    status = verbs.Verb(catalog.ServiceStatus)
    events = verbs.Stream(catalog.FollowEvents)
    _kind = httpx.Client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._owned:
            self._http.close()

    def send(self, asked: request.Request[T]) -> T:
        """Send a request of `requests.catalog`, and return its result."""
        steps, got = transport.exchange(self._conn, self._http, asked), None
        while True:
            try:
                step = steps.send(got)
            except StopIteration as end:
                return end.value
            got = self._done(step)

    def _done(self, step: httpx.Request | float) -> transport.Got | None:
        if not isinstance(step, httpx.Request):
            return time.sleep(step)
        try:
            return self._http.send(step, follow_redirects=False)
        except _LOST as error:
            return error

    def stream(self, asked: catalog.Stream[T]) -> Iterator[T]:
        """Yield the items of a stream, which is resumed when it is interrupted."""
        follow = transport.Follower(asked)
        while not follow.over:
            try:
                with self._http.stream(**transport.opened(self._conn, follow)) as response:
                    if transport.begins(response):
                        follow.failures = 0
                        for received in response.iter_bytes():
                            yield from map(asked.item, follow.feed(received))
                    else:
                        response.read()
                        transport.reopen(self._conn, follow, response)
            except _LOST as error:
                transport.reopen(self._conn, follow, error)
            if not follow.over:
                time.sleep(follow.parser.retry_s)


class AsyncClient(_Base[verbs.Async, httpx.AsyncClient]):
    """The service at `url`: an async context manager, or call `aclose`.

    The parameters are those of `Client`; `http`: an `httpx.AsyncClient` of your own, which stays
    open. Methods are awaited, and raise the errors of `Client`.
    """

    health = verbs.Verb(catalog.Health)
    ready = verbs.Verb(catalog.Ready)
    status = verbs.Verb(catalog.ServiceStatus)
    events = verbs.Stream(catalog.FollowEvents)
    _kind = httpx.AsyncClient

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owned:
            await self._http.aclose()

    async def send(self, asked: request.Request[T]) -> T:
        """Send a request of `requests.catalog`, and return its result."""
        steps, got = transport.exchange(self._conn, self._http, asked), None
        while True:
            try:
                step = steps.send(got)
            except StopIteration as end:
                return end.value
            got = await self._done(step)

    async def _done(self, step: httpx.Request | float) -> transport.Got | None:
        if not isinstance(step, httpx.Request):
            return await asyncio.sleep(step)
        try:
            return await self._http.send(step, follow_redirects=False)
        except _LOST as error:
            return error

    async def stream(self, asked: catalog.Stream[T]) -> AsyncIterator[T]:
        """Yield the items of a stream, which is resumed when it is interrupted."""
        follow = transport.Follower(asked)
        while not follow.over:
            try:
                async with self._http.stream(**transport.opened(self._conn, follow)) as response:
                    if transport.begins(response):
                        follow.failures = 0
                        async for received in response.aiter_bytes():
                            for event in follow.feed(received):
                                yield asked.item(event)
                    else:
                        await response.aread()
                        transport.reopen(self._conn, follow, response)
            except _LOST as error:
                transport.reopen(self._conn, follow, error)
            if not follow.over:
                await asyncio.sleep(follow.parser.retry_s)
