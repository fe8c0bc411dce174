"""What a host says of the ingest jobs that it queues, checked before any write."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors, tasks
from queue_workflows.dag import payload, policy
from queue_workflows.types import JobId

KEY_BYTES = 1000
"""The longest key, as UTF-8. Keys are indexed, and an entry of an index takes 2,704 bytes."""
PRIORITY = 100


class Job(NamedTuple):
    """The keywords of `enqueue_ingest_job`."""

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


_OPTIONS = slice(Job._fields.index("idempotency_key"), None)
_NONE = (None,) * len(Job._fields[_OPTIONS])


class Call(NamedTuple):
    """Jobs of one statement: what their ids begin with, a JSON array of them, their keys."""

    prefix: str
    jobs: str
    keys: list[str | None]

    def ids(self, found: Iterable[Sequence[Any]]) -> list[JobId]:
        """The jobs' ids in order; `found`: (place, id, same) of each whose key another job has.

        Raises `IdempotencyClash` where that job is not the same; nothing was written then.
        """
        ids = [JobId(f"{self.prefix}{place:012x}") for place in range(1, len(self.keys) + 1)]
        for place, job_id, same in found:
            if not same:
                raise self._clash(place, job_id)
            ids[place - 1] = JobId(job_id)
            ids[place - 1].created = False
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


def drawn_prefix() -> str:
    """What ids of one call begin with; their last 12 digits are the job's place, from 1.

    The ids are UUIDs of version 8 (RFC 9562): 74 random bits of the call, then the row's place.
    Ids that follow one another meet the same pages of their index, which random ones do not.
    """
    drawn = os.urandom(10).hex()
    variant = "89ab"[int(drawn[15], 16) & 3]
    return f"{drawn[:8]}-{drawn[8:12]}-8{drawn[12:15]}-{variant}{drawn[16:19]}-"


def settled(job: Job) -> Job:
    """The job with the queue, priority and lock key of its task where the caller named none.

    Raises `InvalidJob` for a task or a queue that is no text.
    """
    for name in ("task_name", "queue"):
        given = getattr(job, name)
        if given is not None and not isinstance(given, str):
            raise errors.InvalidJob(f"{name!r} must be a text, not {given!r:.80}")
    named = tasks.row_defaults(job.task_name)
    found = {name: value for name, value in named.items() if getattr(job, name) is None}
    if job.priority is None:
        found.setdefault("priority", PRIORITY)
    return job._replace(**found)


def has_options(job: Job) -> bool:
    """Whether it has more than a task, a queue, a reason, a priority and args."""
    return job[_OPTIONS] != _NONE


def plain(job: Job) -> dict[str, Any]:
    """The columns of a job without options, its args as JSON text.

    Raises before any write: `UnknownQueue`, `UnknownTask`, `InvalidJob`, `InvalidPayload`, all of
    them ValueErrors.
    """
    return {**columns(job), "args": _args(job)}


def calls(jobs: Iterable[Job], *, whole: bool = False) -> list[Call]:
    """The jobs as statements, of about `payload.PART_BYTES` each; none for none.

    One statement when they must be `whole` by themselves, or any has an idempotency key, for which
    they may have to be undone. Raises as `plain` does, and names the job where there are several.
    """
    rows = [settled(job) for job in jobs]
    texts = list(_rows(rows))
    keys = [job.idempotency_key for job in rows]
    whole = bool(texts) and (whole or any(key is not None for key in keys))
    found: list[Call] = []
    for part in [texts] if whole else payload.parts(texts):
        end = len(keys) if whole else len(part)
        found.append(Call(drawn_prefix(), f"[{','.join(part)}]", keys[:end]))
    return found


def merged(
    defaults: Mapping[str, Any], jobs: Iterable[Mapping[str, Any]] | None, args: Any
) -> Iterator[Job]:
    """One `Job` per member of `jobs` (its keywords, before the defaults) or of `args`, not both."""
    if (jobs is None) == (args is None):
        raise errors.InvalidJob("name either jobs or args: a mapping a job, or each job's args")
    for place, given in enumerate(({"args": each} for each in args) if jobs is None else jobs):
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidJob(f"job {place} is no mapping of keywords: {given!r:.80}")
        if unknown := [name for name in given if name not in Job._fields]:
            raise errors.InvalidJob(
                f"job {place}: {unknown[0]!r:.80} is none of {', '.join(Job._fields)}"
            )
        found = {**defaults, **given}
        if found.get("idempotency_key") is None and "idempotency_window_s" not in given:
            found.pop("idempotency_window_s", None)
        if found.get("task_name") is None:
            raise errors.InvalidJob(f"job {place} has no task_name, and the call names none")
        yield Job(**found)


_NAMES_PLACE = (errors.InvalidJob, errors.ArgsRefused, errors.InvalidPayload)
"""Errors about one job; of several jobs the message says which one."""


def _rows(jobs: Sequence[Job]) -> Iterator[str]:
    """Each job as a JSON object whose members are columns."""
    for place, job in enumerate(jobs):
        try:
            yield _row(job)
        except _NAMES_PLACE as error:
            if len(jobs) == 1:
                raise
            raise type(error)(f"job {place}: {error}") from None


def _row(job: Job) -> str:
    found = columns(job)
    where = f"job of task {job.task_name!r}"
    if has_options(job):
        found |= _options(job, where)
    return f'{payload.encode(found, where)[:-1]}, "args": {_args(job)}}}'


def _options(job: Job, where: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        if (given := getattr(job, name)) is not None:
            columns[name] = check(given, name, where)
    if job.idempotency_window_s is not None and job.idempotency_key is None:
        raise errors.InvalidJob(f"{where}: 'idempotency_window_s' without an 'idempotency_key'")
    return columns | _policy(job, where)


def columns(job: Job) -> dict[str, Any]:
    """Return the columns of a job without its args and options, checked.

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
        )
    if queue is None:
        raise errors.InvalidJob(
            f"job of task {task_name!r}: no queue is named, neither by the caller nor by the task"
        )
    if not isinstance(reason, str) or not payload.is_storable(reason):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidJob(f"job of task {task_name!r}: 'reason' {reason!r:.80} is no text")
    whole = isinstance(priority, int) and type(priority) is not bool
    if not whole or priority not in policy.PRIORITIES:
        raise errors.InvalidJob(
            f"job of task {task_name!r}: 'priority' must be a whole number from "
            f"{policy.PRIORITIES[0]} to {policy.PRIORITIES[-1]}, not {priority!r:.40}"
        )
    return {"task_name": task_name, "queue": queue, "reason": reason, "priority": priority}


def _args(job: Job) -> str:
    return args_text(job.task_name, job.args)


def args_text(task_name: str, args: Mapping[str, Any] | None) -> str:
    """The args of a job as JSON text; `ArgsRefused` and `InvalidPayload` (ValueErrors)."""
    taken = tasks.check_args(task_name, {} if args is None else args)
    return payload.encode(taken, f"args of task {task_name!r}")


def args_texts(task_name: str, args: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the args of several jobs of a task as JSON texts; raise as `args_text` does.

    The message names the place of the job in the call, from 0.
    """
    texts: list[str] = []
    for place, one in enumerate(args):
        try:
            texts.append(args_text(task_name, one))
        except _NAMES_PLACE as error:
            raise type(error)(f"job {place}: {error}") from None
    return texts


def _policy(job: Job, where: str) -> dict[str, Any]:
    """What decides on failures, by the code that reads a node's."""
    asked = {"backoff": job.backoff, "timeout_s": job.timeout_s}
    if (job.max_attempts, job.backoff, job.timeout_s) == (None, None, None):
        return {}
    if job.max_attempts is not None:
        most = policy.MAX_RETRIES + 1
        if type(job.max_attempts) is bool or job.max_attempts not in range(1, most + 1):
            raise errors.InvalidJob(
                f"{where}: 'max_attempts' must be a whole number from 1 to {most}, not "
                f"{job.max_attempts!r:.40}"
            )
        asked["retries"] = job.max_attempts - 1
    try:
        found = policy.read(asked, {}, where) or {}
    except errors.InvalidWorkflow as error:
        raise errors.InvalidJob(str(error)) from None
    columns = policy.columns(found, is_input=False)
    if "retries" in found:
        # A row that says nothing has one attempt as well; this one says it.
        columns["policy"] = {**columns.get("policy", {}), "retries": found["retries"]}
    return columns


def _key(given: Any, name: str, where: str) -> str:
    if not isinstance(given, str) or not given or not payload.is_storable(given):
        raise errors.InvalidJob(f"{where}: {name!r} must be a text, not {given!r:.80}")
    if len(given.encode()) > KEY_BYTES:
        raise errors.InvalidJob(f"{where}: {name!r} is longer than {KEY_BYTES:,} bytes")
    return given


def _window(given: Any, name: str, where: str) -> float:
    try:
        seconds = float("nan") if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not 0 <= seconds <= policy.MAX_WAIT_S:
        raise errors.InvalidJob(
            f"{where}: {name!r} must be 0 to {policy.MAX_WAIT_S:.0f} s, not {given!r:.40}"
        )
    return seconds


def _moment(given: Any, name: str, where: str) -> str:
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
            raise errors.InvalidJob(f"{where}: {name!r}: {key!r:.80} or its value is no text")
    return members


_CHECKS: dict[str, Callable[[Any, str, str], Any]] = {
    "idempotency_key": _key,
    "idempotency_window_s": _window,
    "lock_key": _key,
    "partition_key": _key,
    "available_at": _moment,
    "headers": _headers,
}
