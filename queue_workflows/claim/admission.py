"""Admit delayed jobs that have become due, and block or unblock jobs that no worker serves."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import db
from queue_workflows.claim import job_tables, recovery, row_isolation
from queue_workflows.db import statements

BATCH = 1_000
"""The most jobs of a table that one transaction blocks or unblocks."""
BATCHES = 3
"""The most transactions of one sweep for each table and direction; the next one does the rest."""


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
    """Admit all delayed jobs and runs that have become due, in batches; return how many.

    The commits notify workers and orchestrators. A row that raises is set aside in `rows` (by
    default only for this call), and the others are processed.
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
    """Run a statement that blocks or unblocks jobs in batches; return how many it changed.

    `queues` are the served queues. Each batch is a transaction, whose commit admits the next jobs.
    """
    count = 0
    for table in statements.JOB_TABLES:
        for _ in range(BATCHES):
            blocked = block(conn, table=table, queues=queues, batch=BATCH)
            if not blocked:
                break
            count += blocked
    return count
