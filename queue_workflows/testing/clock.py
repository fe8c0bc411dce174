"""Let time pass for what waits in the database, for tests of apps."""

from __future__ import annotations

import datetime

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables


def pass_time(conn: db.Connection, seconds: float) -> None:
    """Set every time that is waited for, or compared by age, back by so many seconds."""
    by = {"by": datetime.timedelta(seconds=seconds)}
    for text in statements.test_clock.move_jobs.values():
        conn.execute(text, by)
    conn.execute(statements.test_clock.move_runs, by)
    conn.execute(statements.test_clock.move_outbox, by)
    conn.execute(statements.test_clock.move_answers, by)
    conn.execute(statements.test_clock.move_input_timeouts, by)
    conn.execute(statements.test_clock.move_workers, by)
    conn.execute(statements.test_clock.move_heartbeats, by)


def next_due_s(conn: db.Connection, *, after: datetime.datetime) -> float | None:
    """Return the seconds until the first time later than `after` at which something is due.

    Negative if it has passed; None if nothing waits for a later one.
    """
    row = conn.execute(statements.test_clock.next_due, {"after": after}).fetchone()
    return row["seconds"] if row else None


def expire(conn: db.Connection, lease: job_tables.Lease) -> None:
    """Let a claim's lease expire, as if its worker had died a lease ago."""
    values = {"job": lease.job_id, "claim": lease.claim_no}
    conn.execute(statements.test_clock.expire_lease[lease.table.name], values)
