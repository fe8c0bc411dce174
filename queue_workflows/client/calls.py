"""Define the methods of both clients as functions: what each takes, sends and returns.

Its length is that of the HTTP API: a function for each of its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NamedTuple, cast

from queue_workflows.client import events, job_states
from queue_workflows.client.transport import Call, path
from queue_workflows.types import JsonDict

PAGE: Final = 1000
WAIT_S: Final = 30.0
"""Seconds of one long poll; a wait is as many of these as it takes."""


class Keep:
    """The default of limits that stay as they are."""


KEEP: Final = Keep()


class Page(NamedTuple):
    """A part of a list; `cursor` is that of the next part, None on the last."""

    items: list[JsonDict]
    cursor: str | None


def _row(found: Any) -> JsonDict:
    if not isinstance(found, dict):
        raise TypeError
    return cast("JsonDict", found)


def _row_or_none(found: Any) -> JsonDict | None:
    return None if found is None else _row(found)


def _items(found: Any) -> list[JsonDict]:
    return cast("list[JsonDict]", _row(found)["items"])


def _node_page(found: Any) -> Page:
    return Page(_list("nodes")(found), _row(found).get("next"))


def _page(found: Any) -> Page:
    return Page(_items(found), _row(found).get("next"))


def _status(found: Any) -> job_states.JobStatus:
    return cast("job_states.JobStatus", _row(found))


def _text(name: str) -> Callable[[Any], str]:
    def read(found: Any) -> str:
        return str(_row(found)[name])

    return read


def _list(name: str) -> Callable[[Any], list[JsonDict]]:
    def read(found: Any) -> list[JsonDict]:
        return [*_row(found)[name]]

    return read


def _nothing(_: Any) -> None:
    return None


def _resumed(found: Any) -> bool:
    return bool(_row(found)["resumed"])


def _fired(found: Any) -> str | None:
    return _row(found)["id"]


def _given(**members: Any) -> JsonDict:
    return {name: value for name, value in members.items() if value is not None}


def _seconds(span: timedelta | float | None) -> float | None:
    return span.total_seconds() if isinstance(span, timedelta) else span


def _several(given: str | Iterable[str] | None) -> list[str] | None:
    return [given] if isinstance(given, str) else None if given is None else [*given]


def _instant(at: datetime | timedelta | None) -> str | None:
    if isinstance(at, timedelta):
        at = datetime.now(timezone.utc) - at
    return None if at is None else at.isoformat()


# --- jobs --------------------------------------------------------------------------------------


def enqueue(
    task_name: str,
    *,
    queue: str,
    lock_key: str,
    args: Mapping[str, Any] | None = None,
    priority: int | None = None,
    idempotency_key: str | None = None,
    partition_key: str | None = None,
    available_at: datetime | None = None,
    max_attempts: int | None = None,
) -> Call[str]:
    """Queue a job and return its id; of jobs with the same `lock_key` one runs at a time.

    While a job has the `idempotency_key`, its id is returned. Without a key a request whose
    answer was lost is not repeated, and raises `ServiceUnavailable`: the job may be there.
    `max_attempts`: default 5. Raises `IdempotencyClash`, `UnknownTask`, `UnknownQueue`,
    `ArgsRefused`, `InvalidJob` (all ValueErrors).
    """
    body = _given(
        queue=queue,
        task=task_name,
        args=None if args is None else dict(args),
        lock_key=lock_key,
        priority=priority,
        idempotency_key=idempotency_key,
        partition_key=partition_key,
        available_at=_instant(available_at),
        max_attempts=max_attempts,
    )
    repeatable = idempotency_key is not None
    return Call("POST", path("jobs", "trigger"), _text("job_id"), body=body, repeatable=repeatable)


def get_job(job_id: str) -> Call[JsonDict | None]:
    """Return a job with its attempts, their events and logs; None if there is none."""
    return Call("GET", path("jobs", job_id), _row_or_none, missing=True)


def job_status(job_id: str) -> Call[job_states.JobStatus]:
    """Return how far a job is; raise `UnknownJob` if there is none."""
    return job_state(job_id)


def job_state(
    job_id: str, *, wait_s: float = 0.0, etag: str | None = None
) -> Call[job_states.JobStatus]:
    """Return how far a job is; `wait_s`: at the latest then, else when it is final."""
    headers = {} if etag is None else {"if-none-match": etag}
    query = {"wait": wait_s or None}
    where = path("jobs", job_id, "status")
    return Call("GET", where, _status, query=query, headers=headers, wait_s=wait_s)


def cancel_job(job_id: str) -> Call[job_states.JobStatus]:
    """Cancel a queued job, or request that a running one ends; return how far it is."""
    return Call("POST", path("jobs", job_id, "cancel"), _status)


def retry_job(job_id: str) -> Call[job_states.JobStatus]:
    """Queue a failed or canceled job again; raise `InvalidConfig` for another one."""
    return Call("POST", path("jobs", job_id, "retry"), _status, repeatable=False)


def list_jobs(
    limit: int,
    cursor: str | None,
    *,
    queue: str | None,
    task_name: str | None,
    status: str | Iterable[str] | None,
    since: datetime | timedelta | None,
    key: str | None,
    text: str | None,
) -> Call[Page]:
    """Return a page of jobs."""
    query = {
        "queue": queue,
        "task": task_name,
        "status": _several(status),
        "since": _instant(since),
        "key": key,
        "q": text,
        "limit": limit,
        "cursor": cursor,
    }
    return Call("GET", path("jobs"), _page, query=query)


def job_events(job_id: str) -> Call[list[JsonDict]]:
    """Return the events of a job, the oldest first; raise `UnknownJob` if there is none."""
    return Call("GET", path("jobs", job_id, "events"), _list("events"))


def parts(
    limit: int, cursor: str | None, *, path_of: tuple[str, ...], name: str | None
) -> Call[Page]:
    """Return a page of the parts of a stream."""
    query = {"name": name, "limit": limit, "cursor": cursor}
    return Call("GET", path(*path_of, "parts"), _page, query=query)


def stream(path_of: tuple[str, ...], name: str | None, after: str | None) -> events.Follower:
    """Return the place in a stream of parts."""
    return events.Follower(path(*path_of, "stream"), {"name": name}, after, ends=True)


def explain_job(job_id: str) -> Call[JsonDict | None]:
    """Return why a job does not run, for each live worker; None if there is no such job."""
    return Call("GET", path("jobs", job_id, "why"), _row_or_none, missing=True)


# --- runs --------------------------------------------------------------------------------------


def submit(
    workflow_name: str,
    *,
    inputs: Mapping[str, Any] | None = None,
    priority: int = 100,
    idempotency_key: str | None = None,
) -> Call[JsonDict]:
    """Submit a run and return it.

    While a run has the `idempotency_key`, it is returned. Raises `UnknownWorkflow`,
    `InvalidWorkflow`, `ArgsRefused`, `InvalidPayload`, `IdempotencyClash`.
    """
    body = _given(
        workflow=workflow_name,
        inputs=dict(inputs or {}),
        priority=priority,
        idempotency_key=idempotency_key,
    )
    repeatable = idempotency_key is not None
    return Call("POST", path("runs"), _row, body=body, repeatable=repeatable)


def get_run(run_id: str) -> Call[JsonDict | None]:
    """Return a run, or None if there is none."""
    return Call("GET", path("runs", run_id), _row_or_none, missing=True)


def run_state(run_id: str, *, wait_s: float = 0.0) -> Call[JsonDict]:
    """Return a run; `wait_s`: at the latest then, else when it is over."""
    query = {"wait": wait_s or None}
    return Call("GET", path("runs", run_id), _row, query=query, wait_s=wait_s)


def list_runs(
    limit: int, cursor: str | None, *, status: str | None, workflow_name: str | None
) -> Call[Page]:
    """Return a page of runs."""
    query = {"status": status, "workflow": workflow_name, "limit": limit, "cursor": cursor}
    return Call("GET", path("runs"), _page, query=query)


def run_nodes(limit: int, cursor: str | None, *, run_id: str) -> Call[Page]:
    """Return a page of the nodes of a run with their attempts."""
    query = {"limit": limit, "cursor": cursor}
    return Call("GET", path("runs", run_id, "nodes"), _node_page, query=query)


def cancel_run(run_id: str) -> Call[JsonDict]:
    """Cancel a run with its nodes and return it; one that is over stays as it is."""
    return Call("POST", path("runs", run_id, "cancel"), _row)


def retry_run(run_id: str, *, from_node: str | None = None) -> Call[JsonDict]:
    """Run a finished run again, from a node or from those that did not complete; return it.

    Raises `UnknownJob`, and `InputRefused` (a ValueError) for a run that is not over.
    """
    where = path("runs", run_id, "retry")
    return Call("POST", where, _row, body={"from_node": from_node}, repeatable=False)


def answer(run_id: str, node_id: str, value: Any) -> Call[str]:
    """Answer an input node and return the submission's id; the first answer counts.

    Raises `UnknownJob`, and `InputRefused` (a ValueError) for a node that does not wait, and
    for an answer that it does not allow.
    """
    where = path("runs", run_id, "nodes", node_id, "answer")
    read = _text("submission_id")
    return Call("POST", where, read, body={"value": value}, repeatable=False)


def explain_run(run_id: str) -> Call[JsonDict | None]:
    """Return why each node of a run that does not run yet waits; None if there is no run."""
    return Call("GET", path("runs", run_id, "why"), _row_or_none, missing=True)


# --- workers, queues, schedules -----------------------------------------------------------------


def list_workers() -> Call[list[JsonDict]]:
    """Return the worker processes, and the switches without a worker."""
    return Call("GET", path("workers"), _items)


def list_queues() -> Call[list[JsonDict]]:
    """Return the queues with their depth, age, rates, limits and state."""
    return Call("GET", path("queues"), _items)


def list_schedules() -> Call[list[JsonDict]]:
    """Return the schedules, the next to fire first."""
    return Call("GET", path("schedules"), _items)


def enable(host: str, queue: str, *, reason: str | None = None) -> Call[JsonDict]:
    """Turn the workers of a machine and queue ON; return the control row."""
    return _switch("on", host, queue, reason=reason)


def disable(
    host: str,
    queue: str,
    *,
    stop_policy: str = "hard",
    reason: str | None = None,
    until: timedelta | float | None = None,
) -> Call[JsonDict]:
    """Turn the workers of a machine and queue OFF; `until`: seconds, or a span from now."""
    return _switch("off", host, queue, reason=reason, until=until, stop_policy=stop_policy)


def drain(
    host: str,
    queue: str,
    *,
    reason: str | None = None,
    until: timedelta | float | None = None,
) -> Call[JsonDict]:
    """Turn the workers of a machine and queue OFF once their running jobs have ended."""
    return _switch("drain", host, queue, reason=reason, until=until)


def _switch(
    verb: str,
    host: str,
    queue: str,
    *,
    reason: str | None,
    until: timedelta | float | None = None,
    stop_policy: str | None = None,
) -> Call[JsonDict]:
    """Switch workers `on`, `off` or `drain`; `until`: seconds or a span from now."""
    body = _given(reason=reason, for_s=_seconds(until), policy=stop_policy)
    return Call("POST", path("workers", host, queue, verb), _row, body=body)


def get_queue(queue: str) -> Call[JsonDict]:
    """Return a queue; raise `UnknownQueue` (a ValueError) if there is none."""
    return Call("GET", path("queues", queue), _row)


def pause_queue(
    queue: str, *, partition: str | None = None, until: timedelta | float | None = None
) -> Call[JsonDict]:
    """Stop claims of a queue, or of one partition; return its settings. Running jobs go on."""
    body = _given(partition=partition, for_s=_seconds(until))
    return Call("POST", path("queues", queue, "pause"), _row, body=body)


def resume_queue(queue: str, *, partition: str | None = None) -> Call[bool]:
    """Resume a paused queue; return False if it was not paused."""
    body = _given(partition=partition)
    where = path("queues", queue, "resume")
    return Call("POST", where, _resumed, body=body)


def limit_queue(
    queue: str,
    *,
    partition: str | None = None,
    max_running: int | Keep | None = KEEP,
    rate: str | Keep | None = KEEP,
    partition_max_running: int | Keep | None = KEEP,
    partition_rate: str | Keep | None = KEEP,
) -> Call[JsonDict]:
    """Limit a queue, or one partition of it; None removes a limit. Return its settings."""
    limits = {
        "max_running": max_running,
        "rate": rate,
        "partition_max_running": partition_max_running,
        "partition_rate": partition_rate,
    }
    body = {name: value for name, value in limits.items() if not isinstance(value, Keep)}
    body |= _given(partition=partition)
    return Call("POST", path("queues", queue, "limits"), _row, body=body)


def preview(name: str, *, days: float = 7.0, limit: int = 1000) -> Call[list[JsonDict]]:
    """Return the coming instants of a schedule; raise `UnknownSchedule` if there is none."""
    where = path("schedules", name, "preview")
    return Call("GET", where, _items, query={"days": days, "limit": limit})


def pause_schedule(name: str) -> Call[None]:
    """Stop a schedule until it is resumed."""
    return Call("POST", path("schedules", name, "pause"), _nothing)


def resume_schedule(name: str) -> Call[None]:
    """Let a paused schedule fire again."""
    return Call("POST", path("schedules", name, "resume"), _nothing)


def run_schedule(name: str) -> Call[str | None]:
    """Fire a schedule now; return the id of the job or run, None if it was held back."""
    where = path("schedules", name, "run")
    return Call("POST", where, _fired, repeatable=False)


# --- the service --------------------------------------------------------------------------------


def health() -> Call[JsonDict]:
    """Return that the service's process answers."""
    return Call("GET", "/health", _row)


def ready() -> Call[JsonDict]:
    """Return that the service can work; raise `ServiceUnavailable` with the reason if not."""
    return Call("GET", "/ready", _row)


def service_status() -> Call[JsonDict]:
    """Return the version and the uptime of the service."""
    return Call("GET", "/status", _row)
