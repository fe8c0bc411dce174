"""Count the attempts of an in-process queue, and report outcomes until its plan takes them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows.local_queue import execution_plan, job_queue

_log = logging.getLogger("queue_workflows.local_queue")
MAX_TASKS = 1000
"""Tasks that are counted by name, since any name may be in a row of a queue."""
OTHER_TASKS = "(others)"
COUNTERS = ("fetched", "finished", "failed", "timed_out", "late_results", "dead_threads")


@dataclasses.dataclass(slots=True)
class TaskCount:
    """The ended attempts of one task: their number, the failed ones, and their total seconds."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class Statistics:
    """Counters that several threads add to."""

    fetched = finished = failed = timed_out = late_results = dead_threads = 0
    """`failed`: jobs that failed for good. `late_results`: dropped results of timed-out jobs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskCount] = {}
        self._last_errors: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def ended(self, worker: str, task: str, seconds: float, error: str | None = None) -> None:
        """Count an attempt that has ended, by this error if it has failed."""
        with self._lock:
            if task not in self._tasks and len(self._tasks) >= MAX_TASKS:
                task = OTHER_TASKS
            count = self._tasks.setdefault(task, TaskCount())
            count.ended += 1
            count.seconds += seconds
            if error is not None:
                count.failed += 1
                self._last_errors[worker] = error

    @property
    def tasks(self) -> dict[str, TaskCount]:
        """Return the counts by task."""
        with self._lock:
            return {task: dataclasses.replace(count) for task, count in self._tasks.items()}

    @property
    def last_errors(self) -> dict[str, str]:
        """Return the latest error of each worker that had one."""
        with self._lock:
            return self._last_errors.copy()


class Outcomes:
    """Count the attempts of jobs and store how they end. From any thread.

    A job stays active in the queue until the plan has taken its outcome, so that it cannot run
    twice.
    """

    def __init__(
        self,
        plan: execution_plan.ExecutionPlan,
        queue: job_queue.JobQueue,
        counts: Statistics,
        max_attempts: int,
    ) -> None:
        self.plan = plan
        self.claims = plan if isinstance(plan, execution_plan.ClaimingPlan) else None
        """The plan if it claims its jobs; then it counts their attempts itself."""
        self._queue = queue
        self._counts = counts
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        """The failed attempts of jobs that will be tried again."""
        self._waiting: list[tuple[job_queue.Job, Callable[[], bool], float]] = []

    @property
    def waiting(self) -> int:
        """Return how many outcomes the plan has not taken yet."""
        return len(self._waiting)

    def attempt(self, job_id: str) -> int:
        """Return the number of the attempt that begins now, from 1."""
        return self._failures.get(job_id, 0) + 1

    def completed(self, job: job_queue.Job, result: Any) -> None:
        """Store a result."""
        if self._failures:
            self._failures.pop(job.id, None)

        def store() -> bool:
            self.plan.mark_done(job, result)
            self._counts.add(finished=1)
            return True

        self._end(job, store, 0.0)

    def failed(
        self,
        job: job_queue.Job,
        error: str,
        *,
        final: bool = False,
        counted: bool = True,
        wait_s: float = 0.0,
    ) -> None:
        """Store an error; the job is pending again unless it was `final`, or its last attempt.

        `wait_s`: for how long it then does not start.
        """
        if counted and not final:
            attempt = self.attempt(job.id)
            final = attempt >= self._max_attempts
            if self.claims is None:
                self._failures[job.id] = attempt
        if final:
            self._failures.pop(job.id, None)

        def store() -> bool:
            decided = self.plan.mark_failed(job, error, final)
            is_over = final if decided is None else decided
            if is_over:
                self._counts.add(failed=1)
                self._failures.pop(job.id, None)
            return is_over

        self._end(job, store, wait_s)

    def store_again(self) -> None:
        """Give the plan the outcomes again that it failed to store."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._end(*each)

    def _end(self, job: job_queue.Job, store: Callable[[], bool], wait_s: float) -> None:
        try:
            is_over = store()
        except BaseException:  # noqa: BLE001  the boundary around app code
            text = "the plan does not take the outcome of job %s, and gets it again every second"
            _log.exception(text, job.id)
            with self._lock:
                self._waiting.append((job, store, wait_s))
            return
        if is_over:
            self._queue.done(job.id)
        else:
            self._queue.release(job.id, wait_s=wait_s)
