"""Very short ingest jobs: N leases in one claim, N results in one statement."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from queue_workflows import db, errors, ingest_executor
from queue_workflows.store import outcomes, tables
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import claimer, current, guards, leaving, watch

_log = logging.getLogger(__name__)
FLUSH_AFTER_S = 1.0
"""Results wait at most about this long for the rest of their batch, and for the body that runs."""


class Batch:
    """Runs batches one job after the other; results are recorded together, in claim order.

    A crash in the middle re-runs what was not recorded. A job that fails is recorded on its own.
    """

    def __init__(
        self,
        size: int,
        claims_: claimer.Claimer,
        watcher: watch.Watch,
        lease_s: float,
        *,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self._size = size
        self._claimer = claims_
        self._watch = watcher
        self._lease_s = lease_s
        self._now = now_fn
        self._done: list[tuple[current.Work, outcomes.Outcome]] = []

    def drain(self, stopping: Callable[[], bool], *, promote: bool) -> None:
        """Claim and run batches until the queue is empty or the worker stops."""
        jobs = self._claimer.claim_batch(self._size, promote=promote)
        while jobs:
            self._run(jobs, stopping)
            jobs = self._flush(0 if stopping() else self._size)

    def _run(self, jobs: list[Row], stopping: Callable[[], bool]) -> None:
        leases = [tables.lease_of(tables.INGEST_JOBS, job) for job in jobs]
        flushed, pid = self._now(), os.getpid()
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._lease_s)
        for job in jobs:
            work = current.Work(tables.INGEST_JOBS, job, lease_end)
            if stopping():
                self._claimer.finish(work, outcomes.Outcome("cancelled", 0.0), claim=False)
                continue
            self._watch.begin(work, leases)
            try:
                outcome = ingest_executor.run_task(job)
                leaving.unless_forked(pid, outcome)
                work.settling = True
                self._keep(work, outcome)
            finally:
                self._watch.end()
            if self._now() - flushed >= FLUSH_AFTER_S:
                self._flush(0)
                flushed = self._now()

    def _keep(self, work: current.Work, outcome: outcomes.Outcome) -> None:
        if outcome.kind == "completed":
            self._done.append((work, outcome))
            return
        self._record(work, outcome)

    def _record(self, work: current.Work, outcome: outcomes.Outcome) -> None:
        try:
            self._claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error)

    def _flush(self, claim: int) -> list[Row]:
        """Record what is done and claim the next batch; one by one if that fails."""
        done, self._done = self._done, []
        results = [outcomes.ingest_result(work.lease, outcome) for work, outcome in done]
        try:
            return self._claimer.claim_batch(claim, results)
        except (errors.ClaimLost, db.Error):
            for work, outcome in done:
                self._record(work, outcome)
            return []
