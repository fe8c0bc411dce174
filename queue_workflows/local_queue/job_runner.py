"""Run the jobs of an in-process queue one after the other in the thread of a worker."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows import errors
from queue_workflows.local_queue import (
    attempts,
    job_queue,
    outcomes,
    plan,
    settings,
    statistics,
    tasks,
)
from queue_workflows.tasks import handlers
from queue_workflows.types import NowFn

_log = logging.getLogger("queue_workflows.local_queue")
STOPPED = "the queue was stopped"
LEAST_SNOOZE_S = 1.0
"""The shortest wait of a `Snooze`, as of a job in the database."""


class JobRunner:
    """Take jobs from the queue, run them, and report how they end; for any number of threads."""

    def __init__(
        self,
        settings_: settings.Settings,
        plan_: plan.ExecutionPlan,
        execute: Callable[[job_queue.Job], Any] | None,
        queue: job_queue.JobQueue,
        outcomes_: outcomes.Outcomes,
        counts: statistics.Statistics,
        *,
        wake: Callable[[], object],
        now_fn: NowFn,
    ) -> None:
        self._settings = settings_
        self._plan = plan_
        self._claims = plan_ if isinstance(plan_, plan.ClaimingPlan) else None
        self._queue = queue
        self._execute = execute
        self._outcomes = outcomes_
        self._counts = counts
        self._wake = wake
        self._now = now_fn

    def give_back(self, job: job_queue.Job, number: int) -> None:
        """Let a job be pending again because the queue stops; no attempt is counted.

        A plan that claims gives it back when it is closed.
        """
        if self._claims is None:
            self._outcomes.failed(job, number, STOPPED, final=False, counted=False)

    def work(self, slot: attempts.Slot, stop: threading.Event) -> None:
        """Run jobs of the queue in this slot, until it is time to end."""
        settings_, queue = self._settings, self._queue
        done: str | None = None
        while not stop.is_set():
            slot.job = job = queue.get(done=done)
            done = None
            if job is None:
                break
            log = _log.isEnabledFor(logging.INFO)
            if log:
                _log.info("👷 %s pulled job '%s' from queue (%s)", slot.name, job.label, job.id)
            if self._mark_running(job, stop):
                stored = self._run(slot, job, log)
                if stored is None:
                    return  # the attempt was ended, and another thread has this slot
                slot.attempt = None
                done = job.id if stored else None
            if settings_.single_job:
                break
            if settings_.cooldown_s:
                if done is not None:
                    queue.done(done)
                    done = None
                stop.wait(settings_.cooldown_s)
        if done is not None:
            queue.done(done)
        slot.job, slot.ended_at = None, self._now()
        self._wake()

    def _mark_running(self, job: job_queue.Job, stop: threading.Event) -> bool:
        try:
            starts = self._plan.mark_running(job)
            if starts or starts is None:
                if not stop.is_set():
                    return True
                self.give_back(job, self._outcomes.attempt(job.id))
                return False
        except BaseException:  # noqa: BLE001  the boundary around app code
            _log.exception("the plan cannot mark job %s as running", job.id)
        else:
            _log.info("job '%s' (%s) is not to run any more", job.label, job.id)
        self._queue.release(job.id)
        return False

    def _run(self, slot: attempts.Slot, job: job_queue.Job, log: bool) -> bool | None:
        """Run a job and store its outcome; return whether the plan has taken its result.

        None: its attempt was ended meanwhile. `log`: log what is usual.
        """
        attempt, forks = self._new_attempt(slot, job), attempts.forks
        try:
            result, error = self._call(slot, attempt), None
        except BaseException as raised:  # noqa: BLE001  the boundary around app code: a task may exit
            result, error = None, raised
        if attempts.forks != forks:  # a child of the handler would run the other jobs, too
            os._exit(attempts.exit_code(error))
        if not attempt.ending.acquire(False):  # by keyword it takes three times as long
            self._counts.add(late_results=1)
            _log.warning("%s: the late result of job %s is dropped", slot.name, job.id)
            return None
        seconds, counts = self._now() - attempt.began, slot.counts
        failed = error is not None and not isinstance(error, errors.Snooze)
        counts.ended(job.task, seconds, failed)
        if isinstance(error, errors.Snooze):
            self._snoozed(slot, attempt, error)
            return False
        if error is not None:
            self._failed(slot, attempt, error)
            return False
        if log:
            _log.info("✅ %s finished job '%s' in %.1f s", slot.name, job.label, seconds)
        attempt.stored = True
        stored = self._outcomes.completed(job, result)
        counts.finished += 1
        return stored

    def _new_attempt(self, slot: attempts.Slot, job: job_queue.Job) -> attempts.Attempt:
        began, deadline, wrong = self._now(), math.inf, None
        if job.timeout_s is not None or self._settings.timeout_s is not None:
            try:
                deadline = began + attempts.limit_s(job, self._settings.timeout_s)
            except errors.InvalidConfig as error:
                wrong = error
        made = attempts.Attempt(job, self._outcomes.attempt(job.id), began, deadline, wrong)
        slot.attempt = made
        if deadline < math.inf:
            self._wake()
        return made

    def _call(self, slot: attempts.Slot, attempt: attempts.Attempt) -> Any:
        if attempt.wrong is not None:
            raise attempt.wrong
        execute = self._execute
        if self._claims is not None:
            return self._claims.call(attempt.job, execute)
        if execute is not None:
            return handlers.unless_signal(execute(attempt.job))
        attempt.control = control = tasks.Control()
        return tasks.run(attempt.job, control, attempt=attempt.number, worker=slot.name)

    def _snoozed(
        self, slot: attempts.Slot, attempt: attempts.Attempt, error: errors.Snooze
    ) -> None:
        job, wait_s = attempt.job, max(LEAST_SNOOZE_S, error.seconds)
        _log.info(
            "💤 %s: job '%s' (%s) waits %g s: %s", slot.name, job.label, job.id, wait_s, error
        )
        attempt.stored = True
        self._outcomes.failed(
            job,
            attempt.number,
            attempts.described(error),
            final=False,
            counted=False,
            wait_s=wait_s,
        )

    def _failed(self, slot: attempts.Slot, attempt: attempts.Attempt, error: BaseException) -> None:
        job, text = attempt.job, attempts.described(error)
        self._counts.note_error(slot.name, text)
        if isinstance(error, plan.NotCompleted):
            _log.error("❌ %s: job '%s' (%s): %s", slot.name, job.label, job.id, text)
        else:
            _log.error("❌ %s failed job '%s' (%s)", slot.name, job.label, job.id, exc_info=error)
        final = isinstance(error, errors.Discard) or error is attempt.wrong
        wait_s = (isinstance(error, errors.Retry) and error.after_s) or 0.0
        attempt.stored = True
        self._outcomes.failed(job, attempt.number, text, final=final, wait_s=wait_s)
