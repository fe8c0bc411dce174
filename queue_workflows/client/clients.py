"""Define `Client`, which waits for each reply of the HTTP service, and `AsyncClient`.

They differ in how they wait. The modules beside hold the requests and the reading of replies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import httpx

from queue_workflows import errors
from queue_workflows.client import events, problems, transport, verbs
from queue_workflows.requests import catalog, request

T = TypeVar("T")
_LOST = (httpx.HTTPError, httpx.InvalidURL)


class Client(verbs.Group[verbs.Sync]):
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

    def __init__(
        self,
        url: str = "http://127.0.0.1:8081",
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        retries: int = transport.RETRIES,
        http: httpx.Client | None = None,
    ) -> None:
        super().__init__(self)
        self._conn = transport.connection(url, token, timeout_s, retries)
        self._owned = http is None
        self._http = http or httpx.Client()
        self.jobs = verbs.Jobs[verbs.Sync](self)
        self.runs = verbs.Runs[verbs.Sync](self)
        self.workers = verbs.Workers[verbs.Sync](self)
        self.queues = verbs.Queues[verbs.Sync](self)
        self.schedules = verbs.Schedules[verbs.Sync](self)

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
        steps, found = asked.steps(), None
        while True:
            try:
                call = steps.send(found)
            except StopIteration as end:
                return end.value
            found = self._call(call)

    def _call(self, call: request.Call[Any]) -> Any:
        """Return the result of a call; repeat it if that is safe."""
        tries = 0
        while True:
            tries += 1
            try:
                made = transport.request(self._conn, self._http, call)
                got = self._http.send(made, follow_redirects=False)
            except _LOST as error:
                got = error
            after_s = transport.pause_s(self._conn, call, tries, got)
            if after_s is None:
                return transport.read(call, got)
            time.sleep(after_s)

    def stream(self, asked: catalog.Stream[T]) -> Iterator[T]:
        """Yield the items of a stream, which is resumed when it is interrupted."""
        follow = events.Follower(asked)
        while not follow.over:
            try:
                for event in self._events(follow):
                    yield asked.item(event)
                follow.failures = 0
            except errors.ServiceUnavailable:
                if not transport.may_reopen(self._conn, follow):
                    raise
            if not follow.over:
                time.sleep(follow.parser.retry_s)

    def _events(self, follow: events.Follower) -> Iterator[catalog.Event]:
        options = transport.opened(self._conn, follow)
        try:
            with self._http.stream("GET", self._conn.url + follow.path, **options) as response:
                if not response.is_success:
                    response.read()
                    raise problems.of_response(response)
                for received in response.iter_bytes():
                    yield from follow.feed(received)
        except _LOST as error:
            raise problems.of_transport(error) from None


class AsyncClient(verbs.Group[verbs.Async]):
    """The service at `url`: an async context manager, or call `aclose`.

    The parameters are those of `Client`; `http`: an `httpx.AsyncClient` of your own, which stays
    open. Methods are awaited, and raise the errors of `Client`.
    """

    health = verbs.Verb(catalog.Health)
    ready = verbs.Verb(catalog.Ready)
    status = verbs.Verb(catalog.ServiceStatus)
    events = verbs.Stream(catalog.FollowEvents)

    def __init__(
        self,
        url: str = "http://127.0.0.1:8081",
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        retries: int = transport.RETRIES,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(self)
        self._conn = transport.connection(url, token, timeout_s, retries)
        self._owned = http is None
        self._http = http or httpx.AsyncClient()
        self.jobs = verbs.Jobs[verbs.Async](self)
        self.runs = verbs.Runs[verbs.Async](self)
        self.workers = verbs.Workers[verbs.Async](self)
        self.queues = verbs.Queues[verbs.Async](self)
        self.schedules = verbs.Schedules[verbs.Async](self)

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
        steps, found = asked.steps(), None
        while True:
            try:
                call = steps.send(found)
            except StopIteration as end:
                return end.value
            found = await self._call(call)

    async def _call(self, call: request.Call[Any]) -> Any:
        """Return the result of a call; repeat it if that is safe."""
        tries = 0
        while True:
            tries += 1
            try:
                made = transport.request(self._conn, self._http, call)
                got = await self._http.send(made, follow_redirects=False)
            except _LOST as error:
                got = error
            after_s = transport.pause_s(self._conn, call, tries, got)
            if after_s is None:
                return transport.read(call, got)
            await asyncio.sleep(after_s)

    async def stream(self, asked: catalog.Stream[T]) -> AsyncIterator[T]:
        """Yield the items of a stream, which is resumed when it is interrupted."""
        follow = events.Follower(asked)
        while not follow.over:
            try:
                async for event in self._events(follow):
                    yield asked.item(event)
                follow.failures = 0
            except errors.ServiceUnavailable:
                if not transport.may_reopen(self._conn, follow):
                    raise
            if not follow.over:
                await asyncio.sleep(follow.parser.retry_s)

    async def _events(self, follow: events.Follower) -> AsyncIterator[catalog.Event]:
        options = transport.opened(self._conn, follow)
        try:
            async with self._http.stream(
                "GET", self._conn.url + follow.path, **options
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise problems.of_response(response)
                async for received in response.aiter_bytes():
                    for event in follow.feed(received):
                        yield event
        except _LOST as error:
            raise problems.of_transport(error) from None
