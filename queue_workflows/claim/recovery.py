"""Take jobs back from dead workers, counting a crash, and from lapsed leases, counting a lapse."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from queue_workflows import config, db, errors
from queue_workflows.claim import job_tables, record, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
LIFE_LOCK: Final = "queue_workflows.worker."
"""Followed by a worker id, this is the name of the advisory lock that its session holds."""
MAX_CRASHES: Final = 3
"""After so many crashes of a job's process, the job fails as poison."""
MAX_LAPSES: Final = 10
"""After so many lapses of its lease in a row, without a known cause, a job fails as poison."""
MAX_FAILURES: Final = 10
"""How often in a row the engine may fail on one row, such as an event to dispatch, before the row
fails as poison. With the growing back-off, that takes some minutes."""
_DATABASE_AWAY: Final = "its lease lapsed while the database was away"


# --- Rows on which the engine's own statements keep failing.


def ending(fail: Callable[[db.Connection, str, str], object]) -> row_isolation.Ending:
    """Return a function that calls `fail(conn, id, error)` for a row after MAX_FAILURES."""

    def end(conn: db.Connection, row_id: str, error: BaseException, failures: int) -> bool:
        if failures < MAX_FAILURES:
            return False
        why = f"poison: the engine failed {failures} times on it: {row_isolation.described(error)}"
        fail(conn, row_id, payload.error_text(why))
        return True

    return end


def _ending_of(table: job_tables.JobTable) -> row_isolation.Ending:
    fail = statements.manual_changes.fail[table.name]
    return ending(lambda conn, job, error: fail(conn, job=job, error=error, seconds=None))


ENDING: Final = {
    table.name: _ending_of(table) for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
}
"""For each table, the function that fails a job which keeps raising."""


# --- Leases that have lapsed, and workers whose session is gone.


def reclaim_lapsed(
    conn: db.Connection,
    table: job_tables.JobTable,
    rows: row_isolation.Isolation,
    *,
    had_s: float | None = None,
) -> list[Row]:
    """Take back up to 100 jobs whose lease has lapsed, count a lapse of each, return their rows.

    At its first lapse a job is queued at the front; later it waits for CRASH_BACKOFF_S times its
    lapses in a row. It fails as poison at MAX_LAPSES, and is cancelled if its run has ended. Locked
    rows are skipped, rows that raise are set aside in `rows`. With `had_s`, skips the jobs that
    `hand_back_lapsed` takes back.
    """
    duty = row_isolation.Duty(
        f"reclaim in {table.name}",
        statements.recovery.lapsed[table.name],
        statements.recovery.count_lapse[table.name],
        ENDING[table.name],
        _loss(None, MAX_LAPSES) | {"had_s": had_s, "before": False},
    )
    return rows.batch(conn, duty)


def hand_back_lapsed(
    conn: db.Connection,
    table: job_tables.JobTable,
    rows: row_isolation.Isolation,
    *,
    had_s: float,
) -> list[Row]:
    """Take back up to 100 jobs with a lapsed lease that were last renewed over `had_s` ago.

    The caller has had a connection for only `had_s` seconds. Renewals before that may have failed
    because of the database, so no lapse is counted. The jobs are queued at the front, or cancelled.
    Returns their rows. For `rows` see `reclaim_lapsed`.
    """
    detail = payload.encode({"reason": _DATABASE_AWAY}, "reason")
    given: dict[str, Any] = {
        "had_s": had_s, "before": True, "detail": detail, "band": record.FRONT_PRIORITY,
        "counted": False, "host": None, "queue": None,
    }  # fmt: skip
    duty = row_isolation.Duty(
        f"hand-back in {table.name}",
        statements.recovery.lapsed[table.name],
        statements.recovery.requeue[table.name],
        ENDING[table.name],
        given,
    )
    return rows.batch(conn, duty)


def reclaim_gone(
    conn: db.Connection,
    table: job_tables.JobTable,
    rows: row_isolation.Isolation,
    silent_s: float,
) -> list[Row]:
    """Take back up to 100 jobs not renewed for `silent_s` whose worker's session has ended.

    The end of the session released its advisory lock. Jobs of a worker that never had the lock are
    left to their leases. Counts a lapse of each, as `reclaim_lapsed` does. Returns the rows.
    """
    evidence = f"its session is gone, and it has not renewed for {silent_s:g} s"
    duty = row_isolation.Duty(
        f"reclaim of gone workers in {table.name}",
        statements.recovery.gone[table.name],
        statements.recovery.count_lapse[table.name],
        ENDING[table.name],
        _loss(evidence, MAX_LAPSES) | {"silent_s": silent_s, "lock": LIFE_LOCK},
    )
    return rows.batch(conn, duty)


# --- Processes that were seen to die.


def is_last(crash_count: int, lapse_count: int) -> bool:
    """Return whether a job fails at the next crash or lapse, so that it has to run alone."""
    last = MAX_CRASHES - 1
    return 0 < last <= crash_count or lapse_count >= MAX_LAPSES - 1


def reclaim_dead(
    conn: db.Connection, leases: Sequence[job_tables.Lease], *, evidence: str
) -> list[Row]:
    """Take back at once a dead process's jobs of one table; return the changed rows.

    Counts a crash of each job, with `evidence` as the error. The job is queued again as after a
    lapse, or fails as poison after MAX_CRASHES. Skips a claim that is lost, or whose change the
    database refuses (see `row_isolation.change_all`).
    """
    if not leases:
        return []
    all_at_once = _crash(leases, evidence, None)
    one = functools.partial(charge, evidence=evidence)
    return db.run(conn, row_isolation.change_all(all_at_once, leases, one))


def charge(lease: job_tables.Lease, *, evidence: str) -> db.Script[Row | None]:
    """Give a claim up and count a crash, as `reclaim_dead` does; return None if it is lost."""
    rows = yield from _crash([lease], evidence, lease.worker_id)
    return rows[0] if rows else None


def note_death(
    table: job_tables.JobTable,
    row: Row,
    worker_id: str | None,
    death: JsonDict,
    how: str,
) -> db.Script[None]:
    """Record a job's `death` event; if the database refuses it, log that and continue."""
    beat = row["heartbeat_at"]
    more = {"progress": row["progress"], "last_beat": beat and beat.isoformat()}
    try:
        detail = payload.encode(death | more, "detail")
    except errors.InvalidPayload:
        # Plain SQL may have written progress that is too long for an event's detail.
        more["progress"] = payload.error_text(repr(row["progress"]))[:1000]
        detail = payload.encode(death | more | {"gpu": None}, "detail")
    job = row | {"worker_id": worker_id}
    noted = record.note(table, job, "death", detail=detail, error=how)
    if isinstance(refused := (yield from row_isolation.attempted(noted)), db.Error):
        _log.warning("the death of job %r is not recorded: %s", row["id"], str(refused).strip())


def _crash(
    leases: Sequence[job_tables.Lease], evidence: str, worker_id: str | None
) -> db.Script[list[Row]]:
    """Count a crash of these claims' jobs; `worker_id` is the worker that reports it, if any."""
    count = statements.recovery.count_crash[leases[0].table.name]
    given = _loss(evidence, MAX_CRASHES, worker_id)
    return count.script(**job_tables.fence_all(leases, **given))


def _loss(error: str | None, cap: int, worker: str | None = None) -> dict[str, Any]:
    """Return the parameters that count a crash or lapse; at `cap` of them a job fails."""
    backoff_s = config.CRASH_BACKOFF_S.read()
    return {
        "worker": worker, "error": error, "cap": cap, "band": record.FRONT_PRIORITY,
        "backoff_s": backoff_s,
    }  # fmt: skip
