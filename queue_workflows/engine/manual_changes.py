"""Complete, fail, park and requeue jobs for an operator, whichever worker has the claim.

Each change is recorded as made by an operator, with the outbox event of a node. Each function
takes part in the transaction of its connection.
"""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row


def complete(
    conn: db.Connection,
    table: job_tables.JobTable,
    job_id: str,
    *,
    result: str,
    seconds: float | None = None,
    rss_mb: int | None = None,
) -> Row | None:
    """Complete a job with a result (JSON text); return its row, or None if it was over.

    `rss_mb`: the peak memory of a node.
    """
    if table.in_run:
        return statements.manual_changes.complete_node(
            conn, job=job_id, result=result, seconds=seconds, rss=rss_mb
        )
    _lock_ingest_job(conn, job_id)
    return statements.manual_changes.complete_ingest_job(
        conn, job=job_id, result=result, seconds=seconds
    )


def fail(
    conn: db.Connection,
    table: job_tables.JobTable,
    job_id: str,
    *,
    error: str,
    seconds: float | None = None,
) -> Row | None:
    """Fail a job; return its row, or None if it was over."""
    if table.in_run:
        return statements.manual_changes.fail_node(conn, job=job_id, error=error, seconds=seconds)
    _lock_ingest_job(conn, job_id)
    return statements.manual_changes.fail_ingest_job(conn, job=job_id, error=error, seconds=seconds)


def _lock_ingest_job(conn: db.Connection, job_id: str) -> None:
    """Lock a job, as the statement that follows records the event only of a job that runs.

    A trigger records the others. Without the lock the statement could see the job before its claim
    and change it after it.
    """
    statements.manual_changes.lock_ingest_job(conn, job=job_id)
