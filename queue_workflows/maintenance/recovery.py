"""Recover jobs of both families: claims whose lease has lapsed, and jobs whose run is over."""

from __future__ import annotations

import logging
from collections.abc import Callable

from queue_workflows import config, db
from queue_workflows.engine import cancellation, job_tables, recovery, row_isolation
from queue_workflows.runtime import log_context
from queue_workflows.types import Row

_log = logging.getLogger(__name__)


def recover_at_start(pause: Callable[[float], bool]) -> bool:
    """Reclaim lapsed and ownerless jobs before an orchestrator starts; touch no fresh lease.

    Counts no crash: nobody knows whether the database was available until now. Tries
    NODE_POOL_RECOVERY_RETRIES times and calls `pause(NODE_POOL_RECOVERY_BACKOFF_S)` between two
    tries. Returns False if `pause` returns True, which means to stop. Raises the last try's error.
    """
    left = max(1, config.NODE_POOL_RECOVERY_RETRIES.read())
    while True:
        left -= 1
        try:
            reclaim(had_s=0.0)
            cancel_orphans()
        except db.Error as error:
            if not left:
                raise
            _log.warning("recovery at start, %d tries left: %s", left, error)
            if pause(config.NODE_POOL_RECOVERY_BACKOFF_S.read()):
                return False
        else:
            return True


def reclaim(
    conn: db.Connection | None = None,
    rows: row_isolation.Isolation | None = None,
    *,
    had_s: float | None = None,
) -> None:
    """Take back all jobs whose lease has lapsed, one transaction per batch.

    Rows that raise are set aside in `rows`; None: for this call only. `had_s`: for how many seconds
    the caller has had the database without a break. A claim that was renewed last before that
    counts no crash, as its worker could not renew either. None: every lapsed claim counts one.
    """
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
            if had_s is not None:
                while taken := recovery.excuse_lapsed(own, table, had_s=had_s, rows=kept):
                    _log_lapsed(taken, "lease lapsed while the database was away")
            while taken := recovery.reclaim_lapsed(own, table, had_s=had_s, rows=kept):
                _log_lapsed(taken, "lease lapsed")


def reclaim_lost_sessions(
    conn: db.Connection, silent_s: float, rows: row_isolation.Isolation
) -> None:
    """Take back jobs whose worker's session has ended and that were not renewed for `silent_s`."""
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        for row in recovery.reclaim_gone(conn, table, silent_s, rows=rows):
            _log.warning(
                "job %s: the session of its worker is gone, now %s",
                row["id"],
                row["status"],
                extra=log_context.ids_of_job(row),
            )


def cancel_orphans(
    conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> None:
    """Cancel the jobs that were inserted while their run ended, one transaction per batch.

    `rows`: as in `reclaim`.
    """
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        while kept.batch(own, cancellation.ORPHANS):
            pass


def _log_lapsed(rows: list[Row], what: str) -> None:
    for row in rows:
        if "node_id" in row:
            name = f"node {row['node_id']} of run {row['run_id']}"
        else:
            name = f"ingest job {row['id']}"
        _log.warning("%s: %s, now %s", name, what, row["status"], extra=log_context.ids_of_job(row))
