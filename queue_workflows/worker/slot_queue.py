"""Run one queue of a worker with slots: claim jobs, send them to executors, record the results."""

from __future__ import annotations

import logging
import math
import time

from queue_workflows import config, db
from queue_workflows.engine import job_tables
from queue_workflows.executor import loaded_app
from queue_workflows.runtime import clock
from queue_workflows.worker import (
    claimer,
    current_job,
    executor_set,
    executor_shape,
    loop,
    multiplexer,
    slot,
    slot_ahead,
    slot_keeper,
    slot_models,
    slot_records,
    slot_runs,
)

_log = logging.getLogger(__name__)


class SlotQueue:
    """Run the jobs of one queue; for the thread of the loop.

    All queues of a worker share its connections, its lease keeper and its launcher.
    """

    def __init__(
        self,
        own: slot.Slot,
        shape: executor_shape.Shape,
        *,
        limits: executor_shape.Limits,
        mux: multiplexer.Multiplexer,
        registered: loaded_app.Registered,
        keeper: slot_keeper.SlotKeeper,
        endings: slot_keeper.Endings,
        dedicated: db.DedicatedConnection,
    ) -> None:
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        self.who = who = own.who()
        in_run = who.queue in config.DAG_QUEUES
        announces = in_run and registered.announces
        if announces:
            # The app's hook gets a node's value, which its executor has until its next node. The
            # executor waits until the node is recorded.
            shape = shape._replace(batch=1)
        self.table = job_tables.of_queue(who.queue)
        self.executors = executor_set.ExecutorSet(mux, shape, limits)
        self.claimer = claimer.Claimer(self.table, own.who, dedicated=dedicated)
        self.claimer.on_lost = keeper.lost
        self.claimer.other_jobs = keeper.job_ids
        self.claimer.held_back = lambda: keeper.memory.active
        self._keeper = keeper
        self.records = slot_records.Records(self.table, self.claimer, keeper, own.in_flight)
        # An executor that runs many jobs at once never has one wait.
        lone = shape.concurrent or who.queue == "gpu"
        self.ahead = slot_ahead.Ahead(
            0 if lone else shape.slots, shape.batch, collects=not (announces or lone)
        )
        self.runs = slot_runs.Runs(
            self.table,
            who,
            self.claimer,
            registered,
            executors_=self.executors,
            records=self.records,
            keeper=keeper,
            endings=endings,
            ahead=self.ahead,
            shape=shape,
        )
        self.records.on_ended = self.runs.recorded
        self.models: slot_models.Changes | None = None
        """What changes the model of a gpu worker's executor."""
        self._may_claim = self._promote = True
        self._due_at = 0.0
        """When a limit of the queue admits the next job, or a delayed one is due."""

    def mark(self, *, promote: bool = False) -> None:
        """Note that there may be a job to claim; any thread may call it without `promote`."""
        self._may_claim = True
        self._promote |= promote

    @property
    def may_claim(self) -> bool:
        """Return whether there may be a job to claim."""
        return self._may_claim

    @property
    def busy(self) -> bool:
        """Return whether jobs run, or a model is changed, or anything is to be written."""
        changing = self.models is not None and self.models.running
        return changing or self.runs.busy or self.records.waiting

    def timeout(self, now: float, *, stopping: bool) -> float:
        """Return in how many seconds there is something to do; 0.0 or less: now."""
        may_start = self._may_claim and bool(self.executors.idle) and not stopping
        collects_until = 0.0 if stopping else self._collects_until
        if self.runs.answers.are_due or may_start or (self.records.waiting and not collects_until):
            return 0.0
        replace_at = math.inf if stopping else self.executors.replace_at
        late_at = min(self.runs.late_at, collects_until or math.inf)
        return min(min(self._due_at, replace_at) - now, late_at - clock.boot_s())

    @property
    def _collects_until(self) -> float:
        """Return until when results wait for those of jobs that need no claim; 0.0: they do not."""
        if not self.ahead.suffice(self.runs.unsent):
            return 0.0
        until = self.records.outcomes_since + slot_ahead.COLLECT_S
        return until if self.records.has_only_outcomes and clock.boot_s() < until else 0.0

    def replace(self, now: float, *, fork: bool) -> None:
        """Replace executors that have ended, and note whether it is time for a further claim."""
        if now >= self._due_at:
            self._may_claim, self._promote, self._due_at = True, True, math.inf
        self.executors.replace(now, fork=fork)

    def step(self, *, stopping: bool) -> None:
        """Record what has ended, claim for the free executors, and start what was claimed."""
        if not stopping:
            self.runs.start_waiting()
        self.runs.return_waiting(stopping=stopping)
        self.runs.answers.send()
        self._change_model(stopping=stopping)
        if not stopping and self._collects_until:
            return
        # What follows from a completed node can be claimed in the statement that records it. A job
        # that is queued again with a time may be due before the next poll.
        self._may_claim |= self.records.has_delays or (
            self.table.in_run and self.records.has_outcomes
        )
        count = self._claimable(stopping=stopping)
        if count or self.records.waiting:
            self._record_and_claim(count)
            if not stopping:
                self.runs.start_waiting()

    def start_meanwhile(self) -> None:
        """Start claimed jobs on free executors, while a statement runs."""
        try:
            self.runs.start_waiting(fork=False)
        except db.StatementRuns:
            return  # what its executor needs is read after the statement

    def _change_model(self, *, stopping: bool) -> None:
        """Write what was reported of models, and change the model if that is due."""
        if self.models is not None:
            self.models.write()
            if self.models.due and not stopping:
                self.models.begin(self.executors.free_for_request())

    def _claimable(self, *, stopping: bool) -> int:
        """Return how many jobs to claim now."""
        if not self._may_claim or stopping:
            return 0
        # Results that are recorded anyway are the time to claim for executors that are not free.
        ahead = self.ahead.room(self.runs.waiting) if self.records.has_outcomes else 0
        if ahead and self._keeper.holds_crashed():
            ahead = 0  # each job that waits would count a crash if the worker is killed
        return self.executors.idle + ahead

    def _record_and_claim(self, count: int) -> None:
        if count:
            self._may_claim = False  # before the claim, so that a notification during it counts
        ahead = count > self.executors.idle
        jobs = self.records.step(count, promote=self._promote and count > 0)
        if len(jobs) < count and self.records.dispatch():
            self._may_claim = True
        if not count:
            return
        self._promote = False
        self.ahead.claimed(len(jobs), count, ahead=ahead)
        self._due_at = time.monotonic() + self.claimer.wait_s
        if len(jobs) == count or (jobs and self.claimer.isolated):
            self._may_claim = True
        for job in jobs:
            self.runs.add(job)
        if jobs:
            self._keeper.claimed(self.claimer.sent_at)

    def kill(self, work: current_job.Work, now: bool) -> None:
        """End the executor of a job of this queue; any thread may call it."""
        self.runs.kill(work, now)

    def end(self) -> bool:
        """Wait for the end of the executors; return whether all that is to be written was."""
        for work in self.executors.end_all():
            self.runs.hand_back(work, "its worker ended")
        self.runs.return_waiting(stopping=True)
        try:
            self.records.step(0, promote=False)
        except db.Error as error:
            _log.warning("claims are left to their leases: %s", loop.brief(error))
            return False
        finally:
            self.executors.close()
        return True
