"""Return claimed jobs to the queue without counting anything against them."""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import claim_isolation, job_tables
from queue_workflows.types import Row

FRONT_PRIORITY = 10
"""The priority that work taken back from a worker gets at least (the contract's figure)."""


def hand_back(
    conn: db.Connection,
    lease: job_tables.Lease,
    *,
    reason: str,
    front: bool = False,
    after_s: float = 0.0,
) -> Row | None:
    """Give a claim up: the job is queued again, or cancelled if it or its run was.

    `front`: it gets at least FRONT_PRIORITY. `after_s`: how long it waits first. Returns the row;
    None: the claim is lost.
    """
    rows = _hand_back(conn, [lease], reason=reason, front=front, after_s=after_s)
    return rows[0] if rows else None


def hand_back_all(
    conn: db.Connection, leases: Sequence[job_tables.Lease], *, reason: str
) -> list[Row]:
    """Give up these claims of one table as `hand_back` does; return the changed rows.

    They may belong to several workers, since each queue of a pool has its own. Each job keeps its
    priority. A claim that is lost is left alone, as is one whose change the database refuses: see
    `claim_isolation.change_each`.
    """
    if not leases:
        return []
    return claim_isolation.change_all(
        conn,
        lambda: _hand_back(conn, leases, reason=reason),
        lambda: leases,
        lambda lease: hand_back(conn, lease, reason=reason),
    )


def release_strays(
    conn: db.Connection, table: job_tables.JobTable, worker_id: str, keep: Sequence[str]
) -> list[Row]:
    """Hand back what a worker has claimed without knowing it; return the changed rows.

    Such claims come from commits whose reply was lost. `keep`: the ids of the jobs that it knows.
    """
    parameters = {"worker": worker_id, "keep": list(keep)}
    rows = conn.execute(statements.handback.strays[table.name], parameters).fetchall()
    leases = [job_tables.lease_of(table, row) for row in rows]
    return hand_back_all(conn, leases, reason="claimed unknowingly")


def _hand_back(
    conn: db.Connection,
    leases: Sequence[job_tables.Lease],
    *,
    reason: str,
    front: bool = False,
    after_s: float = 0.0,
) -> list[Row]:
    parameters = {
        "jobs": [lease.job_id for lease in leases],
        "claims": [lease.claim_no for lease in leases],
        "workers": [lease.worker_id for lease in leases],
        "detail": payload.encode({"reason": reason}, "reason"),
        "front": front,
        "band": FRONT_PRIORITY,
        "after_s": after_s,
    }
    statement = statements.handback.hand_back[leases[0].table.name]
    return conn.execute(statement, parameters).fetchall()
