"""Let time pass for what waits in the database, for tests of apps."""

from __future__ import annotations

import datetime

from queue_workflows import db
from queue_workflows.claim import job_tables
from queue_workflows.db import statements


def pass_time(conn: db.Connection, seconds: float) -> None:
    """Set every time that is waited for, or compared by age, back by so many seconds."""
    by = {"by": datetime.timedelta(seconds=seconds)}
    for move_jobs in statements.test_clock.move_jobs.values():
        move_jobs(conn, **by)
    statements.test_clock.move_runs(conn, **by)
    statements.test_clock.move_outbox(conn, **by)
    statements.test_clock.move_answers(conn, **by)
    statements.test_clock.move_input_timeouts(conn, **by)
    statements.test_clock.move_workers(conn, **by)
    statements.test_clock.move_heartbeats(conn, **by)


def next_due_s(conn: db.Connection, *, after: datetime.datetime) -> float | None:
    """Return the seconds until the first time later than `after` at which something is due.

    Negative if it has passed; None if nothing waits for a later one.
    """
    return statements.test_clock.next_due(conn, after=after)


def expire(conn: db.Connection, lease: job_tables.Lease) -> None:
    """Let a claim's lease expire, as if its worker had died a lease ago."""
    statements.test_clock.expire_lease[lease.table.name](
        conn, job=lease.job_id, claim=lease.claim_no
    )
