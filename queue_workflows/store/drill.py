"""Time and trouble made by statement, for tests of hosts; nothing in production calls this."""

from __future__ import annotations

import datetime

from queue_workflows import db
from queue_workflows.engine import job_tables

_EARLIER = (
    b"UPDATE workflow_node_jobs SET available_at = available_at - %(by)s,"
    b" lease_expires_at = lease_expires_at - %(by)s"
    b" WHERE available_at IS NOT NULL OR lease_expires_at IS NOT NULL",
    b"UPDATE ingest_jobs SET available_at = available_at - %(by)s,"
    b" lease_expires_at = lease_expires_at - %(by)s"
    b" WHERE available_at IS NOT NULL OR lease_expires_at IS NOT NULL",
    b"UPDATE workflow_runs SET available_at = available_at - %(by)s WHERE available_at IS NOT NULL",
    b"UPDATE workflow_dispatch_events SET available_at = available_at - %(by)s"
    b" WHERE available_at IS NOT NULL AND processed_at IS NULL",
    b"UPDATE workflow_input_submissions SET available_at = available_at - %(by)s,"
    b" claimed_at = claimed_at - %(by)s WHERE status IN ('pending', 'processing')",
    b"UPDATE workflow_input_timeouts SET due_at = due_at - %(by)s",
    b"UPDATE workers SET last_seen = last_seen - %(by)s",
    b"UPDATE worker_heartbeats SET last_seen = last_seen - %(by)s",
)
_NEXT = (
    b"SELECT extract(epoch FROM min(at) - now())::float8 AS seconds FROM ("
    b"SELECT min(available_at) AS at FROM workflow_node_jobs"
    b" WHERE status = 'queued' AND available_at > %(after)s"
    b" UNION ALL SELECT min(available_at) FROM ingest_jobs"
    b" WHERE status = 'queued' AND available_at > %(after)s"
    b" UNION ALL SELECT min(available_at) FROM workflow_runs"
    b" WHERE status = 'queued' AND available_at > %(after)s"
    b" UNION ALL SELECT min(available_at) FROM workflow_dispatch_events"
    b" WHERE processed_at IS NULL AND available_at > %(after)s"
    b" UNION ALL SELECT min(available_at) FROM workflow_input_submissions"
    b" WHERE status = 'pending' AND available_at > %(after)s) waits"
)
_EXPIRE = {
    "workflow_node_jobs": b"UPDATE workflow_node_jobs SET lease_expires_at = now() - interval '1 s'"
    b" WHERE id = %s AND claim_no = %s AND status = 'running'",
    "ingest_jobs": b"UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s'"
    b" WHERE id = %s AND claim_no = %s AND status = 'running'",
}


def pass_time(conn: db.Connection, seconds: float) -> None:
    """Set every instant that is waited for, or judged by its age, back by this much."""
    for statement in _EARLIER:
        conn.execute(statement, {"by": datetime.timedelta(seconds=seconds)})


def next_due_s(conn: db.Connection, *, after: datetime.datetime) -> float | None:
    """Return the seconds until the first instant later than `after` at which something comes due.

    Negative when that instant has passed; None when nothing waits for a later one.
    """
    row = conn.execute(_NEXT, {"after": after}).fetchone()
    return row["seconds"] if row else None


def expire(conn: db.Connection, lease: job_tables.Lease) -> None:
    """Let a claim's lease lapse, as if its worker had died a lease ago."""
    conn.execute(_EXPIRE[lease.table.name], (lease.job_id, lease.claim_no))
