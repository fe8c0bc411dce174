"""Describe one queue of a worker: its jobs, and how many it claims at once and ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from queue_workflows import config, db
from queue_workflows.claim import claims, job_tables
from queue_workflows.worker import claim_times, claimed_job, node_plans, shapes

if TYPE_CHECKING:
    from queue_workflows.run import executors

SHORT_S: Final = 0.02
"""Longest time in seconds of handlers for which jobs are claimed ahead. A claim and a commit take
1 to 10 ms, so longer handlers would gain little."""
EACH: Final = 32
"""How many jobs may wait for each slot by default (see `batch`)."""
TINY_S: Final = 0.005
"""A job may wait in a busy executor only if handlers take less than this on average, in seconds.
Beside a longer handler, the time for sending the next job does not matter."""
LONGEST_PAUSE: Final = 8
"""The most claims in a row that must find as many jobs as they want, after one did not, before jobs
are claimed ahead again. So in a chain, where one node at a time is ready, only one claim in nine
asks for more."""
ROUNDS: Final = 2
"""How many short handlers each slot must have run before jobs are claimed ahead."""
_FOLLOW: Final = 0.1
"""Weight of the last time in the moving averages."""


class Window:
    """Compute how many jobs to claim ahead, which is as many as end during one statement.

    A job claimed ahead starts as soon as an executor is free, while the statement that records the
    earlier results still runs. `most` is how many jobs may wait for each slot.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots, self._most = slots, most
        self._short = 0
        """How many handlers ended since the last one that was not short."""
        self._handler_s = -1.0
        self._statement_s = 0.002
        self._full = self._pause = 0
        """How many claims in a row found enough jobs, and how many must before claims ahead."""

    def ended(self, seconds: float) -> None:
        """Note how long a handler has run."""
        self._short = self._short + 1 if seconds <= SHORT_S else 0
        before = seconds if self._handler_s < 0 else self._handler_s
        self._handler_s = before + _FOLLOW * (seconds - before)

    def stated(self, seconds: float) -> None:
        """Note how long the statement that recorded jobs took."""
        self._statement_s += _FOLLOW * (seconds - self._statement_s)

    def reset(self) -> None:
        """Claim no job ahead until handlers have proved to be short again."""
        self._short = 0

    def claimed(self, found: int, wanted: int, *, ahead: bool) -> None:
        """Note how many jobs a claim found; asking for more than the queue has takes longer.

        `ahead`: whether some of the wanted jobs would have waited for a slot.
        """
        self._full = self._full + 1 if found >= wanted else 0
        if ahead:
            self._pause = 0 if self._full else min(LONGEST_PAUSE, 2 * self._pause + 1)

    @property
    def is_tiny(self) -> bool:
        """Return whether handlers take less than it takes to send a job to an executor."""
        return self._short >= ROUNDS * self._slots and self._handler_s < TINY_S

    @property
    def ahead(self) -> int:
        """Return how many claimed jobs may wait for an executor."""
        if self._short < ROUNDS * self._slots or self._full < self._pause:
            return 0
        during = math.ceil(self._slots * self._statement_s / max(self._handler_s, 1e-6))
        return min(during, self._slots * self._most)


class Queue:
    """One queue of a worker, and its jobs between claim and record.

    The desk decides about the jobs; this class holds their state. `isolated` has the names of tasks
    or nodes whose jobs each get a new executor.
    """

    def __init__(
        self,
        who: claims.Claimant,
        shape: shapes.Shape,
        runner: executors.Executors,
        *,
        isolated: Sequence[str] = (),
        async_tasks: Sequence[str] = (),
        announces: bool = False,
    ) -> None:
        self.who, self.shape, self.runner = who, shape, runner
        self.table = job_tables.of_queue(who.queue)
        self.isolated, self.async_tasks = frozenset(isolated), frozenset(async_tasks)
        self.announces = announces and self.table.in_run
        lone = shape.concurrent or shape.gpu or self.announces
        self.window = Window(shape.slots, 0 if lone else shape.batch if shape.batch > 1 else EACH)
        self.times = claim_times.ClaimTimes()
        self.jobs: dict[str, claimed_job.ClaimedJob] = {}
        """All claimed jobs, by id."""
        self.waiting: deque[claimed_job.ClaimedJob] = deque()
        """The jobs for which no executor is free yet, in the order of their claims."""
        self.done: list[node_plans.Done] = []
        """Completed jobs that are not recorded yet."""
        self.may_claim = self.promote = True
        self.left = math.inf
        """How many more jobs it may claim."""
        self.most = self.together = 1 << 30
        """The most jobs that one statement claims, and the most results that it records. A claim
        that took too long halves the first. A record that failed leaves the root of the number of
        its results as the second, so that few more fail. Then each grows by one."""
        self.claiming = False
        """Whether a claim waits for its reply."""
        self.asked = 0.0
        """When the last statement of this queue was sent."""
        self.off: str | None = None
        """The policy by which the queue is OFF, or None if it is ON."""
        self.unsure = False
        """Whether a claim may have been committed whose reply was lost."""
        self.unsure_at = math.inf
        """When to look for its jobs again, as the server may have run the statement until then."""
        self.by_row = False
        """Whether the next claim tries row by row, as a row makes the usual claim fail or slow."""
        self.changing = False
        """Whether a model is to be changed before the next job."""
        self.model: str | None = None
        """The loaded model of a gpu queue."""
        self.models: list[str] | None = None

    @property
    def looks(self) -> bool:
        """Return whether a claim, now or at the next poll, may find a job for this worker."""
        return (self.may_claim or self.promote) and self.left > 0 and not self.off

    def claimable(self, *, records: bool) -> tuple[int, bool]:
        """Return how many jobs to claim now, and whether some of them will wait.

        Jobs are claimed ahead only if the statement also records results (`records`).
        """
        if not (self.may_claim and self.looks and self.runner.accepts):
            return 0, False
        self.runner.queues = False  # so `room` does not count places to wait in an executor
        room, held, ahead = self.runner.room, self.jobs.values(), 0
        free = max(0, room - len(self.waiting))
        if self.by_row:
            return int(free > 0 and not records), False
        # A job that has killed a process before may kill this one, and the jobs that wait with it.
        if records and not any(job.crash_count or job.lapse_count for job in held):
            waiting = sum(not job.has_started for job in held)
            ahead = max(0, self.window.ahead - max(0, waiting - room))
        return min(self.most, free + ahead), ahead > 0

    # --- Statements.

    def claim(
        self, count: int, done: Sequence[node_plans.Done], *, by_row: bool = False, **how: Any
    ) -> db.Script[list[tuple[bytes | None, ...]]]:
        """Record completed jobs and claim up to `count`; return the rows for `ClaimedJob`.

        With `by_row`, claim one job row by row, since a row makes the usual claim fail. For `how`
        see `claims.claim`.
        """
        who = self.who
        if by_row:
            who = who._replace(models=self.models or who.models)
            return (yield from claims.claim_apart(self.table, who))
        if self.shape.gpu:
            policy = config.gpu_claim_policy()
            who = who._replace(model=self.model, models=self.models, policy=policy)
        plans: Sequence[claims.Ahead | None] = [None] * len(done)
        if done and self.table.in_run:
            yield from node_plans.learned(done)
            plans = node_plans.after(done)
        pairs = zip(done, plans, strict=True)
        ended = [claims.Done(job.lease, outcome, ahead) for (job, outcome), ahead in pairs]
        return (yield from claims.claim(self.table, who, count=count, done=ended, **how))
