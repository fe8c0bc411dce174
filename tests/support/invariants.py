"""Check the invariants with the statements of `audit`."""

from __future__ import annotations

from psycopg.pq import TransactionStatus

from queue_workflows import db
from queue_workflows.admin import audit
from tests.support import reused_backends

LIVENESS = 15
"""Time has to pass for it, and tests of single moments give it none."""


def broken(conn: db.Connection, *, slack_s: float = 0.0) -> list[str]:
    """Return what breaks an invariant now, one line each, within the retention of events.

    A node that waits under a terminal run counts without a sweep (invariant 8). `slack_s`: how long
    the transaction of a cancel may have been open after it set `finished_at`. Joins the transaction
    of `conn` if one is open.
    """
    if conn.info.transaction_status == TransactionStatus.IDLE:
        conn = reused_backends.shared.planned(conn)
    values = audit.parameters(conn, since_s=None, limit=None, commit_s=slack_s, sweep_s=0)
    return [
        f"invariant {invariant.number}: {found.id}: {found.text}"
        for invariant in audit.INVARIANTS
        if invariant.statement is not None and invariant.number != LIVENESS
        for found in audit.offenders(conn, invariant, values)
    ]
