"""Return claimed jobs to the queue without counting anything against them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import claim_isolation, job_tables
from queue_workflows.types import Row

UNKNOWN_MAX_S = 20.0
"""The longest wait, in seconds, between two claims of a node that workers do not know."""
UNKNOWN_BOUNDS = 10
"""After so many UNKNOWN_NODE_S a node fails although live workers that may know it are left."""
FRONT_PRIORITY = 10
"""The priority that work taken back from a worker gets at least (the contract's figure)."""


def hand_back(
    lease: job_tables.Lease,
    *,
    reason: str,
    front: bool = False,
    after_s: float = 0.0,
) -> db.Script[Row | None]:
    """Give a claim up: the job is queued again, or cancelled if it or its run was.

    `front`: it gets at least FRONT_PRIORITY. `after_s`: how long it waits first. Returns the row;
    None: the claim is lost.
    """
    rows = yield from _hand_back([lease], {"reason": reason}, front=front, after_s=after_s)
    return rows[0] if rows else None


def leave_to_others(lease: job_tables.Lease, error: str) -> db.Script[Row | str | None]:
    """Hand back a node that its worker does not know; return the row, or the error if it must fail.

    It fails after UNKNOWN_NODE_S if no live worker is left that may know it, after UNKNOWN_BOUNDS
    times that if none reports it, and at once if workers do not report: then nobody can say who
    else is there. The wait before the next claim grows from 1 s to UNKNOWN_MAX_S. Workers of
    `keep_for` may claim it at once. None: the claim is lost.
    """
    stale_s = config.STALE_WORKER_AFTER_S.read()
    found = yield from statements.handback.unknown.script(job=lease.job_id, stale_s=stale_s)
    if found is None or config.DISABLE_WORKER_HEARTBEAT.read():
        return error
    bound_s = config.UNKNOWN_NODE_S.read() * (UNKNOWN_BOUNDS if found["others"] else 1)
    if not found["known"] and (found["age_s"] or 0.0) >= bound_s:
        met = ", ".join(sorted({*found["workers"], lease.worker_id}))
        nobody = "no worker that met it" if found["others"] else "no live worker"
        return f"{error}; {nobody} has known it for {bound_s:g} s; these met it: {met}"
    keep_for = found["keep_for"]
    # A worker that has met it would often win the race for it at the end of a shorter wait.
    grown_s = UNKNOWN_MAX_S if found["known"] and keep_for else 1.0 + found["times"]
    after_s = min(UNKNOWN_MAX_S, grown_s)
    detail = {"reason": error, "unknown": True}
    rows = yield from _hand_back([lease], detail, after_s=after_s, error=error, keep_for=keep_for)
    return rows[0] if rows else None


def hand_back_all(leases: Sequence[job_tables.Lease], *, reason: str) -> db.Script[list[Row]]:
    """Give up these claims of one table as `hand_back` does; return the changed rows.

    They may belong to several workers, since each queue of a pool has its own. Each job keeps its
    priority. A claim that is lost is left alone, as is one whose change the database refuses: see
    `claim_isolation.change_each`.
    """
    if not leases:
        return []
    return (
        yield from claim_isolation.change_all(
            _hand_back(leases, {"reason": reason}),
            leases,
            lambda lease: hand_back(lease, reason=reason),
        )
    )


def release_strays(
    table: job_tables.JobTable, worker_id: str, known: Collection[job_tables.Lease]
) -> db.Script[list[Row]]:
    """Hand back what a worker has claimed without knowing it; return the changed rows.

    Such claims come from commits whose reply was lost. `known`: those that it knows; it may know an
    earlier claim of the same job.
    """
    rows = yield from statements.handback.strays[table.name].script(worker=worker_id)
    leases = [job_tables.lease_of(table, row) for row in rows]
    leases = [lease for lease in leases if lease not in known]
    return (yield from hand_back_all(leases, reason="claimed unknowingly"))


def _hand_back(
    leases: Sequence[job_tables.Lease],
    detail: Mapping[str, Any],
    *,
    front: bool = False,
    after_s: float = 0.0,
    error: str | None = None,
    keep_for: str | None = None,
) -> db.Script[list[Row]]:
    return statements.handback.hand_back[leases[0].table.name].script(
        jobs=[lease.job_id for lease in leases],
        claims=[lease.claim_no for lease in leases],
        workers=[lease.worker_id for lease in leases],
        detail=payload.encode(detail, "reason"),
        error=error,
        front=front,
        band=FRONT_PRIORITY,
        after_s=after_s,
        keep_for=keep_for,
    )
