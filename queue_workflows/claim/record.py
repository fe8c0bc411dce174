"""Record how the handler of a claimed job ended, or hand the job back to its queue.

Its length: all ends of a claim, by an outcome, a guard or a stopping worker, are in one place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import psycopg

from queue_workflows import config, db, errors
from queue_workflows.claim import claims, job_steps, job_tables, row_isolation
from queue_workflows.claim.outcomes import Outcome
from queue_workflows.dag import payload, policy
from queue_workflows.db import statements
from queue_workflows.runtime import display, log_context
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
UNKNOWN_MAX_S = 20.0
"""The longest wait, in seconds, between two claims of a node that workers do not know."""
UNKNOWN_BOUNDS = 10
"""After so many times UNKNOWN_NODE_S, an unknown node fails even if a live worker may know it."""
FRONT_PRIORITY = 10
"""The least priority of a job that is taken back from a worker; apps may rely on the number."""
BUDGET_TRIP: Final = "budget_trip"
"""The event of a job whose time limit has passed."""
GPU_TRIP: Final = "gpu_health_trip"
"""The event of a job whose GPU stays idle, or has no room for its model."""
_OF_WISH: Final = {"elsewhere": ("requeued",), "no_gpu": ("requeued",), "no_memory": (GPU_TRIP,)}
"""Further events that a failure with such a `wish` may leave."""
_EVENTS: Final = {
    "completed": ("completed",),
    "failed": ("failed", "retried", "cancelled"),
    "parked": ("parked", "cancelled"),
    "cancelled": ("cancelled", "requeued"),
    "snoozed": ("requeued", "cancelled"),
    "waiting": ("requeued", "cancelled"),
    "timed_out": (BUDGET_TRIP,),
}
"""The events that a recorded outcome may leave, by its kind."""


# --- Outcomes.


def record(conn: db.Connection, lease: job_tables.Lease, outcome: Outcome) -> str:
    """Record one outcome; return `"completed"`, `"failed"` or `"skipped"`.

    Parked nodes count as `"completed"`, jobs that are queued again as `"failed"`. `"skipped"` means
    that the job was cancelled, or that its claim is lost and nothing was written.
    """
    if outcome.kind != "completed":
        if not db.run(conn, end(lease, outcome)) or outcome.kind == "cancelled":
            return "skipped"
        return "completed" if outcome.kind == "parked" else "failed"
    who = claims.Claimant(lease.worker_id, "", "")
    try:
        db.run(conn, claims.claim(lease.table, who, count=0, done=[claims.Done(lease, outcome)]))
    except psycopg.Error as error:
        if error.sqlstate != claims.CLAIM_LOST:
            raise
        return "skipped"
    return "completed"


def is_recorded(lease: job_tables.Lease, outcome: Outcome) -> db.Script[bool]:
    """Return whether this outcome is recorded, for a statement whose reply was lost.

    If it was committed, the claim has left an event of the outcome's kind.
    """
    left = _OF_WISH.get(outcome.raised.wish, ())
    return has_recorded(lease, [*_EVENTS[outcome.kind], *left])


def has_recorded(lease: job_tables.Lease, events: list[str]) -> db.Script[bool]:
    """Return whether this claim has left any of these events, so that it was recorded."""
    recorded = statements.claims.has_recorded[lease.table.name]
    row = yield from recorded.script(**job_tables.fence(lease, events=events))
    return row is not None


def end(lease: job_tables.Lease, outcome: Outcome) -> db.Script[Row | bool | None]:
    """Record an outcome other than `completed`; return the job's row, or None for a lost claim.

    For a job that was handed back, return True, even if its claim is lost.
    """
    wish, after_s = outcome.raised.wish, outcome.raised.after_s or 0.0
    if outcome.cursors:
        yield from job_steps.store_cursors({lease: outcome.cursors})
    if outcome.kind == "parked":
        row = yield from statements.attempts.park.script(**job_tables.fence(lease))
    elif outcome.kind == "cancelled":
        yield from hand_back(lease, reason=outcome.error or "cancelled")
        return True
    elif outcome.kind == "snoozed" or (outcome.kind == "failed" and wish == "no_gpu"):
        row = yield from hand_back(lease, reason=outcome.error, after_s=after_s)
    elif outcome.kind == "waiting":
        row = yield from job_steps.suspend(lease, reason=outcome.error)
    elif outcome.kind == "timed_out" or wish == "no_memory":
        event = BUDGET_TRIP if outcome.kind == "timed_out" else GPU_TRIP
        row = yield from end_by_guard(
            lease, event, error=outcome.error, seconds=outcome.seconds,
            detail=outcome.detail or "{}",
        )  # fmt: skip
    else:
        return (yield from _fail(lease, outcome))
    return row


def end_by_guard(
    lease: job_tables.Lease,
    event: str,
    *,
    error: str,
    seconds: float,
    detail: str = "{}",
) -> db.Script[Row | None]:
    """Record that a guard ended the attempt, with the reason `error` and the guard's event.

    A node is queued again up to WATCHDOG_MAX_RETRIES times, with at least FRONT_PRIORITY; an ingest
    job fails. One transaction. Returns the row, or None if the claim is lost.
    """
    ended = job_tables.fence(
        lease,
        error=error,
        seconds=seconds,
        detail=detail,
        cap=config.WATCHDOG_MAX_RETRIES.read() if lease.table.in_run else 0,
        band=FRONT_PRIORITY,
    )
    yield db.BEGIN
    row = yield from statements.attempts.end_by_watchdog[lease.table.name].script(**ended)
    if row is not None:
        job = row | {"worker_id": lease.worker_id}
        yield from note(lease.table, job, event, detail=detail, elapsed_s=seconds)
    yield db.COMMIT
    return row


def note(
    table: job_tables.JobTable,
    job: Row,
    event_type: str,
    *,
    detail: str,
    elapsed_s: float | None = None,
    error: str | None = None,
) -> db.Script[None]:
    """Append an event to a job of either table; `job` is its row, with the worker to name."""
    values: dict[str, Any] = {
        "job": job["id"],
        "attempt": job["attempts"],
        "event_type": event_type,
        "claim_no": job["claim_no"],
        "worker": job["worker_id"],
        "host": job["claimed_by"],
        "queue": job["queue"],
        "elapsed_s": elapsed_s,
        "error": error,
        "detail": detail,
    }
    if table.in_run:
        values |= {"run": job["run_id"], "node": job["node_id"], "model": job["required_model"]}
    yield from statements.job_events.add[table.name].script(**values)


# --- Failures.


def _fail(lease: job_tables.Lease, outcome: Outcome) -> db.Script[Row | bool | None]:
    """Record a failed attempt by the job's policy, which is only read here, as few jobs fail."""
    if outcome.raised.wish == "elsewhere":
        left = yield from _leave_to_others(lease, outcome.error)
        if not isinstance(left, str):
            return None if left is None else True
        wish = "" if left == outcome.error else "discard"
        raised = outcome.raised._replace(wish=wish)
        outcome = outcome._replace(error=payload.error_text(left), raised=raised)
    found = yield from statements.attempts.policy[lease.table.name].script(job=lease.job_id)
    found = found or {"policy": None, "attempts": 0, "max_attempts": 1}
    own, made, task = found["policy"], max(0, found["attempts"]), outcome.task
    try:
        verdict = policy.decide(own, made, outcome.raised, task=task)
    except errors.InvalidWorkflow as error:
        _log.warning(
            "job %s fails by the default policy: %s",
            lease.job_id,
            error,
            extra={"job_id": lease.job_id},
        )
        own = None
        verdict = policy.decide(None, made, outcome.raised, task=task)
    parameters = job_tables.fence(
        lease,
        received=outcome.resolved_inputs,
        error=outcome.error,
        seconds=outcome.seconds,
        detail=outcome.detail,
        retry=verdict.retry,
        after_s=verdict.after_s,
        most=policy.most_attempts(found["max_attempts"], own, task),
    )
    row = yield from statements.attempts.fail[lease.table.name].script(**parameters)
    if row is not None and row["status"] == "queued":
        _log.warning(
            "%s (%s): attempt %d of %d failed, %s",
            row["node_id"] if lease.table.in_run else row["task_name"],
            lease.job_id,
            row["attempts"],
            row["max_attempts"],
            display.again(row["available_at"]),
            extra=log_context.ids_of_job(row),
        )
    return row


def _leave_to_others(lease: job_tables.Lease, error: str) -> db.Script[Row | str | None]:
    """Hand back a node that its worker does not know; return the row, or the error if it must fail.

    It fails UNKNOWN_NODE_S after the first such claim if no other live worker may know it. If
    others may, but none reports it, it fails after UNKNOWN_BOUNDS times as long. If workers send
    no heartbeats, it fails at once, since the other workers are unknown. Each wait before the next
    claim is longer, from 1 s to UNKNOWN_MAX_S, but workers of the host `keep_for` need not wait.
    Returns None if the claim is lost.
    """
    stale_s = config.STALE_WORKER_AFTER_S.read()
    found = yield from statements.handback.unknown.script(job=lease.job_id, stale_s=stale_s)
    if found is None or config.DISABLE_WORKER_HEARTBEAT.read():
        return error
    bound_s = job_tables.UNKNOWN_NODE_S * (UNKNOWN_BOUNDS if found["others"] else 1)
    if not found["known"] and (found["age_s"] or 0.0) >= bound_s:
        met = ", ".join(sorted({*found["workers"], lease.worker_id}))
        nobody = "no worker that met it" if found["others"] else "no live worker"
        return f"{error}; {nobody} has known it for {bound_s:g} s; these met it: {met}"
    keep_for = found["keep_for"]
    # After a shorter wait, a worker that does not know the node would often claim it again.
    grown_s = UNKNOWN_MAX_S if found["known"] and keep_for else 1.0 + found["times"]
    after_s = min(UNKNOWN_MAX_S, grown_s)
    detail = {"reason": error, "unknown": True}
    rows = yield from _hand_back([lease], detail, after_s=after_s, error=error, keep_for=keep_for)
    return rows[0] if rows else None


# --- Claims that are given up without counting an attempt.


def hand_back(
    lease: job_tables.Lease,
    *,
    reason: str,
    front: bool = False,
    after_s: float = 0.0,
) -> db.Script[Row | None]:
    """Give a claim up. The job is queued again, or cancelled if it or its run was cancelled.

    With `front`, it gets at least FRONT_PRIORITY. `after_s` is how long it waits first. Returns the
    row, or None if the claim is lost.
    """
    rows = yield from _hand_back([lease], {"reason": reason}, front=front, after_s=after_s)
    return rows[0] if rows else None


def hand_back_all(leases: Sequence[job_tables.Lease], *, reason: str) -> db.Script[list[Row]]:
    """Give up these claims of one table as `hand_back` does; return the changed rows.

    They may belong to several workers, since each queue of a pool has its own. Each job keeps its
    priority. Skips a claim that is lost, or whose change the database refuses (see
    `row_isolation.change_all`).
    """
    if not leases:
        return []
    change = _hand_back(leases, {"reason": reason})
    one = functools.partial(hand_back, reason=reason)
    return (yield from row_isolation.change_all(change, leases, one))


def release_strays(
    table: job_tables.JobTable, worker_id: str, known: Collection[job_tables.Lease]
) -> db.Script[list[Row]]:
    """Hand back the claims of a worker that are not in `known`; return the changed rows.

    They come from commits whose reply was lost. `known` may have an earlier claim of such a job.
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
    given = job_tables.fence_all(
        leases,
        detail=payload.encode(detail, "reason"),
        error=error,
        front=front,
        band=FRONT_PRIORITY,
        after_s=after_s,
        keep_for=keep_for,
    )
    return statements.handback.hand_back[leases[0].table.name].script(**given)
