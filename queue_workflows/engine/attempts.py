"""End an attempt that has no result: it failed, a watchdog ended it, or it waits for an answer."""

from __future__ import annotations

from queue_workflows import config, db
from queue_workflows.dag import policy
from queue_workflows.db import statements
from queue_workflows.engine import handback, job_tables
from queue_workflows.types import Row


def fail(
    lease: job_tables.Lease,
    *,
    error: str,
    seconds: float | None = None,
    detail: str | None = None,
    resolved_inputs: str | None = None,
    retry: bool = True,
    after_s: float | None = None,
    most: int = 1,
) -> db.Script[Row | None]:
    """Record a failed attempt: the job is queued again while attempts are left, else it has failed.

    `retry` false: it has failed whatever is left. `after_s`: how long it waits; None: the default
    back-off. `most`: what `max_attempts` becomes if it is less. `resolved_inputs`: what a node
    received, as JSON text. Returns the row; None: the claim is lost.
    """
    parameters = job_tables.fence(
        lease,
        error=error,
        seconds=seconds,
        detail=detail,
        retry=retry,
        after_s=after_s,
        most=most,
        backoff_s=policy.BASE_S,
        longest_s=policy.MAX_WAIT_S,
    )
    statement = statements.attempts.fail[lease.table.name]
    if resolved_inputs is None or not lease.table.in_run:
        return (yield from statement.script(**parameters))
    received = job_tables.fence(lease, received=resolved_inputs)
    yield db.BEGIN
    yield from statements.attempts.store_received.script(**received)
    row = yield from statement.script(**parameters)
    yield db.COMMIT
    return row


def end_by_watchdog(
    lease: job_tables.Lease,
    *,
    error: str,
    seconds: float,
    detail: str | None = None,
) -> db.Script[Row | None]:
    """Record that a watchdog ended the attempt, for the time limit or health check in `error`.

    A node is queued again up to WATCHDOG_MAX_RETRIES times, with at least FRONT_PRIORITY; an
    ingest job has failed. Returns the row; None: the claim is lost.
    """
    parameters = job_tables.fence(
        lease,
        error=error,
        seconds=seconds,
        detail=detail,
        cap=config.WATCHDOG_MAX_RETRIES.read() if lease.table.in_run else 0,
        band=handback.FRONT_PRIORITY,
    )
    return statements.attempts.end_by_watchdog[lease.table.name].script(**parameters)
