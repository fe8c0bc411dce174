"""Start and replace the threads of an in-process queue, and end attempts that time out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from queue_workflows.local_queue import (
    attempts,
    job_queue,
    job_runner,
    outcomes,
    settings,
    statistics,
)
from queue_workflows.runtime import service
from queue_workflows.types import NowFn

_log = logging.getLogger("queue_workflows.local_queue")
REPEAT_S = 1.0
"""Seconds until an outcome that the plan did not take is given to it again."""


class WorkerThreads:
    """The slots for threads, and what runs in them.

    One thread calls `start`, `check` and `pause_s`; the others come from any. `wake` makes that
    thread call `check` soon.
    """

    def __init__(
        self,
        settings_: settings.Settings,
        runner: job_runner.JobRunner,
        queue: job_queue.JobQueue,
        outcomes_: outcomes.Outcomes,
        counts: statistics.Statistics,
        *,
        wake: Callable[[], object],
        now_fn: NowFn,
    ) -> None:
        self._settings = settings_
        self._runner = runner
        self._queue = queue
        self._outcomes = outcomes_
        self._counts = counts
        self._wake = wake
        self._now = now_fn
        self._lock = threading.Lock()
        self._slots: list[attempts.Slot] = []
        self._left: list[service.Pool] = []
        """Threads that were abandoned."""
        self._stopping = False
        self._refuses = False

    # --- For the supervisor.

    def start(self) -> None:
        """Make the slots, whose threads start one after the other."""
        now, stagger_s = self._now(), self._settings.stagger_s
        self._slots = [
            attempts.Slot(number + 1, now + number * stagger_s, self._counts.new_cell())
            for number in range(self._settings.workers)
        ]

    @property
    def started(self) -> bool:
        """Return whether `start` was called."""
        return bool(self._slots)

    def pause_s(self) -> float:
        """Return the seconds until a thread is to be started, or a job reaches its time-out."""
        times: list[float] = []
        for slot in self._slots:
            attempt = slot.attempt
            if slot.thread is None:
                times.append(slot.start_at)
            elif attempt is not None:
                times.append(attempt.deadline)
        return max(0.0, min([REPEAT_S, *(at - self._now() for at in times)]))

    def check(self) -> None:
        """Start and replace threads, and end the attempts that take too long."""
        now = self._now()
        for slot in self._slots:
            attempt, thread = slot.attempt, slot.thread
            if attempt is not None and now >= attempt.deadline:
                self._time_out(slot, attempt)
            if thread is not None:
                self._replace(slot, thread, now)
        self._left = [each for each in self._left if each.alive]
        for slot in self._slots:
            if slot.thread is None and now >= slot.start_at and not self._stopping:
                if self._is_full:
                    self._refuse(slot)
                else:
                    self._start(slot)
        self._refuses = self._refuses and self._is_full

    def _replace(self, slot: attempts.Slot, thread: service.Pool, now: float) -> None:
        ended = not thread.alive
        with (
            self._lock
        ):  # after `alive`: a thread whose attempt was ended by another ends by itself
            abandoned, slot.abandoned = slot.abandoned, False
        if abandoned:
            self._left.append(thread)
            slot.thread, slot.start_at = None, now
        elif ended:
            self._end_thread(slot, now)

    @property
    def _is_full(self) -> bool:
        return self.alive + self.abandoned >= 2 * len(self._slots)

    def _refuse(self, slot: attempts.Slot) -> None:
        """Let a slot be without a thread for a while; log it once."""
        slot.start_at = self._now() + REPEAT_S
        if not self._refuses:
            _log.error(
                "%s does not start: %d threads still run jobs that have timed out, and at most %d "
                "threads are open (twice `workers`). One starts when one of them ends: give these "
                "jobs a longer timeout_s, or make them generators or async functions, which end",
                slot.name, self.abandoned, 2 * len(self._slots),
            )  # fmt: skip
        self._refuses = True

    def _start(self, slot: attempts.Slot) -> None:
        slot.ended_at = None
        name = f"local-queue-{slot.name.lower()}"
        thread = service.Pool(name, 1, lambda stop: self._runner.work(slot, stop))
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as this account may have
            slot.start_at = self._now() + REPEAT_S
            _log.error("%s does not start: %s; repeated", slot.name, error)
        else:
            slot.thread = thread

    def _end_thread(self, slot: attempts.Slot, now: float) -> None:
        slot.thread = None
        if slot.ended_at is not None:
            slot.start_at = slot.ended_at + self._settings.cooldown_s
            return
        _log.critical("FATAL: %s has died; another thread is started", slot.name)
        self._counts.add(dead_threads=1)
        slot.start_at = now
        if (job := slot.job) is not None:
            self._end_job_of_dead(slot, job)

    def _end_job_of_dead(self, slot: attempts.Slot, job: job_queue.Job) -> None:
        """End the job that a dead thread had taken, wherever the thread was."""
        attempt, text = slot.attempt, "its thread has died"
        slot.job = slot.attempt = None
        if attempt is None:
            number = self._outcomes.attempt(job.id)
        elif attempt.stored:
            self._queue.done(job.id)
            return
        else:
            number = attempt.number
            seconds = self._now() - attempt.began
            self._counts.lost(job.task, seconds, worker=slot.name, error=text)
        self._outcomes.failed(job, number, text, final=False)

    def _time_out(self, slot: attempts.Slot, attempt: attempts.Attempt) -> None:
        job, text = attempt.job, f"timed out after {attempt.deadline - attempt.began:g} s"
        if self._end_attempt(slot, attempt, text):
            self._outcomes.failed(job, attempt.number, text, final=False)
            _log.error("⏰ %s: job '%s' (%s) %s", slot.name, job.label, job.id, text)
            self._counts.add(timed_out=1)

    def stop(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; return whether all have, and no job was given up.

        The queue is closed. Jobs that still run after `timeout_s` are asked to end, and are pending
        again in the plan.
        """
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        threads = [each.thread for each in self._slots if each.thread is not None]
        for thread in threads:
            thread.stop(0.0)  # all of them first: one that rests must not wait for one that works
        for thread in threads:
            thread.stop(max(0.0, deadline - time.monotonic()))
        busy = [(slot, slot.attempt) for slot in self._slots]
        left = [each for slot, each in busy if each is not None and self._give_up(slot, each)]
        return not left and not any(each.alive for each in self._slots)

    # --- For any thread.

    @property
    def alive(self) -> int:
        """Return how many threads run, without the abandoned ones."""
        return sum(each.alive for each in self._slots)

    @property
    def abandoned(self) -> int:
        """Return how many threads run on whose attempts have ended."""
        return sum(each.alive for each in self._left)

    @property
    def stuck(self) -> bool:
        """Return whether no job can start before an abandoned thread ends."""
        return self._refuses and self.alive == 0

    @property
    def working(self) -> bool:
        """Return whether a job runs."""
        return any(each.attempt is not None for each in self._slots)

    def abandon(self, job_id: str, reason: str) -> bool:
        """End the attempt of a job without an outcome; return False if it does not run."""
        for slot in self._slots:
            attempt = slot.attempt
            if attempt is None or attempt.job.id != job_id:
                continue
            if self._end_attempt(slot, attempt, reason):
                self._queue.release(job_id)
                self._wake()
                return True
        return False

    def _give_up(self, slot: attempts.Slot, attempt: attempts.Attempt) -> bool:
        if not self._end_attempt(slot, attempt, job_runner.STOPPED):
            return False
        self._runner.give_back(attempt.job, attempt.number)
        return True

    def _end_attempt(self, slot: attempts.Slot, attempt: attempts.Attempt, text: str) -> bool:
        """Drop the result of a job whose thread still runs it; return False if it has just ended.

        The thread is replaced by the next `check`.
        """
        with self._lock:
            if not attempt.ending.acquire(blocking=False):
                return False
            slot.attempt, slot.abandoned = None, True
        if attempt.control is not None:
            attempt.control.interrupt(text)
        seconds = self._now() - attempt.began
        self._counts.lost(attempt.job.task, seconds, worker=slot.name, error=text)
        return True
