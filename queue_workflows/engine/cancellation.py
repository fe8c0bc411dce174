"""Cancel jobs: one that waits at once, one that runs by a request, those of a run that is over.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, poison, row_isolation
from queue_workflows.types import Row


def cancel_job(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> Row | None:
    """Cancel a job that waits, or request that a running one ends; return its row.

    Returns None if there is no such job, and if it is over.
    """
    parameters = {"job": job_id}
    # Without the lock, a job that is handed back between the two statements would miss both.
    statements.cancellation.lock_job[table.name](conn, **parameters)
    waiting = (
        statements.cancellation.cancel_waiting_node
        if table.in_run
        else statements.cancellation.cancel_waiting_ingest_job
    )
    row = waiting(conn, **parameters)
    if row is not None:
        return row
    return statements.cancellation.request_end[table.name](conn, **parameters)


ORPHANS = row_isolation.Duty(
    "cancel of node job",
    statements.cancellation.cancel_orphans,
    statements.cancellation.orphans,
    statements.cancellation.cancel_these_orphans,
    poison.node_job,
)
"""Cancels nodes that wait although their run is over, and leaves out rows that raise."""
