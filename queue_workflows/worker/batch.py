"""Very short ingest jobs: N leases in one claim, N results in one statement."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from queue_workflows import db, errors, ingest_executor
from queue_workflows.engine import finish, outcomes
from queue_workflows.runtime import clock
from queue_workflows.tasks import handlers
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import (
    claimer,
    claims_in_flight,
    current_job,
    guards,
    lease_keeper,
    shutdown,
    slot,
)

_log = logging.getLogger(__name__)


class Batch:
    """Runs batches one job after the other; results are recorded together, in claim order.

    A crash in the middle re-runs what was not recorded. A job that fails is recorded on its own.
    The watch has a hand in it: see `LeaseKeeper.hold`.
    """

    def __init__(
        self,
        size: int,
        claims_: claimer.Claimer,
        watcher: lease_keeper.LeaseKeeper,
        lane_: slot.Slot,
        *,
        runner: handlers.Runner | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._runner = runner
        self._size = self._next = size
        self._claimer = claims_
        self._watch = watcher
        watcher.batches()
        self._held = lane_.held
        self._lease_s = lane_.who().lease_s
        self._now = now_fn
        claims_.also_held = self._held.ids

    def drain(self, stopping: Callable[[], bool], *, promote: bool) -> None:
        """Claim and run batches until the queue is empty or the worker stops."""
        asked = self._next
        jobs = self._claimer.claim_batch(asked, promote=promote)
        while jobs:
            self._run(jobs, stopping)
            full, asked = len(jobs) == asked, 0 if stopping() else self._next
            if full and asked and self._held.unrecorded() <= self._size:
                # The watch records them meanwhile; a queue that is empty soon needs no second hand.
                self._watch.record()
                jobs = self._claimer.claim_batch(asked)
            else:
                jobs = self._flush(asked)
        self._flush(0)

    def _run(self, jobs: list[Row], stopping: Callable[[], bool]) -> None:
        sent_at = self._claimer.sent_at
        self._watch.hold(self._held, jobs, guards.LeaseEnd(sent_at, self._lease_s), sent_at)
        begun, ran, pid = self._now(), 0, os.getpid()
        while not stopping() and (work := self._held.next()) is not None:
            self._run_one(work, pid)
            ran += 1
        self._next = self._paced(ran, self._now() - begun)

    def _paced(self, ran: int, seconds: float) -> int:
        """How many to claim next: as many as end soon, so that few have to be handed back."""
        if seconds >= claims_in_flight.LONG_S:
            return max(1, min(self._size, int(ran * claims_in_flight.LONG_S / seconds)))
        return min(self._size, 2 * self._next)

    def _run_one(self, work: current_job.Work, pid: int) -> None:
        self._watch.begin(work)
        try:
            outcome = ingest_executor.run_task(work.job, work, self._runner)
            shutdown.unless_forked(pid, outcome)
            self._watch.settle(work)
            if outcome.kind == "completed":
                self._held.keep((work, outcome))
            else:
                self._record(work, outcome)
        finally:
            self._watch.end(work)

    def _record(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        try:
            self._claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error)
        finally:
            self._held.settled([work.lease])

    def _flush(self, claim: int) -> list[Row]:
        """Record what is done and claim the next batch; one by one if that fails."""
        done = self._held.take_done()
        if not done and not claim:
            return []
        results = [finish.Done(work.lease, outcome) for work, outcome in done]
        try:
            with self._held.writing():
                jobs = self._claimer.claim_batch(claim, results)
                self._held.settled([work.lease for work, _ in done])
        except (errors.ClaimLost, db.Error):
            self._held.put_back(done)
            while found := self._held.take_done(1):
                with self._watch.recording(found[0][0]):
                    self._record(*found[0])
            return []
        return jobs
