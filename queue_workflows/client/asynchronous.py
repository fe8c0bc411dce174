"""Define `AsyncClient`, which calls the HTTP service from an event loop."""

from __future__ import annotations

import asyncio
import builtins
import functools
import sys
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from typing import TypeVar

import httpx

from queue_workflows import errors
from queue_workflows.client import (
    calls,
    events,
    job_states,
    problems,
    request_loops,
    transport,
    verbs,
)
from queue_workflows.types import JsonDict

T = TypeVar("T")


class AsyncClient:
    """The service at `url`: an async context manager, or call `aclose`.

    `token`: default QUEUE_WORKFLOWS_TOKEN. `timeout_s`: of a request, besides the time for which
    the service waits on request. `retries`: how often a request is repeated that got no answer, or
    503, and changes nothing twice. `http`: an `httpx.AsyncClient` of your own, which stays open.
    Methods raise the errors of the Python API, `AccessDenied`, `RequestRefused`,
    `ServiceUnavailable` and `ServiceFailed`.
    """

    health = verbs.Async(calls.health)
    ready = verbs.Async(calls.ready)
    status = verbs.Async(calls.service_status)

    def __init__(
        self,
        url: str = "http://127.0.0.1:8081",
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        retries: int = transport.RETRIES,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._conn = transport.connection(url, token, timeout_s, retries)
        self._owned = http is None
        self._http = http or httpx.AsyncClient()
        self.jobs = AsyncJobs(self)
        self.runs = AsyncRuns(self)
        self.workers = AsyncWorkers(self)
        self.queues = AsyncQueues(self)
        self.schedules = AsyncSchedules(self)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owned:
            await self._http.aclose()

    async def events(
        self,
        *,
        kind: str | None = None,
        job_id: str | None = None,
        run_id: str | None = None,
        queue: str | None = None,
        last_event_id: str | None = None,
    ) -> AsyncIterator[events.Event]:
        """Yield changes of jobs and runs from now on, or from those behind `last_event_id`.

        Ends never by itself: an interrupted stream is resumed, without a gap and without repeating
        what was yielded. Raises `EventsLost` if too much happened meanwhile, `ServiceUnavailable`
        if the service cannot be reached `retries` times in a row.
        """
        wanted = {"kind": kind, "job_id": job_id, "run_id": run_id, "queue": queue}
        follow = events.Follower(transport.path("events"), wanted, last_event_id)
        async for event in self.stream(follow):
            yield event

    async def stream(self, follow: events.Follower) -> AsyncIterator[events.Event]:
        """Yield the events of a stream, which is resumed when it is interrupted."""
        while True:
            try:
                async for event in self._stream(follow):
                    yield event
                follow.failures = 0
            except errors.ServiceUnavailable:
                follow.failures += 1
                if follow.failures > self._conn.retries:
                    raise
            if follow.over:
                return
            await asyncio.sleep(follow.parser.retry_s)

    async def _stream(self, follow: events.Follower) -> AsyncIterator[events.Event]:
        follow.opened()
        timeout = httpx.Timeout(self._conn.timeout_s, read=events.SILENCE_S)
        try:
            async with self._http.stream(
                "GET",
                self._conn.url + follow.path,
                params=follow.query,
                headers={**self._conn.headers, **follow.headers},
                timeout=timeout,
                follow_redirects=False,
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise problems.of_response(response)
                async for received in response.aiter_bytes():
                    for event in follow.feed(received):
                        yield event
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise problems.of_transport(error) from None

    async def call(self, call: transport.Call[T]) -> T:
        """Return what a request returns; repeat it if that is safe."""
        tries = 0
        while True:
            tries += 1
            try:
                request = transport.request(self._conn, self._http, call)
                got = await self._http.send(request, follow_redirects=False)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                got = error
            after_s = transport.pause_s(self._conn, call, tries, got)
            if after_s is None:
                return transport.read(call, got)
            await asyncio.sleep(after_s)


class AsyncJobs(verbs.AsyncGroup):
    """Jobs outside of runs."""

    enqueue = verbs.Async(calls.enqueue)
    get = verbs.Async(calls.get_job)
    status = verbs.Async(calls.job_status)
    cancel = verbs.Async(calls.cancel_job)
    retry = verbs.Async(calls.retry_job)
    events = verbs.Async(calls.job_events)
    explain = verbs.Async(calls.explain_job)

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> job_states.JobStatus:
        """Return how far a job is once it is succeeded, failed or canceled.

        Raises `WaitTimeout` (a TimeoutError) after `timeout_s`; None: waits for ever.
        """
        return await self.end_of(request_loops.job_end(job_id, timeout_s))

    async def list(
        self,
        *,
        queue: str | None = None,
        task_name: str | None = None,
        status: str | Iterable[str] | None = None,
        since: datetime | timedelta | None = None,
        key: str | None = None,
        text: str | None = None,
        limit: int = 100,
    ) -> builtins.list[JsonDict]:
        """Return up to `limit` jobs, the newest first; `text`: in an id, task, key or error."""
        page = functools.partial(
            calls.list_jobs, queue=queue, task_name=task_name, status=status, since=since, key=key,
            text=text,
        )  # fmt: skip
        return await self.all(limit, page)

    async def parts(
        self, job_id: str, *, name: str | None = None, after: str | None = None
    ) -> builtins.list[events.Part]:
        """Return what the handler of a job has streamed, of `name` if given, with reset marks.

        `after`: the `id` of the last part that is known. Raises `UnknownJob`.
        """
        return await self.parts_of(("jobs", job_id), name, after)

    def follow(
        self, job_id: str, *, name: str | None = None, after: str | None = None
    ) -> AsyncIterator[events.Part]:
        """Yield what the handler of a job streams, as `parts` returns it, until its job has ended.

        An interrupted stream is resumed, without a gap and without repeating what was yielded.
        Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
        """
        return self.parts_from(("jobs", job_id), name, after)


class AsyncRuns(verbs.AsyncGroup):
    """Runs of workflows."""

    submit = verbs.Async(calls.submit)
    get = verbs.Async(calls.get_run)
    cancel = verbs.Async(calls.cancel_run)
    retry = verbs.Async(calls.retry_run)
    answer = verbs.Async(calls.answer)
    explain = verbs.Async(calls.explain_run)

    async def wait(self, run_id: str, *, timeout_s: float | None = None) -> JsonDict:
        """Return a run once it is completed, failed or cancelled.

        Raises `UnknownJob`, and `WaitTimeout` (a TimeoutError) after `timeout_s`; None: waits for
        ever.
        """
        return await self.end_of(request_loops.run_end(run_id, timeout_s))

    async def nodes(self, run_id: str, *, limit: int = sys.maxsize) -> builtins.list[JsonDict]:
        """Return up to `limit` nodes of a run with their attempts: the workflow's, then the items'.

        Raises `UnknownJob` if there is no run.
        """
        size = min(limit, calls.PAGE)  # of all pages: it decides whether they have logs
        page = functools.partial(calls.run_nodes, run_id=run_id)
        return (await self.all(limit, lambda _, after: page(size, after)))[:limit]

    async def list(
        self, *, status: str | None = None, workflow_name: str | None = None, limit: int = 50
    ) -> builtins.list[JsonDict]:
        """Return up to `limit` runs, the newest first, each with its node counts as `nodes`."""
        page = functools.partial(calls.list_runs, status=status, workflow_name=workflow_name)
        return await self.all(limit, page)

    async def parts(
        self, run_id: str, node_id: str, *, name: str | None = None, after: str | None = None
    ) -> builtins.list[events.Part]:
        """Return what a node of a run has streamed, of `name` if given, with reset marks.

        `after`: the `id` of the last part that is known. Raises `UnknownJob`.
        """
        return await self.parts_of(("runs", run_id, "nodes", node_id), name, after)

    def follow(
        self, run_id: str, node_id: str, *, name: str | None = None, after: str | None = None
    ) -> AsyncIterator[events.Part]:
        """Yield what a node of a run streams, as `parts` returns it, until its job has ended.

        An interrupted stream is resumed, without a gap and without repeating what was yielded.
        Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
        """
        return self.parts_from(("runs", run_id, "nodes", node_id), name, after)


class AsyncWorkers(verbs.AsyncGroup):
    """Worker processes, and the switches of machines and queues."""

    list = verbs.Async(calls.list_workers)
    enable = verbs.Async(calls.enable)
    disable = verbs.Async(calls.disable)
    drain = verbs.Async(calls.drain)


class AsyncQueues(verbs.AsyncGroup):
    """Queues with their depth, limits and pauses."""

    list = verbs.Async(calls.list_queues)
    get = verbs.Async(calls.get_queue)
    pause = verbs.Async(calls.pause_queue)
    resume = verbs.Async(calls.resume_queue)
    limit = verbs.Async(calls.limit_queue)


class AsyncSchedules(verbs.AsyncGroup):
    """Schedules, of the code and of the database."""

    list = verbs.Async(calls.list_schedules)
    preview = verbs.Async(calls.preview)
    pause = verbs.Async(calls.pause_schedule)
    resume = verbs.Async(calls.resume_schedule)
    run_now = verbs.Async(calls.run_schedule)
