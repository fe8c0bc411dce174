"""Admit delayed jobs whose time has come, and waiters of lock keys that nobody serves."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import db
from queue_workflows.claim import job_tables, recovery, row_isolation
from queue_workflows.db import statements
from queue_workflows.types import Row

BATCH = 1_000
"""Jobs of a table that one transaction blocks, or lets wait for their keys again."""
BATCHES = 3
"""Transactions of one sweep for each table and direction; the next sweep does the rest."""
_MOST_COUNTED = 10_000


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


def block_unserved(conn: db.Connection, queues: list[str]) -> int:
    """Block the jobs that keep a lock key from others and are in none of these served queues.

    Return how many; 0 if nobody waits for such a key in one of `queues`. Opens one transaction a
    batch. Their commits admit the next jobs that wait.
    """
    return _in_batches(conn, statements.unserved_jobs.block_unserved, queues)


def unblock_served(conn: db.Connection, queues: list[str]) -> int:
    """Let the blocked jobs of these served queues wait for their keys again; return how many.

    Opens one transaction a batch. Their commits admit whichever job is first.
    """
    return _in_batches(conn, statements.unserved_jobs.unblock_served, queues)


def _in_batches(conn: db.Connection, block: Callable[..., int], queues: list[str]) -> int:
    count = 0
    for table in statements.JOB_TABLES:
        for _ in range(BATCHES):
            blocked = block(conn, table=table, queues=queues, batch=BATCH)
            if not blocked:
                break
            count += blocked
    return count


def count_by_queue(conn: db.Connection, stale_s: float) -> list[Row]:
    """Return the queues with jobs that are blocked as unserved: queue, n (at most 10,000 each).

    At most 100 queues of each table, by name. Those that are `served` now are left out: their jobs
    stay blocked until the next sweep.
    """
    found: dict[str, int] = {}
    now_served = statements.unserved_jobs.served(conn, stale_s=stale_s)
    for count_by_queue in statements.unserved_jobs.count_by_queue.values():
        for row in count_by_queue(conn, most=_MOST_COUNTED):
            found[row["queue"]] = found.get(row["queue"], 0) + row["n"]
    return [
        {"queue": queue, "n": count}
        for queue, count in sorted(found.items())
        if queue not in now_served
    ]
