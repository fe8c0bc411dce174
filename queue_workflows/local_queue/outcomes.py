"""Report outcomes of jobs to the plan of an in-process queue, until the plan accepts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows.local_queue import job_queue, plan, statistics

_log = logging.getLogger("queue_workflows.local_queue")


class Outcomes:
    """Count the attempts of jobs and store how they end. From any thread.

    A job stays active in the queue until the plan has taken its outcome, so that it cannot run
    twice.
    """

    def __init__(
        self,
        plan: plan.ExecutionPlan,
        queue: job_queue.JobQueue,
        counts: statistics.Statistics,
        max_attempts: int,
    ) -> None:
        self._plan = plan
        self._queue = queue
        self._counts = counts
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        """The failed attempts of jobs that will be tried again."""
        self._waiting: list[tuple[job_queue.Job, bool, Callable[[], object]]] = []

    @property
    def waiting(self) -> int:
        """Return how many outcomes the plan has not taken yet."""
        return len(self._waiting)

    def attempt(self, job: job_queue.Job) -> int:
        """Return the number of the attempt that begins now, from 1."""
        return self._failures.get(job.id, 0) + 1

    def completed(self, job: job_queue.Job, result: Any) -> None:
        """Store a result."""
        self._failures.pop(job.id, None)
        self._counts.add(finished=1)
        self._store(job, True, lambda: self._plan.mark_done(job, result))

    def failed(
        self, job: job_queue.Job, attempt: int, error: str, *, final: bool, counted: bool = True
    ) -> None:
        """Store an error; the job is pending again unless it was `final`, or its last attempt."""
        final = final or (counted and attempt >= self._max_attempts)
        if final:
            self._failures.pop(job.id, None)
            self._counts.add(failed=1)
        elif counted:
            self._failures[job.id] = attempt
        self._store(job, final, lambda: self._plan.mark_failed(job, error, final))

    def store_again(self) -> None:
        """Give the plan once more what it has not taken."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for job, final, store in waiting:
            self._store(job, final, store)

    def _store(self, job: job_queue.Job, final: bool, store: Callable[[], object]) -> None:
        try:
            store()
        except BaseException:  # noqa: BLE001  the boundary around app code
            _log.exception("the plan does not take the outcome of job %s; repeated", job.id)
            with self._lock:
                self._waiting.append((job, final, store))
            return
        if final:
            self._queue.done(job.id)
        else:
            self._queue.release(job.id)
