"""Promote delayed jobs and runs whose time has come, and waiters that a lock queue has missed."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, poison, row_isolation


def _jobs(table: job_tables.JobTable, rest: row_isolation.Ending) -> row_isolation.Duty:
    return row_isolation.Duty(
        f"promotion of {table.name}",
        statements.promotion.promote_jobs[table.name],
        statements.promotion.due_jobs[table.name],
        statements.promotion.promote_these_jobs[table.name],
        rest,
    )


PROMOTIONS = (
    _jobs(job_tables.NODE_JOBS, poison.node_job),
    _jobs(job_tables.INGEST_JOBS, poison.ingest_job),
    row_isolation.Duty(
        "promotion of workflow_runs",
        statements.promotion.promote_runs,
        statements.promotion.due_runs,
        statements.promotion.promote_these_runs,
        poison.run,
    ),
)


def promote_due(conn: db.Connection, rows: row_isolation.Isolation | None = None) -> int:
    """Promote all delayed jobs and runs whose time has come, in batches; return how many.

    Their commits wake workers and orchestrators.
    A row that raises is set aside in `rows` (None: for this call), and the others are processed.
    """
    isolation = rows or row_isolation.Isolation()
    total = 0
    for duty in PROMOTIONS:
        while done := isolation.batch(conn, duty):
            total += len(done)
            if len(done) < row_isolation.PICKED:
                break
    return total
