"""Define `Client`, which calls the HTTP service and waits for each reply."""

from __future__ import annotations

import builtins
import functools
import sys
import time
from collections.abc import Iterable, Iterator
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


class Client:
    """The service at `url`: a context manager, or call `close`.

    `token`: default QUEUE_WORKFLOWS_TOKEN. `timeout_s`: of a request, besides the time for which
    the service waits on request. `retries`: how often a request is repeated that got no answer, or
    503, and changes nothing twice. `http`: an `httpx.Client` of your own, which stays open.
    Methods raise the errors of the Python API, `AccessDenied`, `RequestRefused`,
    `ServiceUnavailable` and `ServiceFailed`.
    """

    health = verbs.Sync(calls.health)
    ready = verbs.Sync(calls.ready)
    status = verbs.Sync(calls.service_status)

    def __init__(
        self,
        url: str = "http://127.0.0.1:8081",
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        retries: int = transport.RETRIES,
        http: httpx.Client | None = None,
    ) -> None:
        self._conn = transport.connection(url, token, timeout_s, retries)
        self._owned = http is None
        self._http = http or httpx.Client()
        self.jobs = Jobs(self)
        self.runs = Runs(self)
        self.workers = Workers(self)
        self.queues = Queues(self)
        self.schedules = Schedules(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._owned:
            self._http.close()

    def events(
        self,
        *,
        kind: str | None = None,
        job_id: str | None = None,
        run_id: str | None = None,
        queue: str | None = None,
        last_event_id: str | None = None,
    ) -> Iterator[events.Event]:
        """Yield changes of jobs and runs from now on, or from those behind `last_event_id`.

        Ends never by itself: an interrupted stream is resumed, without a gap and without repeating
        what was yielded. Raises `EventsLost` if too much happened meanwhile, `ServiceUnavailable`
        if the service cannot be reached `retries` times in a row.
        """
        wanted = {"kind": kind, "job_id": job_id, "run_id": run_id, "queue": queue}
        yield from self.stream(events.Follower(transport.path("events"), wanted, last_event_id))

    def stream(self, follow: events.Follower) -> Iterator[events.Event]:
        """Yield the events of a stream, which is resumed when it is interrupted."""
        while True:
            try:
                yield from self._stream(follow)
                follow.failures = 0
            except errors.ServiceUnavailable:
                follow.failures += 1
                if follow.failures > self._conn.retries:
                    raise
            if follow.over:
                return
            time.sleep(follow.parser.retry_s)

    def _stream(self, follow: events.Follower) -> Iterator[events.Event]:
        follow.opened()
        timeout = httpx.Timeout(self._conn.timeout_s, read=events.SILENCE_S)
        try:
            with self._http.stream(
                "GET",
                self._conn.url + follow.path,
                params=follow.query,
                headers={**self._conn.headers, **follow.headers},
                timeout=timeout,
                follow_redirects=False,
            ) as response:
                if not response.is_success:
                    response.read()
                    raise problems.of_response(response)
                for received in response.iter_bytes():
                    yield from follow.feed(received)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise problems.of_transport(error) from None

    def call(self, call: transport.Call[T]) -> T:
        """Return what a request returns; repeat it if that is safe."""
        tries = 0
        while True:
            tries += 1
            try:
                request = transport.request(self._conn, self._http, call)
                got = self._http.send(request, follow_redirects=False)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                got = error
            after_s = transport.pause_s(self._conn, call, tries, got)
            if after_s is None:
                return transport.read(call, got)
            time.sleep(after_s)


class Jobs(verbs.SyncGroup):
    """Jobs outside of runs."""

    enqueue = verbs.Sync(calls.enqueue)
    get = verbs.Sync(calls.get_job)
    status = verbs.Sync(calls.job_status)
    cancel = verbs.Sync(calls.cancel_job)
    retry = verbs.Sync(calls.retry_job)
    events = verbs.Sync(calls.job_events)
    explain = verbs.Sync(calls.explain_job)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> job_states.JobStatus:
        """Return how far a job is once it is succeeded, failed or canceled.

        Raises `WaitTimeout` (a TimeoutError) after `timeout_s`; None: waits for ever.
        """
        return self.end_of(request_loops.job_end(job_id, timeout_s))

    def list(
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
        return self.all(limit, page)

    def parts(
        self, job_id: str, *, name: str | None = None, after: str | None = None
    ) -> builtins.list[events.Part]:
        """Return what the handler of a job has streamed, of `name` if given, with reset marks.

        `after`: the `id` of the last part that is known. Raises `UnknownJob`.
        """
        return self.parts_of(("jobs", job_id), name, after)

    def follow(
        self, job_id: str, *, name: str | None = None, after: str | None = None
    ) -> Iterator[events.Part]:
        """Yield what the handler of a job streams, as `parts` returns it, until its job has ended.

        An interrupted stream is resumed, without a gap and without repeating what was yielded.
        Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
        """
        return self.parts_from(("jobs", job_id), name, after)


class Runs(verbs.SyncGroup):
    """Runs of workflows."""

    submit = verbs.Sync(calls.submit)
    get = verbs.Sync(calls.get_run)
    cancel = verbs.Sync(calls.cancel_run)
    retry = verbs.Sync(calls.retry_run)
    answer = verbs.Sync(calls.answer)
    explain = verbs.Sync(calls.explain_run)

    def wait(self, run_id: str, *, timeout_s: float | None = None) -> JsonDict:
        """Return a run once it is completed, failed or cancelled.

        Raises `UnknownJob`, and `WaitTimeout` (a TimeoutError) after `timeout_s`; None: waits for
        ever.
        """
        return self.end_of(request_loops.run_end(run_id, timeout_s))

    def nodes(self, run_id: str, *, limit: int = sys.maxsize) -> builtins.list[JsonDict]:
        """Return up to `limit` nodes of a run with their attempts: the workflow's, then the items'.

        Raises `UnknownJob` if there is no run.
        """
        size = min(limit, calls.PAGE)  # of all pages: it decides whether they have logs
        return self.all(limit, lambda _, after: calls.run_nodes(size, after, run_id=run_id))[:limit]

    def list(
        self, *, status: str | None = None, workflow_name: str | None = None, limit: int = 50
    ) -> builtins.list[JsonDict]:
        """Return up to `limit` runs, the newest first, each with its node counts as `nodes`."""
        page = functools.partial(calls.list_runs, status=status, workflow_name=workflow_name)
        return self.all(limit, page)

    def parts(
        self, run_id: str, node_id: str, *, name: str | None = None, after: str | None = None
    ) -> builtins.list[events.Part]:
        """Return what a node of a run has streamed, of `name` if given, with reset marks.

        `after`: the `id` of the last part that is known. Raises `UnknownJob`.
        """
        return self.parts_of(("runs", run_id, "nodes", node_id), name, after)

    def follow(
        self, run_id: str, node_id: str, *, name: str | None = None, after: str | None = None
    ) -> Iterator[events.Part]:
        """Yield what a node of a run streams, as `parts` returns it, until its job has ended.

        An interrupted stream is resumed, without a gap and without repeating what was yielded.
        Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
        """
        return self.parts_from(("runs", run_id, "nodes", node_id), name, after)


class Workers(verbs.SyncGroup):
    """Worker processes, and the switches of machines and queues."""

    list = verbs.Sync(calls.list_workers)
    enable = verbs.Sync(calls.enable)
    disable = verbs.Sync(calls.disable)
    drain = verbs.Sync(calls.drain)


class Queues(verbs.SyncGroup):
    """Queues with their depth, limits and pauses."""

    list = verbs.Sync(calls.list_queues)
    get = verbs.Sync(calls.get_queue)
    pause = verbs.Sync(calls.pause_queue)
    resume = verbs.Sync(calls.resume_queue)
    limit = verbs.Sync(calls.limit_queue)


class Schedules(verbs.SyncGroup):
    """Schedules, of the code and of the database."""

    list = verbs.Sync(calls.list_schedules)
    preview = verbs.Sync(calls.preview)
    pause = verbs.Sync(calls.pause_schedule)
    resume = verbs.Sync(calls.resume_schedule)
    run_now = verbs.Sync(calls.run_schedule)
