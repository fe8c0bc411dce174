"""The main loop of a worker with slots: one thread over the sockets of its executors."""

from __future__ import annotations

import logging
import math
import random
import time

from queue_workflows import config, db, hw_metrics
from queue_workflows.engine import job_tables, recovery
from queue_workflows.executor import launcher_client, registry
from queue_workflows.runtime import clock, service
from queue_workflows.worker import (
    claimer,
    current_job,
    executor_set,
    loop,
    slot,
    slot_ahead,
    slot_keeper,
    slot_records,
    slot_runs,
    slot_wakes,
)

_log = logging.getLogger(__name__)
TURN_S = 1.0
"""Longest wait in seconds: a signal handler sets no event."""
PRINT_AGAIN_S = 0.05
"""Seconds until a reader that is too slow is tried again."""


class SlotLoop:
    """Run the jobs of one queue in executors, one in each; claim and record on this thread.

    All that has happened is read before one statement records the finished jobs and claims as many
    as executors are free. An executor that dies is replaced; its job is charged if nobody killed
    it.
    """

    def __init__(
        self,
        own: slot.Slot,
        launcher: launcher_client.Launcher,
        registered: registry.Registered,
        *,
        shape: executor_set.Shape,
        limits: executor_set.Limits,
        metrics: hw_metrics.Sampler | None = None,
    ) -> None:
        self._who = who = own.who()
        self._limits = limits
        in_run = who.queue in config.DAG_QUEUES
        self._table = job_tables.NODE_JOBS if in_run else job_tables.INGEST_JOBS
        self._wakes = slot_wakes.Wakes()
        self._executors = executor_set.ExecutorSet(launcher, shape, limits)
        endings = slot_keeper.Endings(self._kill, self._wakes.wake, gentle=shape.concurrent)
        self.keeper = slot_keeper.SlotKeeper(own, endings, launcher.hold_until, metrics=metrics)
        self._claimer = claimer.Claimer(self._table, own.who)
        self._claimer.on_lost = self.keeper.lost
        self._claimer.other_jobs = self.keeper.job_ids
        self.keeper.may_hold_unknown_claims = self._claimer.may_hold_unknown_claims
        self.keeper.unanswered = self._claimer.unanswered
        self._records = slot_records.Records(self._table, self._claimer, self.keeper, own.in_flight)
        # An executor that runs many jobs at once never has one wait.
        ahead = 0 if shape.concurrent or who.queue == "gpu" else shape.slots
        self._ahead = slot_ahead.Ahead(ahead, shape.batch)
        self._runs = slot_runs.Runs(
            self._table,
            who,
            self._claimer,
            registered,
            executors_=self._executors,
            records=self._records,
            keeper=self.keeper,
            endings=endings,
            ahead=self._ahead,
            shape=shape,
        )
        self._records.on_ended = self._runs.recorded
        self._may_claim = self._promote = True
        self._poll_at = self._due_at = self._retry_at = 0.0
        self._retry_s = 0.1
        self._logged = ""
        self._worked_at = time.monotonic()
        self._stopping = False

    # --- Any thread.

    def stop(self) -> None:
        """Claim no further job; safe in a signal handler."""
        self._stopping = True

    def _kill(self, work: current_job.Work, now: bool) -> None:
        self._runs.kill(work, now)

    def _ready(self) -> None:
        self._may_claim = True
        if self._executors.idle:
            self._wakes.wake()

    # --- The loop's thread.

    def run_forever(self) -> None:
        """Run jobs until `stop` and the end of what runs then; survive the loss of the database.

        Raises `LauncherLost`, and `ForkRefused` if no executor can be forked.
        """
        listener = db.listen(
            loop.READY_CHANNEL[self._table.name],
            "worker_control",
            "job_cancel",
            poll_s=3600.0,
            locks=[recovery.LIFE_LOCK + self._who.worker_id],
        )
        notified = slot_wakes.Notifications(self._who, self.keeper, self._ready)
        self._wakes.register(self._executors.selector)
        self.keeper.arm()
        try:
            self._executors.start(self._runs)
            self._worked_at = time.monotonic()
            with service.Follow("worker-listen", listener, notified.on_wake):
                while not self._is_over():
                    self._executors.select(self._timeout())
                    self._step()
        finally:
            self._close()

    def _is_over(self) -> bool:
        if not self._stopping:
            self._stopping = self._is_done()
            return False
        if not self._runs.busy and not self._records.waiting:
            return True
        deadline = self.keeper.stop_deadline
        late = deadline is not None and clock.boot_s() >= deadline
        return late and not self._runs.busy

    def _is_done(self) -> bool:
        """Return whether nothing is left to do for a worker that ends by itself."""
        if self._runs.busy or self._records.waiting or self._retry_at > time.monotonic():
            self._worked_at = time.monotonic()
            return False
        if self._limits.burst:
            return not self._may_claim and self._poll_at > 0.0
        idle_s = self._limits.idle_exit_s
        return idle_s is not None and time.monotonic() - self._worked_at >= idle_s

    def _timeout(self) -> float:
        now = time.monotonic()
        if self._executors.unheard:
            return 0.0
        if self._executors.unprinted:
            return PRINT_AGAIN_S
        if self._retry_at > now:
            return min(TURN_S, self._retry_at - now)
        if self._records.waiting or self._runs.asked or (self._may_claim and self._may_start()):
            return 0.0
        replace_at = math.inf if self._stopping else self._executors.replace_at
        at = min(self._poll_at, self._due_at, replace_at)
        return max(0.0, min(TURN_S, at - now, self._runs.late_at - clock.boot_s()))

    def _may_start(self) -> bool:
        return bool(self._executors.idle) and not self._stopping

    def _step(self) -> None:
        """Record what has ended, claim for the free executors, and start what was claimed."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at = now + config.CLAIM_POLL_S.read()
            self._may_claim = self._promote = True
        if now >= self._due_at:
            self._may_claim, self._promote, self._due_at = True, True, math.inf
        self._executors.replace(now, fork=not self._stopping)
        if now < self._retry_at:
            return
        try:
            if not self._stopping:
                self._runs.start_waiting()
            self._runs.return_waiting(stopping=self._stopping)
            self._runs.answer()
            # What follows from a completed node can be claimed in the statement that records it.
            self._may_claim |= self._table.in_run and self._records.has_outcomes
            count = self._claimable()
            if count or self._records.waiting:
                self._record_and_claim(count)
                if not self._stopping:
                    self._runs.start_waiting()
            self._retry_s, self._logged = 0.1, ""
        except db.Error as error:
            # The message changes during one outage, from "closed" to "starting up".
            if self._logged != (logged := error.sqlstate or "away"):
                self._logged = logged
                _log.warning("claiming waits for the database: %s", loop.brief(error))
            self._may_claim = True
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
            self._retry_s = min(loop.BACKOFF_MAX_S, self._retry_s * 2)

    def _claimable(self) -> int:
        """Return how many jobs to claim now."""
        if not self._may_claim or self._stopping:
            return 0
        # Results that are recorded anyway are the time to claim for executors that are not free.
        ahead = self._ahead.room(self._runs.waiting) if self._records.has_outcomes else 0
        return self._executors.idle + ahead

    def _record_and_claim(self, count: int) -> None:
        if count:
            self._may_claim = False  # before the claim, so that a notification during it counts
        jobs = self._records.step(count, promote=self._promote and count > 0)
        if len(jobs) < count and self._records.dispatch():
            self._may_claim = True
        if not count:
            return
        self._promote = False
        self._due_at = time.monotonic() + self._claimer.wait_s
        # A job that may have crashed a worker is claimed alone; others may wait behind it.
        partial = self._claimer.isolated or any(job["crash_count"] for job in jobs)
        if len(jobs) == count or (jobs and partial):
            self._may_claim = True
        for job in jobs:
            self._runs.add(job)
        if jobs:
            self.keeper.claimed(self._claimer.sent_at)

    def _close(self) -> None:
        """End the executors, and write what can still be written."""
        for work in self._executors.end_all():
            self._runs.hand_back(work, "its worker ended")
        self._runs.return_waiting(stopping=True)
        try:
            self._records.step(0, promote=False)
        except db.Error as error:
            _log.warning("claims are left to their leases: %s", loop.brief(error))
            self.keeper.leave(settled=False)
        else:
            self.keeper.leave(settled=True)
        self._executors.close()
        self._claimer.close()
        self._wakes.close()
