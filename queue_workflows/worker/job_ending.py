"""Define how a lease keeper ends a job that must not run on, and record a guard's failure."""

from __future__ import annotations

from typing import Protocol

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.engine import finish, job_tables
from queue_workflows.types import Row
from queue_workflows.worker import current_job, guards


class Ending(Protocol):
    """What a lease keeper does about a job that must not run on."""

    left_behind: bool
    """Whether a record or a claim to hand back could not be written."""

    def announce(self, code: int) -> None:
        """Prepare the exit with this code."""
        ...

    def give_back(self, work: current_job.Work) -> None:
        """Hand back the job of a stopping worker that did not end in time."""
        ...

    def stop_cancelled(self, work: current_job.Work) -> None:
        """End a cancelled job whose handler has not ended within its grace."""
        ...

    def end_by_guard(self, work: current_job.Work, failure: guards.Failure) -> None:
        """End a job as its guard demands."""
        ...

    def exit_with(self, code: int) -> None:
        """End without a running job."""
        ...


def record_failure(
    conn: db.Connection,
    lease: job_tables.Lease,
    failure: guards.Failure,
    seconds: float,
) -> Row | None:
    """Requeue or fail a job as its guard demands, with its events, in one transaction.

    Returns the row, or None if the claim was lost.
    """
    detail = payload.encode({"guard": failure.event, "exit_code": failure.code}, "detail")
    return db.run(
        conn,
        finish.end_by_guard(
            lease, failure.event, error=failure.reason, seconds=seconds, detail=detail
        ),
    )
