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


def breaches(
    conn: db.Connection, since_s: float | None = None, *, limit: int | None = None, **more: float
) -> dict[int, list[audit.Offender]]:
    """Return what breaks each broken invariant as `audit` finds it; each one can be checked.

    `since_s`: of the last seconds alone. `more`: `sweep_s` and `commit_s`, the patience of `audit`.
    """
    values = audit.parameters(conn, since_s=since_s, limit=limit, **more)
    found: dict[int, list[audit.Offender]] = {}
    for invariant in audit.INVARIANTS:
        if invariant.statement is not None:
            outcome = audit.check(conn, invariant, values)
            assert not isinstance(outcome, str), f"invariant {invariant.number}: {outcome}"
            if outcome:
                found[invariant.number] = outcome
    return found


def stuck(conn: db.Connection) -> list[str]:
    """Return the running runs that nothing moves forward, when a sweep should have come by now."""
    values = audit.parameters(conn, since_s=None, limit=None, commit_s=0, sweep_s=0)
    return [found.text for found in audit.offenders(conn, audit.INVARIANTS[LIVENESS - 1], values)]
