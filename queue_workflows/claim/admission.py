"""Admit delayed jobs whose time has come, and waiters of lock keys that nobody serves."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import db
from queue_workflows.claim import job_tables, recovery, row_isolation
from queue_workflows.db import statements

BATCH = 1_000
"""Jobs of a table that one transaction blocks, or lets wait for their keys again."""
BATCHES = 3
"""Transactions of one sweep for each table and direction; the next sweep does the rest."""


def _promotion(table: job_tables.JobTable) -> row_isolation.Duty:
    return row_isolation.Duty(
        f"promotion of {table.name}",
        statements.promotion.due_jobs[table.name],
        statements.promotion.promote_jobs[table.name],
        recovery.ENDING[table.name],
    )


PROMOTIONS = (
    _promotion(job_tables.NODE_JOBS),
    _promotion(job_tables.INGEST_JOBS),
    row_isolation.Duty(
        "promotion of workflow_runs",
        statements.promotion.due_runs,
        statements.promotion.promote_runs,
        recovery.ending(
            lambda conn, run, error: statements.runs.fail(conn, run_id=run, error=error)
        ),
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


def in_batches(conn: db.Connection, block: Callable[..., int], queues: list[str]) -> int:
    """Block jobs by a statement of `unserved_jobs`, or let them wait again; return how many.

    `queues`: the served ones. Opens one transaction a batch. Their commits admit the next jobs.
    """
    count = 0
    for table in statements.JOB_TABLES:
        for _ in range(BATCHES):
            blocked = block(conn, table=table, queues=queues, batch=BATCH)
            if not blocked:
                break
            count += blocked
    return count
