"""How a body ended, and how that is recorded, for both families."""

from __future__ import annotations

import logging
import traceback
from typing import Any, NamedTuple

from queue_workflows import db, errors
from queue_workflows.store import claims, payload, tables, transitions

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How a body ended: `completed`, `failed`, `parked` or `cancelled`, and what it leaves."""

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


def of_error(error: BaseException, seconds: float, what: str) -> Outcome:
    """A failed outcome that says what was raised, with the traceback for the history."""
    name, said = type(error).__name__, payload.error_text(error)
    text = f"{name}: {said}" if said else name
    if isinstance(error, SystemExit):
        text = f"the body called sys.exit({error.code!r})"
    trace = "".join(traceback.format_exception(error))[-payload.ERROR_LIMIT :]
    _log.warning("%s failed after %.1f s: %s", what, seconds, payload.error_text(text))
    detail = payload.encode({"traceback": payload.error_text(trace)}, "traceback")
    return Outcome("failed", seconds, error=payload.error_text(text), detail=detail)


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

    `"completed"` (parked ones too), `"failed"` (retried ones too), or `"skipped"`: cancelled, or
    the claim is no longer held and nothing was written.
    """
    if outcome.kind == "completed":
        return _complete(conn, lease, outcome)
    if outcome.kind == "parked":
        return "completed" if transitions.park(conn, lease) else "skipped"
    if outcome.kind == "cancelled":
        transitions.hand_back(conn, lease, reason="cancelled")
        return "skipped"
    row = transitions.fail(
        conn,
        lease,
        error=outcome.error,
        seconds=outcome.seconds,
        detail=outcome.detail,
        resolved_inputs=outcome.resolved_inputs,
    )
    return "failed" if row else "skipped"


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
