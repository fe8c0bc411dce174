"""Very short ingest jobs: N leases in one claim, N results in one statement."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from queue_workflows import db, errors, ingest_executor
from queue_workflows.store import claims, outcomes, tables
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import claimer, current, guards, leaving, watch

_log = logging.getLogger(__name__)
FLUSH_AFTER_S = 1.0
"""Results wait at most about this long for the rest of their batch."""
AHEAD_WITHIN_S = 0.1
"""Bodies of a batch that took no longer than this leave the next one to be claimed meanwhile; the
jobs of a longer one are better left to other workers."""
_Done: TypeAlias = "list[tuple[current.Work, outcomes.Outcome]]"


class _Ahead(NamedTuple):
    """The next batch on its way, and the last one's results with it."""

    step: claims.IngestStep
    done: _Done
    results: list[claims.IngestResult]
    sent_at: float


class Batch:
    """Runs batches one job after the other; results are recorded together, in claim order.

    A crash in the middle re-runs what was not recorded. A job that fails is recorded on its own.
    While the bodies of short batches run, the server records the batch before and claims the next.
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
        self._done: _Done = []
        self._took_s = math.inf
        self._ahead: _Ahead | None = None
        self._next: tuple[list[Row], float] = [], 0.0
        """The batch that was claimed ahead, and when."""
        self._leases: list[tables.Lease] = []
        """All that is claimed and not recorded as far as is known; the watch renews it."""

    def drain(self, stopping: Callable[[], bool], *, promote: bool) -> None:
        """Claim and run batches until the queue is empty or the worker stops."""
        jobs, sent_at = self._taken()
        if not jobs:
            jobs = self._claimer.claim_batch(self._size, promote=promote)
            sent_at = self._claimer.sent_at
        while jobs:
            self._leases = [tables.lease_of(tables.INGEST_JOBS, job) for job in jobs]
            if self._took_s <= AHEAD_WITHIN_S and not stopping():
                self._send()
            begun = self._now()
            self._run(jobs, sent_at, stopping)
            self._took_s = self._now() - begun
            jobs, sent_at = self._taken()
            if not jobs:
                jobs = self._flush(0 if stopping() else self._size)
                sent_at = self._claimer.sent_at

    def _taken(self) -> tuple[list[Row], float]:
        """The batch that was claimed ahead, if any, and when."""
        self._receive()
        taken, self._next = self._next, ([], 0.0)
        return taken

    def _run(self, jobs: list[Row], sent_at: float, stopping: Callable[[], bool]) -> None:
        flushed, pid = self._now(), os.getpid()
        lease_end = guards.LeaseEnd(sent_at, self._lease_s)
        for job in jobs:
            work = current.Work(tables.INGEST_JOBS, job, lease_end)
            if stopping():
                self._record(work, outcomes.Outcome("cancelled", 0.0))
                continue
            self._watch.begin(work, self._leases)
            try:
                outcome = ingest_executor.run_task(job)
                leaving.unless_forked(pid, outcome)
                self._watch.settle(work)
                self._keep(work, outcome)
            finally:
                self._watch.end()
            if self._now() - flushed >= FLUSH_AFTER_S:
                self._receive()
                self._flush(0)
                flushed = self._now()

    def _keep(self, work: current.Work, outcome: outcomes.Outcome) -> None:
        if outcome.kind == "completed":
            self._done.append((work, outcome))
            return
        self._record(work, outcome)

    def _record(self, work: current.Work, outcome: outcomes.Outcome) -> None:
        self._receive()
        try:
            self._claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error)

    def _send(self) -> None:
        done, self._done = self._done, []
        results = _results(done)
        try:
            step = self._claimer.send_batch(self._size, results)
        except db.Error:
            self._singly(done)
            return
        self._ahead = _Ahead(step, done, results, self._claimer.sent_at)

    def _receive(self) -> None:
        """Wait for what was sent ahead, if anything was; the connection is free only then."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        try:
            jobs = self._claimer.receive_batch(ahead.step, ahead.results)
        except (errors.ClaimLost, db.Error):
            self._singly(ahead.done)
            return
        self._next = jobs, ahead.sent_at
        self._leases += [tables.lease_of(tables.INGEST_JOBS, job) for job in jobs]

    def _flush(self, claim: int) -> list[Row]:
        """Record what is done and claim the next batch; one by one if that fails."""
        done, self._done = self._done, []
        try:
            return self._claimer.claim_batch(claim, _results(done))
        except (errors.ClaimLost, db.Error):
            self._singly(done)
            return []

    def _singly(self, done: _Done) -> None:
        for work, outcome in done:
            self._record(work, outcome)


def _results(done: _Done) -> list[claims.IngestResult]:
    return [outcomes.ingest_result(work.lease, outcome) for work, outcome in done]
