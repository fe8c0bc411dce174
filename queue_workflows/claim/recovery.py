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
"""With a worker id behind it, the name of the advisory lock that the worker's session holds."""
MAX_CRASHES: Final = 3
"""Workers that a job may take down before it fails as poison."""
MAX_LAPSES: Final = 10
"""How often in a row a lease may lapse without evidence of its cause until its job is poison."""
MAX_FAILURES: Final = 10
"""Failures of the engine on one row, such as dispatches of an event, before the row is poison: with
the growing back-off, some minutes."""
_DATABASE_AWAY: Final = "its lease lapsed while the database was away"


# --- Rows on which the engine's own statements keep failing.


def ending(fail: Callable[[db.Connection, str, str], object]) -> row_isolation.Ending:
    """Return how to end a row that keeps raising: `fail(conn, id, error)` after MAX_FAILURES."""

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
"""How a job that keeps raising is ended, by table."""


# --- Leases that have lapsed, and workers whose session is gone.


def reclaim_lapsed(
    conn: db.Connection,
    table: job_tables.JobTable,
    rows: row_isolation.Isolation,
    *,
    had_s: float | None = None,
) -> list[Row]:
    """Take back up to 100 jobs whose lease has lapsed, counting a lapse of each; return their rows.

    A job is queued again at the front the first time, later after CRASH_BACKOFF_S times its lapses
    in a row; it has failed as poison at MAX_LAPSES, and is cancelled when its run is over. Locked
    rows are skipped. `had_s`: leaves out what `hand_back_lapsed` takes back. `rows`: sets aside
    rows that raise.
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
    """Take back up to 100 jobs with a lapsed lease that were renewed last over `had_s` ago.

    Counts nothing: the caller has had the database for `had_s` seconds only, and a worker whose
    renewals failed before that is no dead one. The jobs are queued at the front, or cancelled.
    Returns their rows. `rows`: as in `reclaim_lapsed`.
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
    """Take back up to 100 jobs whose worker's session is gone and that were not renewed `silent_s`.

    The session held an advisory lock for as long as it lived; a worker that never had a session is
    left to its lease. Counts a lapse of each, as `reclaim_lapsed` does. Returns the rows.
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
    """Return whether one more crash or lapse makes a job poison, so that it has to run alone."""
    last = MAX_CRASHES - 1
    return 0 < last <= crash_count or lapse_count >= MAX_LAPSES - 1


def reclaim_dead(
    conn: db.Connection, leases: Sequence[job_tables.Lease], *, evidence: str
) -> list[Row]:
    """Take back at once the jobs that a dead process held, of one table; return the changed rows.

    Counts a crash of each job, with `evidence` as the error. The job is queued again as after a
    lapse, or has failed as poison after MAX_CRASHES. A claim that is lost is left alone, as is one
    whose change the database refuses: see `row_isolation.change_all`.
    """
    if not leases:
        return []
    all_at_once = _crash(leases, evidence, None)
    one = functools.partial(charge, evidence=evidence)
    return db.run(conn, row_isolation.change_all(all_at_once, leases, one))


def charge(lease: job_tables.Lease, *, evidence: str) -> db.Script[Row | None]:
    """Give one claim up and count a crash, as `reclaim_dead` does; None: the claim is lost."""
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
        # Plain SQL may write progress that is too long for an event's detail.
        more["progress"] = payload.error_text(repr(row["progress"]))[:1000]
        detail = payload.encode(death | more | {"gpu": None}, "detail")
    job = row | {"worker_id": worker_id}
    noted = record.note(table, job, "death", detail=detail, error=how)
    if isinstance(refused := (yield from row_isolation.attempted(noted)), db.Error):
        _log.warning("the death of job %r is not recorded: %s", row["id"], str(refused).strip())


def _crash(
    leases: Sequence[job_tables.Lease], evidence: str, worker_id: str | None
) -> db.Script[list[Row]]:
    """Count a crash of the jobs of these claims; `worker_id`: the worker that reports it."""
    count = statements.recovery.count_crash[leases[0].table.name]
    given = _loss(evidence, MAX_CRASHES, worker_id)
    return count.script(**job_tables.fence_all(leases, **given))


def _loss(error: str | None, cap: int, worker: str | None = None) -> dict[str, Any]:
    """Return the parameters that count a crash or lapse; at `cap` of them a job is poison."""
    backoff_s = config.CRASH_BACKOFF_S.read()
    return {
        "worker": worker, "error": error, "cap": cap, "band": record.FRONT_PRIORITY,
        "backoff_s": backoff_s,
    }  # fmt: skip
