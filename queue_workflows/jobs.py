"""Ingest jobs by hand: list them, queue dead ones anew, cancel, delete. Hosts' door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import get_args

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.engine import ingest_jobs, job_tables
from queue_workflows.runtime import durations
from queue_workflows.types import JobStatus, JsonDict, Row

STATUSES: tuple[str, ...] = get_args(JobStatus)
BATCH = 500
"""Jobs that a transaction acts on, which keeps it far below the engine's 5 s."""


def list_jobs(
    *,
    queue: str | None = None,
    task_name: str | None = None,
    status: str | Iterable[str] | None = None,
    since: datetime | timedelta | None = None,
    key: str | None = None,
    limit: int | None = 100,
    conn: db.Connection | None = None,
) -> list[Row]:
    """Ingest jobs, the newest first, without their args and results (`history.get_job` has them).

    `since`: queued, started or ended from then on, or within that time. `key`: an idempotency, lock
    or partition key. `limit` None: all. Raises `InvalidConfig` (a ValueError) for what is none of
    these, such as a status that there is not or a `since` without a time zone. One transaction, no
    lock.
    """
    texts = {"queue": queue, "task_name": task_name, "key": key}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidConfig(f"{name} {text!r:.80} is no text")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise errors.InvalidConfig(f"limit {limit!r:.40}: a whole number from 0, or None")
    statuses = None if status is None else [status] if isinstance(status, str) else list(status)
    for one in statuses or ():
        if one not in STATUSES:
            raise errors.InvalidConfig(f"status {one!r}: it is one of {', '.join(STATUSES)}")
    if since is not None and not isinstance(since, (datetime, timedelta)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidConfig(
            f"since {since!r:.80}: a datetime with a time zone or a timedelta"
        )
    if isinstance(since, datetime) and since.tzinfo is None:
        raise errors.InvalidConfig(f"since {since}: say in which time zone")
    if isinstance(since, timedelta) and abs(since) > durations.MAX_SPAN:
        raise errors.InvalidConfig(f"since {since}: a time span has a hundred years at most")
    if not all(payload.is_storable(text) for text in texts.values() if text is not None):
        return []
    wanted = ingest_jobs.Filter(queue, task_name, statuses, since, key)
    with db.transaction(conn) as own:
        return ingest_jobs.find(own, wanted, limit)


def retry_jobs(
    ids: str | Iterable[str], *, by: str | None = None, conn: db.Connection | None = None
) -> list[JsonDict]:
    """Queue failed and cancelled jobs anew, each in a new generation with all its attempts.

    `ids`: one or several. Of each, in order: `id`, `outcome` (`queued`, `refused`, `unknown`),
    `status` as it was, `reason`. `by`: who, for the history. A transaction per BATCH, or the one of
    `conn`. Raises `InvalidConfig` (a ValueError) for an id that is no text.
    """
    return _each(ids, _retry, by, conn)


def cancel_jobs(
    ids: str | Iterable[str],
    *,
    running: bool = True,
    by: str | None = None,
    conn: db.Connection | None = None,
) -> list[JsonDict]:
    """Cancel what is queued at once, and ask what runs to end, unless `running` is false.

    As `retry_jobs`; `outcome`: `cancelled`, `asked to stop`, `refused`, `unknown`.
    """
    return _each(ids, _cancel if running else _cancel_waiting, by, conn)


def delete_jobs(
    ids: str | Iterable[str], *, by: str | None = None, conn: db.Connection | None = None
) -> list[JsonDict]:
    """Delete jobs that do not run; their history stays, with what each was, until it is pruned.

    As `retry_jobs`; `outcome`: `deleted`, `refused`, `unknown`.
    """
    return _each(ids, _delete, by, conn)


_Outcome = tuple[str, str | None]
"""An outcome and the reason of a refusal."""
_Act = Callable[[db.Connection, Mapping[str, Row]], Mapping[str, _Outcome]]
"""Takes the locked rows; says what became of each id."""


def _each(
    ids: str | Iterable[str], act: _Act, by: str | None, conn: db.Connection | None
) -> list[JsonDict]:
    done: list[JsonDict] = []
    asked = list(dict.fromkeys([ids] if isinstance(ids, str) else ids))
    for one in asked:
        if not isinstance(one, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidConfig(f"job {one!r:.80}: an id is a text")
    for some in _batches(asked):
        with db.transaction(conn) as own:
            if by is not None:
                ingest_jobs.name_actor(own, payload.error_text(by))
            known = [one for one in some if payload.is_storable(one)]
            rows = ingest_jobs.lock(own, known)
            told = act(own, rows)
            nodes = ingest_jobs.runs_of_node_jobs(own, [one for one in known if one not in rows])
            done += [_done(one, rows.get(one), told, nodes) for one in some]
    return done


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(ids), BATCH):
        yield ids[at : at + BATCH]


def _done(
    job_id: str, row: Row | None, told: Mapping[str, _Outcome], nodes: Mapping[str, str]
) -> JsonDict:
    if row is None:
        reason = (
            f"it is a node of run {nodes[job_id]}" if job_id in nodes else "there is no such job"
        )
        outcome, status = "unknown", None
    else:
        (outcome, reason), status = told[job_id], row["status"]
    return {"id": job_id, "outcome": outcome, "status": status, "reason": reason}


def _of(rows: Mapping[str, Row], *statuses: str) -> list[str]:
    return [job_id for job_id, row in rows.items() if row["status"] in statuses]


def _refused(rows: Mapping[str, Row], rule: str = "") -> dict[str, _Outcome]:
    return {job_id: ("refused", f"it is {row['status']}{rule}") for job_id, row in rows.items()}


def _retry(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    ended = _of(rows, "failed", "cancelled")
    chosen = [one for one in ended if rows[one]["generation"] < job_tables.LAST_GENERATION]
    taken = ingest_jobs.retry(conn, chosen) if chosen else set[str]()
    told = _refused(rows, ": only a failed or cancelled one is retried")
    told |= dict.fromkeys(ended, ("refused", "it is in its last generation: queue a new job"))
    told |= dict.fromkeys(chosen, ("queued", None))
    return told | dict.fromkeys(taken, ("refused", "another job has its idempotency key by now"))


def _cancel_waiting(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = _of(rows, "queued")
    ingest_jobs.cancel_queued(conn, chosen)
    return _refused(rows) | dict.fromkeys(chosen, ("cancelled", None))


def _cancel(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = _of(rows, "running")
    ingest_jobs.request_cancel(conn, chosen)
    return _cancel_waiting(conn, rows) | dict.fromkeys(chosen, ("asked to stop", None))


def _delete(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = [job_id for job_id, row in rows.items() if row["status"] != "running"]
    ingest_jobs.delete(conn, chosen)
    told = _refused(rows, ": cancel it first")
    return told | dict.fromkeys(chosen, ("deleted", None))
