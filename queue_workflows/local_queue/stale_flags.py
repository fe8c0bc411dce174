"""Find jobs that only the plan of an in-process queue calls running, and report them once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from queue_workflows.local_queue import job_queue, plan
from queue_workflows.types import NowFn

_log = logging.getLogger("queue_workflows.local_queue")
STALE_AFTER_S = 120.0
"""Seconds until a job that only the plan calls running is reported."""


class StaleFlags:
    """The jobs whose `is_currently_running` may be left over from a process that has died."""

    def __init__(self, plan_: plan.ExecutionPlan, queue: job_queue.JobQueue, now_fn: NowFn) -> None:
        self._plan = plan_
        self._queue = queue
        self._now = now_fn
        self._since: dict[str, float | None] = {}
        """The jobs, and since when; None: reported."""

    @property
    def reported(self) -> list[str]:
        """Return the ids of the jobs that were reported."""
        return [each for each, since in self._since.copy().items() if since is None]

    def forget_reset(self) -> None:
        """Forget the jobs whose flag was reset."""
        for each in [*self._since]:
            if not self._plan.is_currently_running(each):
                self._since.pop(each, None)

    def running_elsewhere(self, jobs: Iterable[job_queue.Job]) -> set[str]:
        """Return the ids of those jobs that run by the plan, but not here."""
        runs, known = self._plan.is_currently_running, self._since
        return {
            each.id
            for each in jobs
            if (runs(each.id) or each.id in known) and self._runs_elsewhere(each)
        }

    def _runs_elsewhere(self, job: job_queue.Job) -> bool:
        if not self._plan.is_currently_running(job.id) or self._queue.is_active(job.id):
            self._since.pop(job.id, None)
            return False
        now = self._now()
        since = self._since.setdefault(job.id, now)
        if since is not None and now - since >= STALE_AFTER_S:
            self._since[job.id] = None
            _log.warning(
                "job '%s' (%s) is marked as running for over %.0f s, but does not run here: "
                "reset its is_currently_running if no other process runs it",
                job.label, job.id, now - since,
            )  # fmt: skip
        return True
