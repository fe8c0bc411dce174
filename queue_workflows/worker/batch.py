"""Run very short ingest jobs in batches: one claim and one record for many jobs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from queue_workflows import errors, ingest_executor
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
    """Run a batch of jobs one after the other and record their results together, in claim order.

    A crash in the middle runs unrecorded jobs again. A failed job is recorded on its own. The lease
    keeper records and hands back too, see `LeaseKeeper.add_claims`.
    """

    def __init__(
        self,
        size: int,
        claims_: claimer.Claimer,
        keeper: lease_keeper.LeaseKeeper,
        own_slot: slot.Slot,
        *,
        runner: handlers.Runner | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._runner = runner
        self._size = self._next = size
        self._claimer = claims_
        self._keeper = keeper
        keeper.enable_batches()
        self._in_flight = own_slot.in_flight
        self._lease_s = own_slot.who().lease_s
        self._now = now_fn
        claims_.other_jobs = self._in_flight.ids

    def drain(self, stopping: Callable[[], bool], *, promote: bool) -> None:
        """Claim and run batches until the queue is empty or the worker stops."""
        asked = self._next
        jobs = self._claimer.claim_batch(asked, promote=promote)
        while jobs:
            self._run(jobs, stopping)
            full, asked = len(jobs) == asked, 0 if stopping() else self._next
            if full and asked and self._in_flight.unrecorded() <= self._size:
                # The lease keeper records them while the next batch is claimed and runs.
                self._keeper.record()
                jobs = self._claimer.claim_batch(asked)
            else:
                jobs = self._flush(asked)
        self._flush(0)

    def _run(self, jobs: list[Row], stopping: Callable[[], bool]) -> None:
        sent_at = self._claimer.sent_at
        self._keeper.add_claims(
            self._in_flight, jobs, guards.LeaseEnd(sent_at, self._lease_s), sent_at
        )
        begun, ran, pid = self._now(), 0, os.getpid()
        while not stopping() and (work := self._in_flight.start_next()) is not None:
            self._run_one(work, pid)
            ran += 1
        self._next = self._next_size(ran, self._now() - begun)

    def _next_size(self, ran: int, seconds: float) -> int:
        """Return the size of the next batch: as many as end soon, so that few are handed back."""
        if seconds >= claims_in_flight.LONG_S:
            return max(1, min(self._size, int(ran * claims_in_flight.LONG_S / seconds)))
        return min(self._size, 2 * self._next)

    def _run_one(self, work: current_job.Work, pid: int) -> None:
        self._keeper.begin(work)
        try:
            outcome = ingest_executor.run_task(work.job, work, self._runner)
            shutdown.exit_if_forked(pid, outcome)
            self._keeper.handler_ended(work)
            outcome = work.judged(outcome)
            if outcome.kind == "completed":
                self._in_flight.add_done((work, outcome))
            else:
                self._record(work, outcome)
        finally:
            self._keeper.end(work)

    def _record(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        try:
            self._claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error, extra=work.ids)
        finally:
            self._in_flight.remove([work.lease])

    def _flush(self, claim: int) -> list[Row]:
        """Record the results and claim the next batch; record one by one if that fails."""
        done = self._in_flight.take_done()
        if not done and not claim:
            return []
        results = [finish.Done(work.lease, outcome) for work, outcome in done]
        try:
            with self._in_flight.writing():
                jobs = self._claimer.claim_batch(claim, results)
                self._in_flight.remove([work.lease for work, _ in done])
        except Exception:  # noqa: BLE001  each is recorded alone, and has its own error then
            self._in_flight.put_back(done)
            while found := self._in_flight.take_done(1):
                with self._keeper.recording(found[0][0]):
                    self._record(*found[0])
            return []
        return jobs
