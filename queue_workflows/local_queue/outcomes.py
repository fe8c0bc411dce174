"""Report outcomes of jobs to the plan of an in-process queue, until the plan accepts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows.local_queue import job_queue, plan, statistics

_log = logging.getLogger("queue_workflows.local_queue")
_CLAIMING = plan.ClaimingPlan  # `plan` is an argument where it is used


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
        self._counts_failures = not isinstance(plan, _CLAIMING)  # such a plan counts them itself
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
            self._plan.mark_done(job, result)
        except BaseException:  # noqa: BLE001  the boundary around app code
            self._keep(job, lambda: self._plan.mark_done(job, result), final=True)
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
        elif counted and self._counts_failures:
            self._failures[job.id] = attempt
        self._store(job, lambda: self._failed(job, error, final=final), final=final, wait_s=wait_s)

    def _failed(self, job: job_queue.Job, error: str, *, final: bool) -> bool:
        decided = self._plan.mark_failed(job, error, final)
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
