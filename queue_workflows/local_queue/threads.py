"""Run the jobs of an in-process queue in threads: start and replace them, end late attempts."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from queue_workflows import config, errors
from queue_workflows.dag import payload
from queue_workflows.local_queue import attempts, execution_plan, job_queue
from queue_workflows.run import running
from queue_workflows.runtime import service
from queue_workflows.tasks import handlers, registry
from queue_workflows.tasks import job as current
from queue_workflows.types import NowFn, Row

_log = logging.getLogger("queue_workflows.local_queue")
REPEAT_S = 1.0
"""Seconds until an outcome that the plan did not take is given to it again."""
STOPPED = "the queue was stopped"
DIED = "its thread has died"
LEAST_SNOOZE_S = 1.0
"""The shortest wait of a `Snooze`, the same as for a job in the database."""
ERROR_CHARS = 2000
QUEUE = "local"
"""What `current_job().queue` returns."""


class Settings(NamedTuple):
    """Times in seconds; with `timeout_s` None, jobs may take any time."""

    workers: int
    single_job: bool
    grace_s: float
    stagger_s: float
    cooldown_s: float
    fetch_every_s: float
    timeout_s: float | None
    max_attempts: int


class Attempt:
    """One attempt at one job."""

    __slots__ = ("began", "control", "deadline", "is_over", "job", "stored", "wrong")

    def __init__(self, job: job_queue.Job, began: float, limit_s: Any) -> None:
        self.job = job
        self.began = began
        self.deadline = math.inf
        self.wrong: errors.InvalidConfig | None = None
        """Why its handler is not called at all."""
        self.control: running.Running | None = None
        """What can end a generator or an async function."""
        self.is_over = False
        """Whether a thread has decided how the attempt ends; the first one does."""
        self.stored = False
        """Whether the plan gets, or has got, its outcome from the thread that ran it."""
        if isinstance(limit_s, (int, float)) and limit_s is not True and limit_s > 0:
            self.deadline = began + limit_s
        elif limit_s is not None:
            self.wrong = errors.InvalidConfig(
                f"job {job.id!r}: timeout_s={limit_s!r}: it must be a number of seconds above 0"
            )


class Slot:
    """One slot for a thread, which runs one job at a time."""

    def __init__(self, number: int, start_at: float) -> None:
        self.name = f"Worker-{number}"
        self.start_at = start_at
        self.thread: service.Thread | None = None
        self.job: job_queue.Job | None = None
        """The job that its thread has taken, until its outcome is stored."""
        self.attempt: Attempt | None = None
        self.abandoned = False
        """Whether its attempt was ended while its thread goes on."""
        self.ended_at: float | None = None
        """When its latest thread has ended as it should."""

    @property
    def alive(self) -> bool:
        """Return whether its thread runs."""
        return self.thread is not None and self.thread.alive


class WorkerThreads:
    """The slots for threads, and what runs in them.

    One thread calls `start`, `check` and `pause_s`; the others come from any. `wake` makes that
    thread call `check` soon.
    """

    def __init__(
        self,
        settings: Settings,
        execute: Callable[[job_queue.Job], Any] | None,
        queue: job_queue.JobQueue,
        outcomes: attempts.Outcomes,
        counts: attempts.Statistics,
        *,
        wake: Callable[[], object],
        now_fn: NowFn,
    ) -> None:
        self._settings = settings
        self._execute = execute
        self._queue = queue
        self._outcomes = outcomes
        self._plan, self._claims = outcomes.plan, outcomes.claims
        self._counts = counts
        self._wake = wake
        self._now = now_fn
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._left: list[service.Thread] = []
        """Threads that were abandoned."""
        self._stopping = False
        self._refuses = False

    # --- For the supervisor.

    def start(self) -> None:
        """Make the slots, whose threads start one after the other."""
        now, stagger_s = self._now(), self._settings.stagger_s
        self._slots = [
            Slot(number + 1, now + number * stagger_s) for number in range(self._settings.workers)
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
            elif attempt is not None and not attempt.is_over:
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
                self._start(slot)
        self._refuses = self._refuses and self._is_full

    def _time_out(self, slot: Slot, attempt: Attempt) -> None:
        job, text = attempt.job, f"timed out after {attempt.deadline - attempt.began:g} s"
        if self._end_attempt(slot, attempt, text):
            self._outcomes.failed(job, text)
            _log.error("⏰ %s: job '%s' (%s) %s", slot.name, job.label, job.id, text)
            self._counts.add(timed_out=1)

    def _replace(self, slot: Slot, thread: service.Thread, now: float) -> None:
        has_ended = not thread.alive
        with self._lock:  # after `alive`, as a thread whose attempt was ended here ends by itself
            abandoned, slot.abandoned = slot.abandoned, False
        if abandoned:
            self._left.append(thread)
            slot.thread, slot.start_at = None, now
        elif has_ended and slot.ended_at is not None:
            slot.thread, slot.start_at = None, slot.ended_at + self._settings.cooldown_s
        elif has_ended:
            _log.critical("FATAL: %s has died; another thread is started", slot.name)
            self._counts.add(dead_threads=1)
            slot.thread, slot.start_at = None, now
            self._end_job_of_dead(slot, now)

    def _end_job_of_dead(self, slot: Slot, now: float) -> None:
        """End the job that a dead thread had taken, wherever the thread was."""
        job, attempt = slot.job, slot.attempt
        slot.job = slot.attempt = None
        if job is None:
            return
        if attempt is not None and attempt.stored:
            self._queue.done(job.id)
            return
        if attempt is not None:
            self._counts.ended(slot.name, job.task, now - attempt.began, DIED)
        self._outcomes.failed(job, DIED)

    @property
    def _is_full(self) -> bool:
        return self.alive + self.abandoned >= 2 * len(self._slots)

    def _start(self, slot: Slot) -> None:
        if self._is_full:
            slot.start_at = self._now() + REPEAT_S
            if not self._refuses:
                _log.error(
                    "%s does not start: %d threads still run jobs that have timed out, and at most "
                    "%d threads are open (twice `workers`). One starts when one of them ends: give "
                    "these jobs a longer timeout_s, or make them generators or async functions, "
                    "which end", slot.name, self.abandoned, 2 * len(self._slots),
                )  # fmt: skip
            self._refuses = True
            return
        slot.ended_at = None
        name = f"local-queue-{slot.name.lower()}"
        thread = service.Thread(name, lambda stop: self._work(slot, stop))
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as this account may have
            slot.start_at = self._now() + REPEAT_S
            _log.error("%s does not start, which is tried again: %s", slot.name, error)
        else:
            slot.thread = thread

    def stop(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; return whether all did, and no job was given back.

        The queue is closed. A job that still runs after `timeout_s` is asked to end, and its plan
        gets it back as pending.
        """
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        threads = [each.thread for each in self._slots if each.thread is not None]
        for thread in threads:
            thread.stop(0.0)  # all of them first: one that rests must not wait for one that works
        for thread in threads:
            thread.stop(max(0.0, deadline - time.monotonic()))
        busy = [(slot, slot.attempt) for slot in self._slots]
        left = [each for slot, each in busy if each and self._end_attempt(slot, each, STOPPED)]
        for each in left:
            self._give_back(each.job)
        return not left and not any(each.alive for each in self._slots)

    # --- For any thread.

    @property
    def alive(self) -> int:
        """Return how many threads run, without the abandoned ones."""
        return sum(each.alive for each in self._slots)

    @property
    def abandoned(self) -> int:
        """Return how many threads still run although their attempts were ended."""
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
        """End the attempt of a job without an outcome; return False if it does not run.

        Its thread is replaced, and what its handler returns is dropped.
        """
        for slot in self._slots:
            attempt = slot.attempt
            if attempt is None or attempt.job.id != job_id:
                continue
            if self._end_attempt(slot, attempt, reason):
                self._queue.release(job_id)
                self._wake()
                return True
        return False

    def _end_attempt(self, slot: Slot, attempt: Attempt, text: str) -> bool:
        """Drop the result of a job whose thread still runs it; return False if it has just ended.

        The thread is replaced by the next `check`.
        """
        with self._lock:
            if attempt.is_over:
                return False
            attempt.is_over = True
            slot.job, slot.attempt, slot.abandoned = None, None, True
        self._counts.ended(slot.name, attempt.job.task, self._now() - attempt.began, text)
        if attempt.control is not None:
            attempt.control.interrupt(text)
        return True

    def _give_back(self, job: job_queue.Job) -> None:
        """Let a job be pending again because the queue stops; no attempt is counted.

        A plan that claims gives it back when it is closed.
        """
        if self._claims is None:
            self._outcomes.failed(job, STOPPED, counted=False)

    # --- In the threads.

    def _work(self, slot: Slot, stop: threading.Event) -> None:
        """Run jobs of the queue in this slot, until it is time to end."""
        settings = self._settings
        while not stop.is_set():
            slot.job = job = self._queue.get()
            if job is None:
                break
            log = _log.isEnabledFor(logging.INFO)
            if log:
                _log.info("👷 %s pulled job '%s' from queue (%s)", slot.name, job.label, job.id)
            if self._mark_running(job, stop) and not self._run(slot, job, log):
                return  # the attempt was ended, and another thread has this slot
            slot.job = None  # first, so that a death from here on does not end the job again
            slot.attempt = None
            if settings.single_job:
                break
            if settings.cooldown_s:
                stop.wait(settings.cooldown_s)
        slot.job, slot.ended_at = None, self._now()
        self._wake()

    def _mark_running(self, job: job_queue.Job, stop: threading.Event) -> bool:
        try:
            starts = self._plan.mark_running(job)
            if starts or starts is None:
                if not stop.is_set():
                    return True
                self._give_back(job)
                return False
        except BaseException:  # noqa: BLE001  the boundary around app code
            _log.exception("the plan cannot mark job %s as running", job.id)
        else:
            _log.info("job '%s' (%s) does not run: its plan refuses it now", job.label, job.id)
        self._queue.release(job.id)
        return False

    def _run(self, slot: Slot, job: job_queue.Job, log: bool) -> bool:
        """Run a job and store its outcome; return False if its attempt was ended meanwhile.

        `log`: also log normal outcomes.
        """
        number, pid = self._outcomes.attempt(job.id), os.getpid()
        limit_s = self._settings.timeout_s if job.timeout_s is None else job.timeout_s
        slot.attempt = attempt = Attempt(job, self._now(), limit_s)
        if attempt.deadline < math.inf:
            self._wake()
        try:
            result, error = self._call(slot, attempt, number), None
        except BaseException as raised:  # noqa: BLE001  the boundary around app code: a task may exit
            result, error = None, raised
        if os.getpid() != pid:  # a child of the handler would run the other jobs, too
            os._exit(_exit_code(error))
        with self._lock:
            is_late, attempt.is_over = attempt.is_over, True
        if is_late:
            self._counts.add(late_results=1)
            _log.warning("%s: the late result of job %s is dropped", slot.name, job.id)
            return False
        seconds = self._now() - attempt.began
        if error is not None:
            self._failed(slot, attempt, error, seconds)
            return True
        self._counts.ended(slot.name, job.task, seconds)
        if log:
            _log.info("✅ %s finished job '%s' in %.1f s", slot.name, job.label, seconds)
        attempt.stored = True
        self._outcomes.completed(job, result)
        return True

    def _call(self, slot: Slot, attempt: Attempt, number: int) -> Any:
        if attempt.wrong is not None:
            raise attempt.wrong
        job, execute = attempt.job, self._execute
        if self._claims is not None:
            return self._claims.call(job, execute)
        if execute is not None:
            return handlers.unless_signal(execute(job))
        attempt.control = running.Running()
        return _run_task(job, attempt.control, number, slot.name)

    def _failed(self, slot: Slot, attempt: Attempt, error: BaseException, seconds: float) -> None:
        """Store the error of a job, which may ask by it for another try."""
        job, text, final, wait_s = attempt.job, payload.error_text(error), False, 0.0
        if not isinstance(error, execution_plan.NotCompleted):
            text = f"{type(error).__name__}: {text}"
        text = text[:ERROR_CHARS]
        snoozes = isinstance(error, errors.Snooze)
        self._counts.ended(slot.name, job.task, seconds, None if snoozes else text)
        if snoozes:
            wait_s = max(LEAST_SNOOZE_S, error.seconds)
            _log.info(
                "💤 %s: job '%s' (%s) waits %g s: %s", slot.name, job.label, job.id, wait_s, error
            )
        elif isinstance(error, execution_plan.NotCompleted):
            _log.error("❌ %s: job '%s' (%s): %s", slot.name, job.label, job.id, text)
        else:
            _log.error("❌ %s failed job '%s' (%s)", slot.name, job.label, job.id, exc_info=error)
            final = isinstance(error, errors.Discard) or error is attempt.wrong
            wait_s = (isinstance(error, errors.Retry) and error.after_s) or 0.0
        attempt.stored = True
        self._outcomes.failed(job, text, final=final, counted=not snoozes, wait_s=wait_s)


def _run_task(job: job_queue.Job, control: running.Running, attempt: int, worker: str) -> Any:
    """Return the result of the job's task. Raises the task's errors, and `UnknownTask`."""
    task = config.get_config().ingest_task_map.get(job.task)
    if task is None:
        raise errors.UnknownTask(
            f"this process knows no task {job.task!r}: register_ingest_task(), or pass `execute`"
        )
    given = dict(job.args)
    row: Row = {
        "id": job.id, "task_name": job.task, "queue": QUEUE, "reason": "", "args": given,
        "attempts": attempt - 1, "claim_no": attempt, "worker_id": worker,
    }  # fmt: skip
    own = current.Job(row, control)
    with contextlib.closing(handlers.Runner()) as runner, current.running(own):
        begun = registry.caller_of(task).call(task, own.reason, given, job.task)
        value = runner.run(begun, control)
    value = handlers.unless_signal(value)
    return own.result_set if value is None else value


def _exit_code(error: BaseException | None) -> int:
    """Return with which code a process exits that ends by this error."""
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        return (error.code or 0) & 0xFF
    return int(error is not None)
