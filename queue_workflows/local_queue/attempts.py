"""Count the attempts of an in-process queue, and report outcomes until its plan takes them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows.local_queue import job_queue, plan

_log = logging.getLogger("queue_workflows.local_queue")
_CLAIMING = plan.ClaimingPlan  # `plan` is an argument where it is used
MAX_TASKS = 1000
"""Tasks that are counted by name, since any name may be in a row of a queue."""
OTHER_TASKS = "(others)"


class Outcomes:
    """Count the attempts of jobs and store how they end. From any thread.

    A job stays active in the queue until the plan has taken its outcome, so that it cannot run
    twice.
    """

    def __init__(
        self,
        plan: plan.ExecutionPlan,
        queue: job_queue.JobQueue,
        counts: Statistics,
        max_attempts: int,
    ) -> None:
        self.plan = plan
        self.claims = plan if isinstance(plan, _CLAIMING) else None
        """The plan if it claims its jobs; then it counts their attempts itself."""
        self._queue = queue
        self._counts = counts
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        """The failed attempts of jobs that will be tried again."""
        self._waiting: list[tuple[job_queue.Job, Callable[[], object], bool, float]] = []

    @property
    def waiting(self) -> int:
        """Return how many outcomes the plan has not taken yet."""
        return len(self._waiting)

    def attempt(self, job_id: str) -> int:
        """Return the number of the attempt that begins now, from 1."""
        return self._failures.get(job_id, 0) + 1 if self._failures else 1

    def completed(self, job: job_queue.Job, result: Any) -> bool:
        """Store a result; return whether the plan has taken it.

        Then the caller has to note in the queue that the job is done.
        """
        if self._failures:
            self._failures.pop(job.id, None)
        try:
            self.plan.mark_done(job, result)
        except BaseException:  # noqa: BLE001  the boundary around app code
            self._keep(job, lambda: self.plan.mark_done(job, result), final=True)
            return False
        return True

    def failed(
        self,
        job: job_queue.Job,
        attempt: int,
        error: str,
        *,
        final: bool,
        counted: bool = True,
        wait_s: float = 0.0,
    ) -> None:
        """Store an error; the job is pending again unless it was `final`, or its last attempt.

        `wait_s`: for how long it then does not start.
        """
        final = final or (counted and attempt >= self._max_attempts)
        if final:
            self._failures.pop(job.id, None)
        elif counted and self.claims is None:
            self._failures[job.id] = attempt
        self._store(job, lambda: self._failed(job, error, final=final), final=final, wait_s=wait_s)

    def _failed(self, job: job_queue.Job, error: str, *, final: bool) -> bool:
        decided = self.plan.mark_failed(job, error, final)
        over = final if decided is None else decided
        if over:
            self._failures.pop(job.id, None)
            self._counts.add(failed=1)
        return over

    def store_again(self) -> None:
        """Give the plan once more what it has not taken."""
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for job, store, final, wait_s in waiting:
            self._store(job, store, final=final, wait_s=wait_s)

    def _store(
        self, job: job_queue.Job, store: Callable[[], object], *, final: bool, wait_s: float
    ) -> None:
        try:
            decided = store()
        except BaseException:  # noqa: BLE001  the boundary around app code
            self._keep(job, store, final=final, wait_s=wait_s)
            return
        if final if decided is None else decided:
            self._queue.done(job.id)
        else:
            self._queue.release(job.id, wait_s=wait_s)

    def _keep(
        self, job: job_queue.Job, store: Callable[[], object], *, final: bool, wait_s: float = 0.0
    ) -> None:
        _log.exception("the plan does not take the outcome of job %s; repeated", job.id)
        with self._lock:
            self._waiting.append((job, store, final, wait_s))


@dataclasses.dataclass(slots=True)
class TaskCount:
    """The ended attempts of one task: all, those that failed, and the seconds of all."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class Cell:
    """The counts of one slot of a thread; one thread at a time writes them, without a lock."""

    __slots__ = ("finished", "tasks")

    def __init__(self) -> None:
        self.finished = 0
        self.tasks: dict[str, TaskCount] = {}

    def ended(self, task: str, seconds: float, failed: bool) -> None:
        """Count an attempt that has ended."""
        count = self.tasks.get(task)
        if count is None:
            name = task if len(self.tasks) < MAX_TASKS else OTHER_TASKS
            count = self.tasks.setdefault(name, TaskCount())
        count.ended += 1
        count.seconds += seconds
        if failed:
            count.failed += 1


class Statistics:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetched = 0
        self.failed = 0
        """Jobs that have failed for good."""
        self.timed_out = 0
        self.late_results = 0
        """Results of jobs that had timed out, which were dropped."""
        self.dead_threads = 0
        self._cells: list[Cell] = []
        self._lost = self.new_cell()
        """What is counted for a thread by another one."""
        self._errors: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def new_cell(self) -> Cell:
        """Return the counts of one slot of a thread."""
        cell = Cell()
        with self._lock:
            self._cells.append(cell)
        return cell

    def lost(self, task: str, seconds: float, *, worker: str, error: str) -> None:
        """Count an attempt that was ended while its thread goes on."""
        with self._lock:
            self._lost.ended(task, seconds, True)
            self._errors[worker] = error

    def note_error(self, worker: str, error: str) -> None:
        """Remember the latest error of a worker."""
        with self._lock:
            self._errors[worker] = error

    @property
    def finished(self) -> int:
        """Return the number of completed jobs."""
        with self._lock:
            return sum(cell.finished for cell in self._cells)

    @property
    def tasks(self) -> dict[str, TaskCount]:
        """Return the counts by task."""
        found: dict[str, TaskCount] = {}
        with self._lock:
            for cell in self._cells:
                for task, count in cell.tasks.copy().items():
                    total = found.setdefault(task, TaskCount())
                    total.ended += count.ended
                    total.failed += count.failed
                    total.seconds += count.seconds
        return found

    @property
    def last_errors(self) -> dict[str, str]:
        """Return the latest error of each worker that had one."""
        with self._lock:
            return dict(self._errors)
