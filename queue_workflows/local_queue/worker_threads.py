"""Run the jobs of an in-process queue in threads, and replace the threads that have ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from queue_workflows import errors
from queue_workflows.local_queue import job_queue, outcomes, plan, settings, statistics, tasks
from queue_workflows.runtime import service
from queue_workflows.types import NowFn

_log = logging.getLogger("queue_workflows.local_queue")
REPEAT_S = 1.0
"""Seconds until an outcome that the plan did not take is given to it again."""
ERROR_CHARS = 2000


class _Control(Protocol):
    def interrupt(self, reason: str) -> None: ...


class _Run:
    """One attempt at one job."""

    __slots__ = ("attempt", "began", "control", "deadline", "ending", "job")

    def __init__(self, job: job_queue.Job, attempt: int, began: float, deadline: float) -> None:
        self.job = job
        self.attempt = attempt
        self.began = began
        self.deadline = deadline
        self.control: _Control | None = None
        self.ending = threading.Lock()
        """Whoever acquires it first decides how the attempt has ended; it is never released."""


class _Place:
    """One place for a thread, which runs one job at a time."""

    def __init__(self, number: int, start_at: float, counts: statistics.Cell) -> None:
        self.name = f"Worker-{number}"
        self.start_at = start_at
        self.counts = counts
        self.thread: service.Pool | None = None
        self.run: _Run | None = None
        self.abandoned = False
        """Whether its attempt was ended while its thread goes on."""
        self.ended_at: float | None = None
        """When its latest thread has ended as it should."""

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.alive


class WorkerThreads:
    """The places for threads, and what runs in them.

    One thread calls `start`, `check` and `pause_s`; the others come from any. `wake` makes that
    thread call `check` soon.
    """

    def __init__(
        self,
        settings_: settings.Settings,
        plan_: plan.ExecutionPlan,
        queue: job_queue.JobQueue,
        execute: Callable[[job_queue.Job], Any] | None,
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
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._left: list[service.Pool] = []
        """Threads that were abandoned."""
        self._stopping = False

    # --- For the supervisor.

    def start(self) -> None:
        """Make the places, whose threads start one after the other."""
        now, stagger_s = self._now(), self._settings.stagger_s
        self._places = [
            _Place(number + 1, now + number * stagger_s, self._counts.new_cell())
            for number in range(self._settings.workers)
        ]

    @property
    def started(self) -> bool:
        """Return whether `start` was called."""
        return bool(self._places)

    def pause_s(self) -> float:
        """Return the seconds until a thread is to be started, or a job reaches its time-out."""
        times: list[float] = []
        for place in self._places:
            run = place.run
            if place.thread is None:
                times.append(place.start_at)
            elif run is not None:
                times.append(run.deadline)
        return max(0.0, min([REPEAT_S, *(at - self._now() for at in times)]))

    def check(self) -> None:
        """Start and replace threads, and end the attempts that take too long."""
        now = self._now()
        for place in self._places:
            run, thread = place.run, place.thread
            if run is not None and now >= run.deadline:
                self._time_out(place, run)
            if thread is not None:
                self._replace(place, thread, now)
            if place.thread is None and now >= place.start_at and not self._stopping:
                self._start(place)
        self._left = [each for each in self._left if each.alive]

    def _replace(self, place: _Place, thread: service.Pool, now: float) -> None:
        ended = not thread.alive
        with (
            self._lock
        ):  # after `alive`: a thread whose attempt was ended by another ends by itself
            abandoned, place.abandoned = place.abandoned, False
        if abandoned:
            self._left.append(thread)
            place.thread, place.start_at = None, now
        elif ended:
            self._end_thread(place, now)

    def _start(self, place: _Place) -> None:
        place.ended_at = None
        name = f"local-queue-{place.name.lower()}"
        place.thread = service.Pool(name, 1, lambda stop: self._work(place, stop))
        place.thread.start()

    def _end_thread(self, place: _Place, now: float) -> None:
        place.thread, run = None, place.run
        if place.ended_at is not None:
            place.start_at = place.ended_at + self._settings.cooldown_s
            return
        _log.critical("FATAL: %s has died; another thread is started", place.name)
        self._counts.add(dead_threads=1)
        place.start_at = now
        if run is not None:
            self._fail(place, run, "its thread has died")
            place.abandoned = False

    def _time_out(self, place: _Place, run: _Run) -> None:
        text = f"timed out after {run.deadline - run.began:g} s"
        if self._fail(place, run, text):
            _log.error("⏰ %s: job '%s' (%s) %s", place.name, run.job.label, run.job.id, text)
            self._counts.add(timed_out=1)

    def stop(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; return whether all have, and no job was given up.

        The queue is closed. Jobs that still run after `timeout_s` are asked to end, and are pending
        again in the plan.
        """
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        threads = [each.thread for each in self._places if each.thread is not None]
        for thread in threads:
            thread.stop(0.0)  # all of them first: one that rests must not wait for one that works
        for thread in threads:
            thread.stop(max(0.0, deadline - time.monotonic()))
        busy = [(place, place.run) for place in self._places]
        left = [run for place, run in busy if run is not None and self._give_up(place, run)]
        return not left and not any(each.alive for each in self._places)

    # --- For any thread.

    @property
    def alive(self) -> int:
        """Return how many threads run, without the abandoned ones."""
        return sum(each.alive for each in self._places)

    @property
    def abandoned(self) -> int:
        """Return how many threads run on whose attempts have ended."""
        return sum(each.alive for each in self._left)

    @property
    def working(self) -> bool:
        """Return whether a job runs."""
        return any(each.run is not None for each in self._places)

    def abandon(self, job_id: str, reason: str) -> bool:
        """End the attempt of a job without an outcome; return False if it does not run."""
        for place in self._places:
            run = place.run
            if run is not None and run.job.id == job_id and self._end_attempt(place, run, reason):
                self._queue.release(job_id)
                self._wake()
                return True
        return False

    def _fail(self, place: _Place, run: _Run, text: str) -> bool:
        if not self._end_attempt(place, run, text):
            return False
        self._outcomes.failed(run.job, run.attempt, text, final=False)
        return True

    def _give_up(self, place: _Place, run: _Run) -> bool:
        text = "the queue was stopped"
        if not self._end_attempt(place, run, text):
            return False
        if self._claims is not None:
            self._outcomes.give_back(self._claims, run.job, text)
        else:
            self._outcomes.failed(run.job, run.attempt, text, final=False, counted=False)
        return True

    def _end_attempt(self, place: _Place, run: _Run, text: str) -> bool:
        """Drop the result of a job whose thread still runs it; return False if it has just ended.

        The thread is replaced by the next `check`.
        """
        with self._lock:
            if not run.ending.acquire(blocking=False):
                return False
            place.run, place.abandoned = None, True
        if run.control is not None:
            run.control.interrupt(text)
        seconds = self._now() - run.began
        self._counts.lost(run.job.task, seconds, worker=place.name, error=text)
        return True

    # --- The threads of the workers.

    def _work(self, place: _Place, stop: threading.Event) -> None:
        settings_, queue = self._settings, self._queue
        done: str | None = None
        while not stop.is_set():
            job = queue.get(done=done)
            done = None
            if job is None:
                break
            log = _log.isEnabledFor(logging.INFO)
            if log:
                _log.info("👷 %s pulled job '%s' from queue (%s)", place.name, job.label, job.id)
            if self._mark_running(job):
                stored = self._run(place, job, log)
                if stored is None:
                    return  # the attempt was ended, and another thread has this place
                place.run = None
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
        place.ended_at = self._now()
        self._wake()

    def _mark_running(self, job: job_queue.Job) -> bool:
        try:
            if self._plan.mark_running(job):
                return True
        except BaseException:  # noqa: BLE001  the boundary around app code
            _log.exception("the plan cannot mark job %s as running", job.id)
        else:
            _log.info("job '%s' (%s) is not to run any more", job.label, job.id)
        self._queue.release(job.id)
        return False

    def _run(self, place: _Place, job: job_queue.Job, log: bool) -> bool | None:
        """Run a job and store its outcome; return whether the plan has taken its result.

        None: its attempt was ended meanwhile. `log`: log what is usual.
        """
        began, deadline, timeout_s = self._now(), math.inf, job.timeout_s
        if timeout_s is None:
            timeout_s = self._settings.timeout_s
        if timeout_s is not None:
            deadline = began + timeout_s
        place.run = run = _Run(job, self._outcomes.attempt(job.id), began, deadline)
        if timeout_s is not None:
            self._wake()
        try:
            result, error = self._call(place, run), None
        except BaseException as raised:  # noqa: BLE001  the boundary around app code: a task may exit
            result, error = None, raised
        if not run.ending.acquire(False):  # by keyword it takes three times as long
            self._counts.add(late_results=1)
            _log.warning("%s: the late result of job %s is dropped", place.name, job.id)
            return None
        seconds, counts = self._now() - began, place.counts
        counts.ended(job.task, seconds, error is not None)
        if error is not None:
            self._failed(place, run, error)
            return False
        if log:
            _log.info("✅ %s finished job '%s' in %.1f s", place.name, job.label, seconds)
        stored = self._outcomes.completed(job, result)
        counts.finished += 1
        return stored

    def _call(self, place: _Place, run: _Run) -> Any:
        execute = self._execute
        if self._claims is not None:
            return self._claims.call(run.job, execute)
        if execute is not None:
            return execute(run.job)
        run.control = control = tasks.Control()
        return tasks.run(run.job, control, attempt=run.attempt, worker=place.name)

    def _failed(self, place: _Place, run: _Run, error: BaseException) -> None:
        job, text = run.job, _described(error)
        self._counts.note_error(place.name, text)
        if isinstance(error, plan.NotCompleted):
            _log.error("❌ %s: job '%s' (%s): %s", place.name, job.label, job.id, text)
        else:
            _log.error("❌ %s failed job '%s' (%s)", place.name, job.label, job.id, exc_info=error)
        final = isinstance(error, errors.Discard)
        self._outcomes.failed(job, run.attempt, text, final=final)


def _described(error: BaseException) -> str:
    if isinstance(error, plan.NotCompleted):
        return str(error)
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
