"""Complete, fail or cancel jobs and reopen runs for an operator, whichever worker has a claim.

Each change is recorded as made by an operator, with the outbox event of a node. Each function
takes part in the transaction of its connection.
"""

from __future__ import annotations

from typing import Any

from queue_workflows import db, errors
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row


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
    if not table.in_run:
        _lock(conn, table, job_id)
    given: dict[str, Any] = {"job": job_id, "result": result, "seconds": seconds, "rss": rss_mb}
    return statements.manual_changes.complete[table.name](conn, **given)


def fail(
    conn: db.Connection,
    table: job_tables.JobTable,
    job_id: str,
    *,
    error: str,
    seconds: float | None = None,
) -> Row | None:
    """Fail a job; return its row, or None if it was over."""
    if not table.in_run:
        _lock(conn, table, job_id)
    change = statements.manual_changes.fail[table.name]
    return change(conn, job=job_id, error=error, seconds=seconds)


def _lock(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> None:
    """Lock a job until the transaction ends, so that the next statement sees it as it is.

    That of an ingest job records the event only of a job that runs, as a trigger records the
    others. One that is handed back between two statements would miss both.
    """
    statements.cancellation.lock_job[table.name](conn, job=job_id)


def cancel(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> Row | None:
    """Cancel a job that waits, or request that a running one ends; return its row.

    Returns None if there is no such job, and if it is over.
    """
    _lock(conn, table, job_id)
    row = statements.cancellation.cancel_waiting[table.name](conn, job=job_id)
    return row or statements.cancellation.request_end[table.name](conn, job=job_id)


def lock_over(conn: db.Connection, run_id: str) -> Row:
    """Lock a run that is to run again in a new generation; return its row.

    Raises `UnknownJob` for no such run, and `InvalidConfig` for one that is not over or is in its
    last generation.
    """
    run = statements.runs.lock(conn, run_id=run_id)
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    if run["status"] not in TERMINAL_RUN_STATUSES:
        raise errors.InvalidConfig(
            f"run {run_id!r} is {run['status']}: only a finished one is retried"
        )
    if run["generation"] > job_tables.LAST_GENERATION - 2:
        raise errors.InvalidConfig(
            f"run {run_id!r} is in generation {run['generation']}, the last one that can be "
            "stored: submit it again as a new run"
        )
    return run


def reopen_run(conn: db.Connection, run_id: str) -> Row:
    """Queue a failed or cancelled run in a new generation; return its row.

    Completed nodes keep their outputs. Raises as `lock_over` does, and `InvalidConfig` for a
    completed run.
    """
    if lock_over(conn, run_id)["status"] == "completed":
        raise errors.InvalidConfig(f"run {run_id!r} is completed: name the node to retry from")
    reopened = statements.runs.reopen(conn, run_id=run_id)
    assert reopened is not None
    return reopened
