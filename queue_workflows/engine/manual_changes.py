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
    parameters = {"job": job_id, "result": result, "seconds": seconds, "rss": rss_mb}
    if table.in_run:
        return conn.execute(statements.manual_changes.complete_node, parameters).fetchone()
    _lock_ingest_job(conn, job_id)
    return conn.execute(statements.manual_changes.complete_ingest_job, parameters).fetchone()


def fail(
    conn: db.Connection,
    table: job_tables.JobTable,
    job_id: str,
    *,
    error: str,
    seconds: float | None = None,
) -> Row | None:
    """Fail a job; return its row, or None if it was over."""
    parameters = {"job": job_id, "error": error, "seconds": seconds}
    if table.in_run:
        return conn.execute(statements.manual_changes.fail_node, parameters).fetchone()
    _lock_ingest_job(conn, job_id)
    return conn.execute(statements.manual_changes.fail_ingest_job, parameters).fetchone()


def _lock_ingest_job(conn: db.Connection, job_id: str) -> None:
    """Lock a job, as the statement that follows records the event only of a job that runs.

    A trigger records the others. Without the lock the statement could see the job before its claim
    and change it after it.
    """
    conn.execute(statements.manual_changes.lock_ingest_job, {"job": job_id})


def park(conn: db.Connection, job_id: str) -> Row | None:
    """Let a node wait for an answer; return its row, or None if it was over or waits already."""
    return conn.execute(statements.manual_changes.park_node, {"job": job_id}).fetchone()


def requeue_node(conn: db.Connection, job_id: str) -> Row | None:
    """Queue a running node at the front and count a retry of the watchdog.

    Returns its row, or None if it does not run.
    """
    return conn.execute(statements.manual_changes.requeue_node, {"job": job_id}).fetchone()


def requeue_all_nodes(conn: db.Connection) -> list[Row]:
    """Queue every running node at the front, counting nothing; return the changed rows."""
    return conn.execute(statements.manual_changes.requeue_all_nodes).fetchall()


def requeue_of_host(
    conn: db.Connection, table: job_tables.JobTable, host_label: str, queue: str
) -> list[Row]:
    """Queue a host's running jobs of a queue at the front, counting nothing; the changed rows."""
    parameters = {"host": host_label, "queue": queue}
    return conn.execute(
        statements.manual_changes.requeue_of_host[table.name], parameters
    ).fetchall()
