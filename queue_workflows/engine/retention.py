"""Delete what has ended and is past its retention, one batch a call; the caller commits each."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import row_isolation

BLOCKS = 256
"""Pages of a table that a batch reads: 2 MiB, in which some thousands of jobs fit."""
RUNS = 20
"""Runs that a batch deletes at most; their nodes, answers and outbox rows go with them."""
RUNS_TIMEOUT = "60s"
"""Each may have MAX_NODES_PER_RUN nodes. Nobody waits for the rows that are locked meanwhile."""
ROWS = 5000


def _pages(first: int, days: float) -> dict[str, object]:
    return {"first": f"({first},0)", "end": f"({first + BLOCKS},0)", "days": days, "limit": RUNS}


def _set_timeout(conn: db.Connection) -> None:
    statements.retention.set_timeout(conn, timeout=RUNS_TIMEOUT)


def delete_jobs(conn: db.Connection, first: int, days: float, rows: row_isolation.Isolation) -> int:
    """Delete ingest jobs that ended so many days ago, in BLOCKS pages; return how many.

    `first`: the first of the pages. A queue's own `retention_days` stands before `days`; 0 keeps
    forever. A row that raises is set aside in `rows`.
    """
    duty = row_isolation.Duty(
        "deletion of ingest job",
        statements.retention.delete_jobs,
        statements.retention.find_jobs,
        statements.retention.delete_jobs_by_id,
        _stays,
        lambda: _pages(first, days),
        statements.retention.mark,
    )
    return len(rows.batch(conn, duty))


def delete_runs(conn: db.Connection, first: int, days: float, rows: row_isolation.Isolation) -> int:
    """Delete up to RUNS runs that ended so many days ago, in BLOCKS pages; return how many.

    0 days keep rows forever. A run with an open outbox row, or a node that has not ended, stays.
    A row that raises is set aside in `rows`.
    """
    duty = row_isolation.Duty(
        "deletion of run",
        statements.retention.delete_runs,
        statements.retention.find_runs,
        statements.retention.delete_runs_by_id,
        _stays,
        lambda: _pages(first, days),
        _set_timeout,
    )
    return len(rows.batch(conn, duty))


def _stays(conn: db.Connection, row_id: str, error: BaseException, failures: int) -> bool:
    """Return False: a row that cannot be deleted has no other end."""
    del conn, row_id, error, failures
    return False


def delete_ingest_events(conn: db.Connection, days: float) -> int:
    """Delete up to ROWS events of ingest jobs of that age; return how many."""
    statements.retention.mark(conn)
    return statements.retention.delete_ingest_events(conn, days=days, limit=ROWS)


def due(conn: db.Connection, *, run_days: float, job_days: float) -> dict[str, int]:
    """Return how many runs and ingest jobs would be deleted now: `{"runs": n, "jobs": n}`."""
    return {
        "runs": statements.retention.count_runs(conn, days=run_days),
        "jobs": statements.retention.count_jobs(conn, days=job_days),
    }
