"""Check the ingest jobs that an app queues, and encode them for the INSERT, before any write."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from queue_workflows import config, errors, tasks
from queue_workflows.dag import payload, policy
from queue_workflows.runtime import trace_context
from queue_workflows.types import JobId, Row

T = TypeVar("T")
DEFAULT_PRIORITY = 100
MAX_KEY_BYTES = 1000
"""The longest key, as UTF-8. Keys are indexed, and an index entry takes 2,704 bytes at most."""


class NewJob(NamedTuple):
    """The arguments of `jobs.enqueue`."""

    task_name: str
    queue: str | None = None
    reason: str = "tick"
    priority: int | None = None
    args: Mapping[str, Any] | None = None
    idempotency_key: str | None = None
    idempotency_window_s: float | None = None
    lock_key: str | None = None
    partition_key: str | None = None
    available_at: datetime.datetime | None = None
    max_attempts: int | None = None
    backoff: float | Mapping[str, Any] | None = None
    timeout_s: float | None = None
    headers: Mapping[str, str] | None = None


_OPTIONS = slice(NewJob._fields.index("idempotency_key"), None)
_NO_OPTIONS = (None,) * len(NewJob._fields[_OPTIONS])


class Batch(NamedTuple):
    """The jobs of one INSERT: the prefix of their ids, a JSON array of rows, their keys."""

    prefix: str
    jobs: str
    keys: list[str | None]

    def ids(self, existing: Iterable[Row]) -> list[JobId]:
        """Return the ids of the jobs, in order.

        `existing`: `place`, `id` and `same` for each job whose idempotency key another job has.
        Raises `IdempotencyClash` where that job is not the same; nothing was written then.
        """
        ids = job_ids(self.prefix, len(self.keys))
        for row in existing:
            if not row["same"]:
                raise self._clash(row["place"], row["id"])
            ids[row["place"] - 1] = JobId(row["id"])
            ids[row["place"] - 1].created = False
        return ids

    def _clash(self, place: int, job_id: str) -> errors.IdempotencyClash:
        key = self.keys[place - 1]
        if job_id.startswith(self.prefix):
            other = int(job_id[len(self.prefix) :], 16)
            text = f"jobs {other - 1} and {place - 1} of one call share the idempotency key {key!r}"
            return errors.IdempotencyClash(f"{text} and differ in task, queue or args")
        return errors.IdempotencyClash(
            f"idempotency key {key!r} is that of job {job_id!r}, which has another task, queue or "
            "args: use a key of its own for each payload",
            job_id,
        )


def new_job_prefix() -> str:
    """Return the first 24 characters of the ids of new jobs; `job_ids` adds the other twelve.

    Such an id is a UUID of version 8 (RFC 9562): 74 random bits, then the job's place. The ids of
    one INSERT are consecutive, so they go to the same pages of their index.
    """
    drawn = os.urandom(10).hex()
    variant = "89ab"[int(drawn[15], 16) & 3]
    return f"{drawn[:8]}-{drawn[8:12]}-8{drawn[12:15]}-{variant}{drawn[16:19]}-"


def job_ids(prefix: str, count: int) -> list[JobId]:
    """Return the ids of `count` jobs of one INSERT; the last 12 hex digits number them from 1."""
    return [JobId(f"{prefix}{place:012x}") for place in range(1, count + 1)]


def with_task_defaults(job: NewJob) -> NewJob:
    """Return the job with its task's queue, priority and lock key where the caller gave none.

    Adds the trace context of the caller's span, if there is one, to its headers.

    Raises `InvalidJob` if the task or the queue is not a text.
    """
    for name in ("task_name", "queue"):
        given = getattr(job, name)
        if given is not None and not isinstance(given, str):
            raise errors.InvalidJob(f"{name!r} must be a text, not {given!r:.80}")
    headers = trace_context.with_current(job.headers)
    if headers is not job.headers:
        job = job._replace(headers=headers)
    defaults = tasks.row_defaults(job.task_name)
    found = {name: value for name, value in defaults.items() if getattr(job, name) is None}
    return job._replace(**found) if found else job


def has_options(job: NewJob) -> bool:
    """Return whether the job has more than a task, a queue, a reason, a priority and args."""
    return job[_OPTIONS] != _NO_OPTIONS


def batches(jobs: Iterable[NewJob], *, whole: bool = False) -> list[Batch]:
    """Return the jobs as batches of about `payload.PART_BYTES` each; no batch for no jobs.

    Returns one batch if `whole`, or if any job has an idempotency key: a clash must undo all jobs.
    Raises as `base_columns` and `encode_args` do; the message names the job if there are several.
    """
    rows = [with_task_defaults(job) for job in jobs]
    texts = [_row(rows[0])] if len(rows) == 1 else _each(_row, rows)
    keys = [job.idempotency_key for job in rows]
    whole = bool(texts) and (whole or any(key is not None for key in keys))
    found: list[Batch] = []
    for part in [texts] if whole else payload.parts(texts):
        end = len(keys) if whole else len(part)
        found.append(Batch(new_job_prefix(), f"[{','.join(part)}]", keys[:end]))
    return found


def from_keywords(
    defaults: Mapping[str, Any], jobs: Iterable[Mapping[str, Any]] | None, args: Any
) -> Iterator[NewJob]:
    """Yield one job per member of `jobs` (its keywords) or of `args`, filled up from `defaults`.

    Raises `InvalidJob` for both or neither, and for a member that cannot be a job.
    """
    if (jobs is None) == (args is None):
        raise errors.InvalidJob(
            "pass either jobs or args: the keywords of each job, or only the args of each"
        )
    for place, given in enumerate(({"args": each} for each in args) if jobs is None else jobs):
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidJob(f"job {place} is not a mapping of keywords: {given!r:.80}")
        if unknown := [name for name in given if name not in NewJob._fields]:
            raise errors.InvalidJob(
                f"job {place}: {unknown[0]!r:.80} is none of {', '.join(NewJob._fields)}"
            )
        found = {**defaults, **given}
        if found.get("idempotency_key") is None and "idempotency_window_s" not in given:
            found.pop("idempotency_window_s", None)
        if found.get("task_name") is None:
            raise errors.InvalidJob(f"job {place} has no task_name, and the call names none")
        yield NewJob(**found)


_OF_ONE_JOB = (errors.InvalidJob, errors.ArgsRefused, errors.InvalidPayload)
"""Errors about one job; if the call has several jobs, the job's position is added."""


def _each(make: Callable[[T], str], given: Iterable[T]) -> list[str]:
    """Return the result of `make` for each member; an error names its index, from 0."""
    texts: list[str] = []
    for place, one in enumerate(given):
        try:
            texts.append(make(one))
        except _OF_ONE_JOB as error:
            raise type(error)(f"job {place}: {error}") from None
    return texts


def _row(job: NewJob) -> str:
    """Return a job as a JSON object with a member per column."""
    columns, where = base_columns(job), f"job of task {job.task_name!r}"
    if has_options(job):
        given = job._asdict()
        columns |= {
            name: checked(given[name], name, where)
            for name, checked in _CHECKS.items()
            if given[name] is not None
        }
        if job.idempotency_window_s is not None and job.idempotency_key is None:
            raise errors.InvalidJob(f"{where}: 'idempotency_window_s' without an 'idempotency_key'")
        columns |= _failure_policy(job, where)
    args = encode_args(job.task_name, job.args)
    return f'{payload.encode(columns, where)[:-1]}, "args": {args}}}'


def base_columns(job: NewJob) -> dict[str, Any]:
    """Return the checked columns of a job, without its args and its options; default priority 100.

    Raises `UnknownQueue`, `UnknownTask` or `InvalidJob`, all of them ValueErrors.
    """
    task_name, queue, reason, priority = job[:4]
    if queue is not None:
        config.check_queue(queue, config.get_config().ingest_queues)
    known = config.get_config().ingest_task_map
    if task_name not in known:
        raise errors.UnknownTask(
            f"unknown ingest task {task_name!r}: registered are "
            f"{', '.join(sorted(known)) or 'none'}; register_ingest_task() adds one"
            f"{errors.hint(task_name, known)}"
        )
    if queue is None:
        raise errors.InvalidJob(
            f"job of task {task_name!r}: no queue is named, neither by the caller nor by the task"
        )
    if not isinstance(reason, str) or not payload.is_storable(reason):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidJob(
            f"job of task {task_name!r}: 'reason' {reason!r:.80} is not a string"
        )
    is_whole = isinstance(priority, int) and type(priority) is not bool
    if priority is None:
        priority = DEFAULT_PRIORITY
    elif not is_whole or priority not in policy.PRIORITIES:
        raise errors.InvalidJob(
            f"job of task {task_name!r}: 'priority' must be a whole number from "
            f"{policy.PRIORITIES[0]} to {policy.PRIORITIES[-1]}, not {priority!r:.40}"
        )
    return {"task_name": task_name, "queue": queue, "reason": reason, "priority": priority}


def encode_args(task_name: str, args: Mapping[str, Any] | None) -> str:
    """Return the args of a job as JSON text.

    Raises `ArgsRefused` or `InvalidPayload` (ValueErrors).
    """
    taken = tasks.check_args(task_name, {} if args is None else args)
    return payload.encode(taken, f"args of task {task_name!r}")


def encode_args_of_each(task_name: str, args: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the args of several jobs of a task as JSON texts; raise as `encode_args` does.

    The message has the index of the job in the call, from 0.
    """
    return _each(functools.partial(encode_args, task_name), args)


# --- Options: keys, times, headers and the failure policy.


def _failure_policy(job: NewJob, where: str) -> dict[str, Any]:
    """Return the columns of the failure policy, which `policy` checks as it checks a node's."""
    most_attempts: Any = job.max_attempts
    if most_attempts is None and job.backoff is None and job.timeout_s is None:
        return {}
    asked: dict[str, Any] = {"backoff": job.backoff, "timeout_s": job.timeout_s}
    if most_attempts is not None:
        limit = policy.MAX_RETRIES + 1
        if type(most_attempts) is bool or most_attempts not in range(1, limit + 1):
            raise errors.InvalidJob(
                f"{where}: 'max_attempts' must be a whole number from 1 to {limit}, not "
                f"{most_attempts!r:.40}"
            )
        asked["retries"] = most_attempts - 1
    try:
        found = policy.read(asked, {}, where) or {}
    except errors.InvalidWorkflow as error:
        raise errors.InvalidJob(str(error)) from None
    columns = policy.columns(found, is_input=False)
    if "retries" in found:
        # `policy.columns` leaves out one attempt, the default. It would let the task's policy win.
        columns["policy"] = {**columns.get("policy", {}), "retries": found["retries"]}
    return columns


def _key(given: Any, name: str, where: str) -> str:
    if not isinstance(given, str) or not given or not payload.is_storable(given):
        raise errors.InvalidJob(f"{where}: {name!r} must be a text, not {given!r:.80}")
    if len(given.encode()) > MAX_KEY_BYTES:
        raise errors.InvalidJob(f"{where}: {name!r} is longer than {MAX_KEY_BYTES:,} bytes")
    return given


def _window_s(given: Any, name: str, where: str) -> float:
    try:
        seconds = float("nan") if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not 0 <= seconds <= policy.MAX_WAIT_S:
        raise errors.InvalidJob(
            f"{where}: {name!r} must be 0 to {policy.MAX_WAIT_S:.0f} s, not {given!r:.40}"
        )
    return seconds


def _instant(given: Any, name: str, where: str) -> str:
    if not isinstance(given, datetime.datetime) or given.utcoffset() is None:
        raise errors.InvalidJob(
            f"{where}: {name!r} must be a datetime with a time zone, not {given!r:.80}"
        )
    try:
        return given.astimezone(datetime.timezone.utc).isoformat()
    except OverflowError:
        raise errors.InvalidJob(f"{where}: {name!r} is outside of the years 1 to 9999") from None


def _headers(given: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise errors.InvalidJob(f"{where}: {name!r} must be a dict of texts, not {given!r:.80}")
    members = dict(cast("Mapping[Any, Any]", given))
    for key, member in members.items():
        if not isinstance(key, str) or not isinstance(member, str):
            raise errors.InvalidJob(f"{where}: {name!r}: {key!r:.80} or its value is not a string")
    return members


_CHECKS: dict[str, Callable[[Any, str, str], Any]] = {
    "idempotency_key": _key,
    "idempotency_window_s": _window_s,
    "lock_key": _key,
    "partition_key": _key,
    "available_at": _instant,
    "headers": _headers,
}
