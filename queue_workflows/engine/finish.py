"""Record how the handlers of claimed jobs ended, and retry or fail the jobs by their policies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from queue_workflows import db, errors
from queue_workflows.dag import payload, policy
from queue_workflows.db import statements
from queue_workflows.engine import (
    attempts,
    claims,
    events,
    handback,
    job_events,
    job_steps,
    job_tables,
)
from queue_workflows.engine.outcomes import Outcome
from queue_workflows.runtime import display, log_context
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
BUDGET_TRIP: Final = "budget_trip"
"""The event of a job whose time limit has passed."""
GPU_TRIP: Final = "gpu_health_trip"
"""The event of a job whose GPU does nothing, or has no room for its model."""
_OF_WISH: Final = {"elsewhere": ("requeued",), "no_gpu": ("requeued",), "no_memory": (GPU_TRIP,)}
"""The events that a failure leaves if it has such a wish, besides those of its kind."""
_EVENTS: Final = {
    "completed": ("completed",),
    "failed": ("failed", "retried", "cancelled"),
    "parked": ("parked", "cancelled"),
    "cancelled": ("cancelled", "requeued"),
    "snoozed": ("requeued", "cancelled"),
    "waiting": ("requeued", "cancelled"),
    "timed_out": (BUDGET_TRIP,),
}
"""The events that a recorded outcome leaves, by its kind."""
_RESULTS: Final = {
    "completed": "completed",
    "parked": "completed",
    "failed": "failed",
    "snoozed": "failed",
    "waiting": "failed",
    "timed_out": "failed",
    "cancelled": "skipped",
}
"""What `record` returns, by the kind of the outcome."""


class Done(NamedTuple):
    """One job whose handler has ended."""

    lease: job_tables.Lease
    outcome: Outcome
    ahead: claims.Ahead | None = None
    """What follows from a completed node; None: the orchestrator finds that out."""


def finish(
    conn: db.Connection,
    done: Sequence[Done],
    *,
    who: claims.Claimant | None = None,
    claim: int = 0,
    promote: bool = False,
    on_wait: claims.OnWait | None = None,
) -> list[Row]:
    """Record the outcomes of jobs of one table, and return up to `claim` jobs claimed by `who`.

    Completed jobs and the claim share one statement, which is one transaction when `conn` is
    autocommit; each other outcome has a statement of its own before it.
    Raises `ClaimLost` when a claim is lost: its statement has written and claimed nothing. A lost
    claim of a job that was cancelled is no error. `promote`, `on_wait`: as in `claims.claim`. Its
    length: one job, several nodes and ingest jobs each have a statement.
    """
    completed = [each for each in done if each.outcome.kind == "completed"]
    for each in done:
        if each.outcome.kind != "completed" and not db.run(conn, end(each.lease, each.outcome)):
            raise errors.ClaimLost(f"job {each.lease.job_id} has lost its claim")
    if not completed:
        return []
    for each in completed:
        if each.outcome.error and not each.lease.table.in_run:
            db.run(conn, job_events.note_logged_error(each.lease, each.outcome.error))
    claimant = who or claims.Claimant(completed[0].lease.worker_id, "", "")
    if not completed[0].lease.table.in_run:
        results = [
            claims.IngestResult(one.lease, one.outcome.result, one.outcome.seconds)
            for one in completed
        ]
        return claims.ingest_step(
            conn, claimant, done=results, claim=claim, promote=promote, on_wait=on_wait
        )
    if len(completed) == 1 and claim <= 1:
        job = claims.node_step(
            conn,
            claimant,
            done=_node_result(*completed[0]),
            ahead=completed[0].ahead,
            claim=claim > 0,
            promote=promote,
            on_wait=on_wait,
        )
        return [job] if job else []
    nodes = [(_node_result(*each), each.ahead) for each in completed]
    return claims.nodes_step(
        conn, claimant, done=nodes, claim=claim, promote=promote, on_wait=on_wait
    )


def record(conn: db.Connection, lease: job_tables.Lease, outcome: Outcome) -> str:
    """Record one outcome; return `"completed"`, `"failed"` or `"skipped"`.

    `"completed"`: parked nodes too. `"failed"`: jobs that are queued again too. `"skipped"`: the
    job was cancelled, or its claim is lost and nothing was written.
    """
    try:
        finish(conn, [Done(lease, outcome)])
    except errors.ClaimLost:
        return "skipped"
    return _RESULTS[outcome.kind]


def is_recorded(lease: job_tables.Lease, outcome: Outcome) -> db.Script[bool]:
    """Return whether this outcome was recorded: its commit happened although the reply was lost."""
    left = _OF_WISH.get(outcome.raised.wish, ())
    return claims.has_recorded(lease, (*_EVENTS[outcome.kind], *left))


def _node_result(
    lease: job_tables.Lease, outcome: Outcome, _: claims.Ahead | None
) -> claims.NodeResult:
    return claims.NodeResult(
        lease, outcome.result, outcome.seconds, outcome.vm_rss_mb_peak, outcome.resolved_inputs
    )


def end(lease: job_tables.Lease, outcome: Outcome) -> db.Script[Row | bool | None]:
    """Record an outcome that is not `completed`; return the job's row, or None for a lost claim.

    A job that was handed back has no row here, but True, also if its claim is lost.
    """
    if outcome.cursors:
        yield from job_steps.store_cursors({lease: outcome.cursors})
    if outcome.kind == "parked":
        row = yield from statements.attempts.park.script(**job_tables.fence(lease))
    elif outcome.kind == "cancelled":
        yield from handback.hand_back(lease, reason=outcome.error or "cancelled")
        return True
    elif outcome.kind == "snoozed":
        after_s = outcome.raised.after_s or 0.0
        row = yield from handback.hand_back(lease, reason=outcome.error, after_s=after_s)
    elif outcome.kind == "waiting":
        row = yield from events.suspend(lease, reason=outcome.error)
    elif outcome.kind == "timed_out":
        detail = outcome.detail or "{}"
        row = yield from end_by_guard(
            lease, BUDGET_TRIP, error=outcome.error, seconds=outcome.seconds, detail=detail
        )
    elif outcome.raised.wish == "no_gpu":
        after_s = outcome.raised.after_s or 0.0
        row = yield from handback.hand_back(lease, reason=outcome.error, after_s=after_s)
    elif outcome.raised.wish == "no_memory":
        row = yield from end_by_guard(
            lease, GPU_TRIP, error=outcome.error, seconds=outcome.seconds,
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
    detail: str,
) -> db.Script[Row | None]:
    """Requeue or fail a job as its guard demands, with its events, in one transaction.

    Returns the row, or None if the claim was lost.
    """
    yield db.BEGIN
    row = yield from attempts.end_by_watchdog(lease, error=error, seconds=seconds, detail=detail)
    if row is not None:
        job = row | {"worker_id": lease.worker_id}
        yield from job_events.note(lease.table, job, event, detail=detail, elapsed_s=seconds)
    yield db.COMMIT
    return row


def _fail(lease: job_tables.Lease, outcome: Outcome) -> db.Script[Row | bool | None]:
    """Fail the attempt by the job's policy, which is read only now, as most jobs do not fail."""
    if outcome.raised.wish == "elsewhere":
        left = yield from handback.leave_to_others(lease, outcome.error)
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
    row = yield from attempts.fail(
        lease,
        retry=verdict.retry,
        after_s=verdict.after_s,
        most=policy.most_attempts(found["max_attempts"], own, task),
        error=outcome.error,
        seconds=outcome.seconds,
        detail=outcome.detail,
        resolved_inputs=outcome.resolved_inputs,
    )
    if row is not None and row["status"] == "queued":
        _log_retry(lease, row)
    return row


def _log_retry(lease: job_tables.Lease, row: Row) -> None:
    _log.warning(
        "%s (%s): attempt %d of %d failed, %s",
        row["node_id"] if lease.table.in_run else row["task_name"],
        lease.job_id,
        row["attempts"],
        row["max_attempts"],
        display.again(row["available_at"]),
        extra=log_context.ids_of_job(row),
    )
