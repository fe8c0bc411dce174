"""Track the jobs of one slot: waiting, running, ended but unrecorded, and to be handed back."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from queue_workflows.engine import job_tables, outcomes
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import current_job, guards

FLUSH_AFTER_S = 1.0
"""Seconds after which a result is recorded without the rest of its batch."""
LONG_S = 1.5
"""Seconds of run time after which jobs that wait behind a handler are handed back to other workers.
"""
TURN_S = 5.0
"""Seconds for which a claimed job waits at most."""
WRITING_S = 1.0
"""Seconds for which a statement about many jobs waits for another one: half of BOOKKEEPING_S."""


Done: TypeAlias = tuple[current_job.Work, outcomes.Outcome]
"""A job whose handler has ended, and its outcome."""


class RenewalResult(NamedTuple):
    """The claims that a renewal found lost, and those whose cancel was requested."""

    lost: list[job_tables.Lease]
    cancelled: list[job_tables.Lease]


class ClaimsInFlight:
    """The waiting and running jobs of a slot, its unrecorded outcomes, and the jobs to hand back.

    One lock decides each job's way: a job that is handed back never starts, and only one thread has
    a result at a time. All lists keep the order of the claims.
    """

    def __init__(
        self,
        *,
        writing: threading.Lock | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._now = now_fn
        self._lock = threading.Lock()
        self._claims: dict[str, tuple[job_tables.Lease, guards.LeaseEnd]] = {}
        """By job id. A job that was claimed again comes last."""
        self._waiting: deque[tuple[job_tables.Lease, Row, guards.LeaseEnd]] = deque()
        self._added = 0.0
        self._running: dict[str, current_job.Work] = {}
        """By job id, in the order of their start."""
        self._done: list[Done] = []
        self._done_since = 0.0
        self._returning: dict[job_tables.Lease, str] = {}
        self._writing = writing or threading.Lock()
        self.on_lost: Callable[[job_tables.Lease], object] = lambda _: None
        """Called with a claim whose outcome was not written because the claim was lost."""

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Allow one statement about many jobs at a time, since each locks rows in its own order.

        Waits up to WRITING_S for another thread's statement.
        """
        alone = self._writing.acquire(timeout=WRITING_S)
        try:
            yield
        finally:
            if alone:
                self._writing.release()

    # The thread that runs the jobs.

    def add(self, jobs: Sequence[Row], lease_end: guards.LeaseEnd) -> None:
        """Add claimed jobs, which wait for their handlers."""
        with self._lock:
            self._added = self._now()
            for job in jobs:
                lease = job_tables.lease_of(job_tables.INGEST_JOBS, job)
                self._claims.pop(lease.job_id, None)
                self._claims[lease.job_id] = lease, lease_end
                self._waiting.append((lease, job, lease_end))

    def start_next(self) -> current_job.Work | None:
        """Move the first waiting job to the running ones and return it, or None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            lease, job, end = self._waiting.popleft()
            work = current_job.Work(lease.table, job, end, now_fn=self._now, lease=lease)
            self._running[lease.job_id] = work
            return work

    def add_done(self, done: Done) -> None:
        """Move a running job to the results that wait to be recorded."""
        with self._lock:
            if not self._done:
                self._done_since = self._now()
            self._done.append(done)
            self._running.pop(done[0].lease.job_id, None)

    def unrecorded(self) -> int:
        """Return the number of unrecorded results."""
        with self._lock:
            return len(self._done)

    def flush_soon(self) -> None:
        """Make the unrecorded results due without the rest of their batch."""
        with self._lock:
            self._done_since = -math.inf

    # Either thread.

    def take_done(self, most: int | None = None) -> list[Done]:
        """Remove and return up to `most` results; record them, then call `remove` or `put_back`."""
        with self._lock:
            done = self._done[:most]
            del self._done[:most]
            return done

    def put_back(self, done: Sequence[Done]) -> None:
        """Put results back that could not be recorded."""
        with self._lock:
            place = {job_id: number for number, job_id in enumerate(self._claims)}
            self._done = sorted(
                [*done, *self._done], key=lambda each: place.get(each[0].lease.job_id, -1)
            )
            self._done_since = self._now()

    def remove(self, leases: Iterable[job_tables.Lease]) -> None:
        """Remove claims that this worker holds no longer."""
        with self._lock:
            claims_, returning, running = self._claims, self._returning, self._running
            for lease in leases:
                claim = claims_.get(lease.job_id)
                if claim is not None and claim[0].claim_no == lease.claim_no:
                    del claims_[lease.job_id]
                if returning:
                    returning.pop(lease, None)
                work = running.get(lease.job_id)
                if work is not None and work.lease == lease:
                    del running[lease.job_id]

    def return_waiting(self, reason: str) -> None:
        """Mark all waiting jobs to be handed back for this reason."""
        with self._lock:
            self._return_all_waiting(reason)

    def return_all(self, reason: str, *, exclude: job_tables.Lease | None = None) -> None:
        """Mark all waiting and running jobs but `exclude` to be handed back on exit."""
        with self._lock:
            self._return_all_waiting(reason)
            for work in self._running.values():
                if work.lease != exclude:
                    self._returning[work.lease] = reason

    def running(self) -> list[current_job.Work]:
        """Return the running jobs."""
        with self._lock:
            return [*self._running.values()]

    def _return_all_waiting(self, reason: str) -> None:
        while self._waiting:
            self._returning[self._waiting.popleft()[0]] = reason

    def claims(self) -> dict[job_tables.Lease, guards.LeaseEnd]:
        """Return every claim with the end of its lease."""
        with self._lock:
            return dict(self._claims.values())

    def ids(self) -> set[str]:
        """Return the ids of the claimed jobs."""
        with self._lock:
            return set(self._claims)

    # The lease keeper's thread.

    def cancel(self, name: str) -> bool:
        """Hand back a cancelled job if it waits; return whether it did.

        `name` is the first 1,000 characters of the job's id.
        """
        with self._lock:
            return self._return_waiting_claims(
                [each for each, *_ in self._waiting if each.job_id[:1000] == name]
            )

    def renewed(self, found: RenewalResult, stop_at: float) -> None:
        """Apply the result of a renewal; cancelled running jobs are stopped at `stop_at`."""
        with self._lock:
            for lease in self._remove_waiting(found.lost):
                del self._claims[lease.job_id]
            self._return_waiting_claims(found.cancelled)
            cancelled = [work for work in self._running.values() if work.lease in found.cancelled]
        for work in cancelled:
            work.cancelled_by(stop_at)

    def _return_waiting_claims(self, leases: Sequence[job_tables.Lease]) -> bool:
        """Mark those of the claims that wait to be handed back; return whether there were any."""
        found = self._remove_waiting(leases)
        self._returning |= dict.fromkeys(found, "cancelled")
        return bool(found)

    def _remove_waiting(self, leases: Sequence[job_tables.Lease]) -> list[job_tables.Lease]:
        """Remove those of the claims that wait, and return them."""
        if not leases:
            return []
        wanted = set(leases)
        found = [lease for lease, *_ in self._waiting if lease in wanted]
        self._waiting = deque(each for each in self._waiting if each[0] not in wanted)
        return found

    def is_due(self) -> bool:
        """Return whether something must be written now. First hand back what waited too long."""
        with self._lock:
            now = self._now()
            behind = any(now - work.started >= LONG_S for work in self._running.values())
            if behind or now - self._added >= TURN_S:
                self._return_all_waiting("waited too long in its batch")
            late = now - self._done_since >= FLUSH_AFTER_S
            return bool(self._returning) or (bool(self._done) and late)

    def returning(self) -> dict[str, list[job_tables.Lease]]:
        """Return the claims to hand back, by reason, in claim order."""
        with self._lock:
            found: dict[str, list[job_tables.Lease]] = {}
            for lease, reason in self._returning.items():
                found.setdefault(reason, []).append(lease)
            return found
