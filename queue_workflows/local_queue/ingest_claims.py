"""Track the claims of an `IngestPlan`: jobs of the ingest table that this process holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from queue_workflows import db
from queue_workflows.engine import handback, job_tables, outcomes
from queue_workflows.local_queue import job_queue
from queue_workflows.types import Row, Unreadable
from queue_workflows.worker import current_job, guards, job_ending

_log = logging.getLogger("queue_workflows.local_queue")


Write: TypeAlias = "Callable[[db.Connection | None], object]"
"""Writes how a claim ends, in the transaction of this connection; None: in one of its own."""


class Claim:
    """One claimed job: its work, and how far it is."""

    def __init__(self, row: Row, lease_end: guards.LeaseEnd) -> None:
        self.work = current_job.Work(job_tables.INGEST_JOBS, row, lease_end)
        self.work.waiting = True
        self.outcome: outcomes.Outcome | None = None
        """How the handler has ended; None while it waits or runs."""
        self.unwritten: Write | None = None
        """What has to be written, after which the claim is over; it is tried until it succeeds."""

    @property
    def job_id(self) -> str:
        """Return the id of the job."""
        return self.work.lease.job_id

    def hand_back(
        self,
        reason: str,
        conn: db.Connection | None = None,
        *,
        front: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Give the claim up; the job is queued again, or cancelled if that was requested."""
        with db.transaction(conn) as own:
            db.run(
                own,
                handback.hand_back(self.work.lease, reason=reason, front=front, after_s=after_s),
            )

    def fail_by(self, failure: guards.Failure, seconds: float, conn: db.Connection | None) -> None:
        """Record that a guard has ended the attempt."""
        with db.transaction(conn) as own:
            job_ending.record_failure(own, self.work.lease, failure, seconds)


class ClaimedJob(job_queue.Job):
    """A job of the queue that knows its claim: the id alone may be claimed again."""

    claim: Claim


def as_job(row: Row, claim: Claim) -> ClaimedJob:
    """Return what the queue gets of a claimed row."""
    args: Any = row["args"]
    job = ClaimedJob(row["id"], row["task_name"], {} if isinstance(args, Unreadable) else args)
    job.claim = claim
    return job


class Claims:
    """The claims of one process, by job id. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Claim] = {}
        self._suspects: list[tuple[ClaimedJob, Claim]] = []
        """Jobs that may have crashed a process, and have to run alone."""
        self._alone: Claim | None = None

    def add(self, claim: Claim) -> None:
        """Add a claim."""
        with self._lock:
            self._held[claim.job_id] = claim

    def add_suspect(self, job: ClaimedJob, claim: Claim) -> None:
        """Add a claim of a job that has to run alone."""
        with self._lock:
            self._held[claim.job_id] = claim
            self._suspects.append((job, claim))

    def drop(self, claim: Claim) -> bool:
        """Remove a claim that is over; return whether it was there."""
        with self._lock:
            if self._held.get(claim.job_id) is not claim:
                return False
            del self._held[claim.job_id]
            self._suspects = [each for each in self._suspects if each[1] is not claim]
            if self._alone is claim:
                self._alone = None
            return True

    def start(self, claim: Claim) -> bool:
        """Note that the handler of a claim starts; return False if the claim is over or ends.

        After a stop of the process other workers may have the job, before the guards notice.
        """
        with self._lock:
            if self._held.get(claim.job_id) is not claim or claim.unwritten is not None:
                return False
            if claim.work.verdict() is not None:
                return False
            claim.work.start_now()
            return True

    def withdraw(self, claim: Claim, write: Write) -> bool:
        """End a claim whose job still waits, so that it never starts; return whether it did."""
        with self._lock:
            if self._held.get(claim.job_id) is not claim or not claim.work.waiting:
                return False
            claim.unwritten = claim.unwritten or write
            return True

    def holds(self, claim: Claim) -> bool:
        """Return whether the claim is not over."""
        return self._held.get(claim.job_id) is claim

    def get(self, job_id: str) -> Claim | None:
        """Return the claim of a job, or None."""
        return self._held.get(job_id)

    def all(self) -> list[Claim]:
        """Return every claim, the earliest first."""
        with self._lock:
            return [*self._held.values()]

    def ids(self) -> set[str]:
        """Return the ids of the claimed jobs."""
        with self._lock:
            return set(self._held)

    def free(self, limit: int) -> int:
        """Return how many more jobs to claim: none while one runs alone or waits to."""
        with self._lock:
            return 0 if self._alone or self._suspects else max(0, limit - len(self._held))

    def has_suspects(self) -> bool:
        """Return whether a job waits to run alone."""
        return bool(self._suspects)

    def next_alone(self) -> ClaimedJob | None:
        """Return a job that has to run alone once nothing else is held, else None."""
        with self._lock:
            if self._alone or not self._suspects or len(self._held) > len(self._suspects):
                return None
            job, self._alone = self._suspects.pop(0)
            return job
