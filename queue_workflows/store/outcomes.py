"""How a body ended, and how that is recorded, for both families."""

from __future__ import annotations

import itertools
import logging
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from queue_workflows import db, errors
from queue_workflows.dag import policy
from queue_workflows.runtime import process
from queue_workflows.store import claims, payload, tables, transitions

_log = logging.getLogger(__name__)
RECORDED = {
    "completed": ("completed",),
    "failed": ("failed", "retried", "cancelled"),
    "parked": ("parked", "cancelled"),
    "cancelled": ("cancelled", "requeued"),
    "snoozed": ("requeued", "cancelled"),
}
"""The events that a recorded outcome leaves, by its kind."""


class Outcome(NamedTuple):
    """How a body ended, and what it leaves.

    Kinds: `completed`, `failed`, `parked`, `cancelled`, `snoozed`.
    """

    kind: str
    seconds: float
    result: str = "{}"
    """The result as checked JSON text."""
    error: str = ""
    detail: str | None = None
    """JSON text for the job's history: the traceback."""
    value: Any = None
    """The result as the host returned it, for hooks."""
    resolved_inputs: str | None = None
    vm_rss_mb_peak: int | None = None
    raised: policy.Raised = policy.Raised()
    """What a failure says about the next attempt; `after_s` is a snoozed job's wait."""


def of_error(error: BaseException, seconds: float, what: str) -> Outcome:
    """A failed outcome that says what was raised, with its traceback; or a snoozed one.

    The passwords of DSNs are masked in all that it says: it goes to rows, and from there anywhere.
    """
    if isinstance(error, errors.Snooze):
        raised = policy.Raised(after_s=error.seconds)
        return Outcome("snoozed", seconds, error=payload.error_text(error), raised=raised)
    name, said = type(error).__name__, process.mask(payload.error_text(error))
    text = f"{name}: {said}" if said else name
    if isinstance(error, SystemExit):
        text = f"the body called sys.exit({error.code!r})"
    told = traceback.TracebackException.from_exception(error)
    _leave_out_engine(told)
    trace = process.mask("".join(told.format()))[-payload.ERROR_LIMIT :]
    _log.warning("%s failed after %.1f s: %s", what, seconds, payload.error_text(text))
    detail = payload.encode({"traceback": payload.error_text(trace)}, "traceback")
    return Outcome(
        "failed", seconds, error=payload.error_text(text), detail=detail, raised=_raised(error)
    )


_PACKAGE = Path(__file__).resolve().parents[1]


def _leave_out_engine(told: traceback.TracebackException) -> None:
    """Drop the frames by which a body was reached, and those of its streams; not all there are."""

    def is_engine(frame: traceback.FrameSummary) -> bool:
        path = Path(frame.filename)
        return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "demo")

    own = itertools.dropwhile(is_engine, told.stack)
    streams = str(_PACKAGE / "worker" / "capture.py")
    if frames := [frame for frame in own if frame.filename != streams]:
        told.stack = traceback.StackSummary.from_list(frames)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _leave_out_engine(other)


def _raised(error: BaseException) -> policy.Raised:
    names = policy.names_of(error)
    if isinstance(error, errors.Retry):
        return policy.Raised(names, "retry", error.after_s)
    return policy.Raised(names, "discard" if isinstance(error, errors.Discard) else "")


def unless_signal(value: Any) -> Any:
    """What a body returned; a signal that it returned is raised."""
    if isinstance(value, errors.JobSignal):
        raise value
    return value


def node_result(lease: tables.Lease, outcome: Outcome) -> claims.NodeResult:
    """A completed node as the step takes it."""
    return claims.NodeResult(
        lease, outcome.result, outcome.seconds, outcome.vm_rss_mb_peak, outcome.resolved_inputs
    )


def ingest_result(lease: tables.Lease, outcome: Outcome) -> claims.IngestResult:
    """A completed ingest job as the step takes it."""
    return claims.IngestResult(lease, outcome.result, outcome.seconds)


def record(conn: db.Connection, lease: tables.Lease, outcome: Outcome) -> str:
    """Write the outcome under the lease.

    `"completed"` (parked ones too), `"failed"` (retried and snoozed ones too), or `"skipped"`:
    cancelled, or the claim is no longer held and nothing was written.
    """
    if outcome.kind == "completed":
        return _complete(conn, lease, outcome)
    if outcome.kind == "parked":
        return "completed" if transitions.park(conn, lease) else "skipped"
    if outcome.kind == "cancelled":
        transitions.hand_back(conn, lease, reason="cancelled")
        return "skipped"
    if outcome.kind == "snoozed":
        after_s = outcome.raised.after_s or 0.0
        row = transitions.hand_back(conn, lease, reason=outcome.error, after_s=after_s)
        return "failed" if row else "skipped"
    verdict = _verdict(conn, lease, outcome)
    row = transitions.fail(
        conn,
        lease,
        retry=verdict.retry,
        after_s=verdict.after_s,
        error=outcome.error,
        seconds=outcome.seconds,
        detail=outcome.detail,
        resolved_inputs=outcome.resolved_inputs,
    )
    return "failed" if row else "skipped"


def _verdict(conn: db.Connection, lease: tables.Lease, outcome: Outcome) -> policy.Verdict:
    """What the job's policy makes of its failure; read only now, as most jobs do not fail."""
    found = transitions.policy_of(conn, lease)
    attempts: int = found["attempts"] if found else 0
    try:
        return policy.decide(found and found["policy"], attempts, outcome.raised)
    except errors.InvalidWorkflow as error:
        _log.warning("job %s fails by the default policy: %s", lease.job_id, error)
        return policy.decide(None, attempts, outcome.raised)


def _complete(conn: db.Connection, lease: tables.Lease, outcome: Outcome) -> str:
    who = claims.Claimant(lease.worker_id, "", "")
    try:
        if lease.table.in_run:
            claims.node_step(conn, who, done=node_result(lease, outcome), claim=False)
        else:
            claims.ingest_step(conn, who, done=[ingest_result(lease, outcome)], claim=0)
    except errors.ClaimLost:
        return "skipped"
    return "completed"
