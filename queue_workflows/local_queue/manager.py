"""Run an in-process queue: one thread fetches jobs, one supervises, and the others run them.

Its length: the public class has the settings, their documentation, and a short method for each act.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from queue_workflows import config, errors
from queue_workflows.local_queue import attempts, execution_plan, job_queue
from queue_workflows.local_queue import threads as worker_threads
from queue_workflows.runtime import service
from queue_workflows.telemetry import pressure
from queue_workflows.types import JsonDict, NowFn

_log = logging.getLogger("queue_workflows.local_queue")
LOOP_END_S = 3.0
"""Seconds that a call of the plan, which the master or supervisor makes, may take at the end."""
STALE_AFTER_S = 120.0
"""Seconds until a job that only the plan calls running is reported."""
CORES_SHARE = 0.9
LEAST_WORKERS = 10
_KNOBS = {
    "grace_s": config.MASTER_GRACE_PERIOD_SECONDS,
    "stagger_s": config.WORKER_STAGGER_SECONDS,
    "cooldown_s": config.WORKER_COOLDOWN_SECONDS,
}


class JobQueueManager:
    """Fetch the ready jobs of a plan, and run them in threads that share this process's models.

    `execute(job)` runs a job and returns its result; without it the registered task of this name
    runs. Arguments that are None come from the knobs. Start and stop it, or use it in a `with`
    block. A job whose attempt fails or takes over `timeout_s` is pending again, until
    `max_attempts` have failed. After a time-out the thread continues, since Python cannot end it:
    it is replaced, and its result is dropped.
    """

    def __init__(
        self,
        plan: execution_plan.ExecutionPlan,
        execute: Callable[[job_queue.Job], Any] | None = None,
        *,
        workers: int | None = None,
        single_job: bool | None = None,
        grace_s: float | None = None,
        stagger_s: float | None = None,
        cooldown_s: float | None = None,
        fetch_every_s: float = 60.0,
        timeout_s: float | None = None,
        max_attempts: int = 3,
        throttle: pressure.Throttle | None = None,
        queue: job_queue.JobQueue | None = None,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        check_function(execute)
        times = grace_s, stagger_s, cooldown_s, fetch_every_s, timeout_s
        self.settings = read_settings(workers, single_job, *times, max_attempts)
        self.plan = plan
        self.queue = job_queue.JobQueue(now_fn=now_fn) if queue is None else queue
        self.throttle = pressure.Throttle(now_fn=now_fn) if throttle is None else throttle
        self.statistics = attempts.Statistics()
        self._now = now_fn
        self._lock = threading.Lock()
        self._outcomes = attempts.Outcomes(
            plan, self.queue, self.statistics, self.settings.max_attempts
        )
        self._claims = self._outcomes.claims
        self.threads = worker_threads.WorkerThreads(
            self.settings,
            execute,
            self.queue,
            self._outcomes,
            self.statistics,
            wake=lambda: self._supervisor.wake("workers"),
            now_fn=now_fn,
        )
        self._stale = StaleFlags(plan, self.queue, now_fn)
        self._fetch_at = math.inf
        self._stopping = False
        self._has_loops = True
        self._master = self._new_master()
        self._supervisor = service.Loop(
            "local-queue-supervisor",
            [
                service.Task("memory", config.MEMORY_CHECK_INTERVAL.read, self._check_memory),
                service.Task("outcomes", worker_threads.REPEAT_S, self._outcomes.store_again),
                service.Task("workers", self.threads.pause_s, self._check_threads),
            ],
            now_fn=now_fn,
        )

    # --- Start and stop.

    def start(self, *, threads: bool = True) -> None:
        """Start all threads, the workers one after the other; raise RuntimeError the second time.

        With `threads=False` only the workers have threads, and the caller has to call `run_due`
        again and again.
        """
        with self._lock:
            if self.threads.started:
                raise RuntimeError("the manager was started before; make a new one")
            if self._stopping:
                raise RuntimeError("the manager was stopped before its start; make a new one")
            self._fetch_at = self._now() + self.settings.grace_s
            self.threads.start()
        if self._claims is not None:
            self._claims.open(self)
        self._has_loops = threads
        if threads:
            self._master.start()
            self._supervisor.start()

    def run_due(self) -> float:
        """Do all due work (fetch, check memory, start threads); return the seconds until more."""
        return min(self._supervisor.run_due(), self._master.run_due())

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Start no further job, and wait for the running ones; return whether all have ended.

        Jobs that still run after `timeout_s` are asked to end, and are pending again in the plan.
        Jobs that only waited were never marked as running. Up to 10 s more pass if the plan or its
        database does not reply.
        """
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        self._master.stop(0.0)
        ended = self._supervisor.stop(LOOP_END_S)
        left, ends = self.queue.close(), list[service.Service]([self._master])
        if self._claims is not None and left:
            ends.append(_apart("give-back", lambda: self._give_back(left, worker_threads.STOPPED)))
        drained = self.threads.stop(max(0.0, deadline - time.monotonic()))
        if self._outcomes.waiting:
            ends.append(_apart("outcomes", self._outcomes.store_again))
        until = time.monotonic() + LOOP_END_S
        for each in ends:
            ended = each.stop(max(0.0, until - time.monotonic())) and ended
        if self._claims is not None and self.threads.started:
            self._claims.close()
        return drained and ended

    def __enter__(self) -> JobQueueManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fetch_now(self) -> None:
        """Fetch at once, for an app that has just added a job to its plan."""
        self._fetch_at = -math.inf
        self._master.wake("fetch")

    # --- For a plan that claims.

    @property
    def accepts(self) -> bool:
        """Return whether further jobs may start: the grace period is over, memory is not full."""
        waits = self._stopping or self.throttle.active or self.threads.stuck
        return not waits and self._now() >= self._fetch_at

    def take(self, job: job_queue.Job) -> job_queue.Refusal | None:
        """Queue a claimed job; return None, or why it is refused."""
        self.statistics.add(fetched=1)
        return self.add([job], force=True)[0]

    def _give_back(self, jobs: Iterable[job_queue.Job], reason: str) -> None:
        if self._claims is None:
            return
        for job in jobs:
            try:
                self._claims.give_back(job, reason)
            except BaseException:  # noqa: BLE001  the boundary around the plan
                _log.exception("job %s is not handed back before its lease ends", job.id)

    # --- The master's thread.

    def _new_master(self) -> service.Loop:
        def pause_s() -> float:
            rest_s = self._fetch_at - self._now()
            return rest_s if rest_s > 0 else self.settings.fetch_every_s

        task = service.Task("fetch", pause_s, self._fetch)
        return service.Loop("local-queue-master", [task], now_fn=self._now)

    def _fetch(self) -> None:
        if not self.accepts:
            return
        jobs: list[job_queue.Job] = []
        for each in self.plan.fetch_ready():
            try:
                hash(each.id)
            except Exception:  # noqa: BLE001  the boundary around app code
                _log.exception("the plan returned a %s, whose `id` cannot be used", type(each))
            else:
                jobs.append(each)
        self._stale.forget_reset()
        self.statistics.add(fetched=len(jobs))
        _log.info("👑 Master fetched %d jobs from database", len(jobs))
        self.add(jobs)
        if _log.isEnabledFor(logging.INFO):
            _log.info(
                "📊 %(queue_size)d jobs in the queue, %(active_jobs)d active, %(alive_workers)d of "
                "%(total_workers)d workers alive, %(finished)d finished, %(failed)d failed",
                self.stats(),
            )

    def add(
        self, jobs: Iterable[job_queue.Job], *, force: bool = False
    ) -> list[job_queue.Refusal | None]:
        """Add jobs to the queue; return for each None, or why it is refused."""
        given = list(jobs)
        if self.threads.stuck:
            return [job_queue.Refusal("stuck")] * len(given)
        elsewhere = self._stale.running_elsewhere(given) if self._claims is None else set[str]()
        found = self.queue.add_all(
            (each for each in given if each.id not in elsewhere), force=force
        )
        if elsewhere:
            rest, active = iter(found), job_queue.Refusal("active")
            found = [active if each.id in elsewhere else next(rest) for each in given]
        if _log.isEnabledFor(logging.INFO):
            for job, refusal in zip(given, found, strict=True):
                if refusal is None:
                    _log.info("📥 Added job '%s' to queue (%s)", job.label, job.id)
                else:
                    _log.debug("job '%s' (%s): %s", job.label, job.id, refusal)
        return found

    # --- The supervisor's thread.

    def _check_memory(self) -> None:
        working = self.threads.working or (
            self._claims is not None and self._claims.others_fill_memory
        )
        before = self.throttle.active
        if self.throttle.check(working=working):
            if not before:
                self.queue.pause("memory")
            if self._claims is not None:  # another process may have the memory for them
                self._give_back(self.queue.clear(), self.throttle.reason or "memory is full")
        elif before:
            self.queue.resume("memory")
            self._master.wake("fetch")

    def _check_threads(self) -> None:
        self.threads.check()
        if self._has_loops and not self._master.alive and not self._stopping:
            _log.critical("FATAL: the master thread has died; another one is started")
            self.statistics.add(dead_threads=1)
            self._master = self._new_master()
            self._master.start()

    # --- What is going on.

    @property
    def throttled_by(self) -> str | None:
        """Return the name of the full memory that delays jobs, or None."""
        return self.throttle.reason

    def stats(self) -> JsonDict:
        """Return the counts of the queue, of the threads, by task and by resource."""
        queued, active = self.queue.queued, self.queue.active
        counts = self.statistics
        return {
            "queue_size": len(queued),
            "active_jobs": len(active),
            "active_job_ids": active,
            "queued_job_ids": queued,
            "total_workers": self.settings.workers,
            "alive_workers": self.threads.alive,
            "master_thread_alive": self._master.alive,
            "throttled_by": self.throttled_by,
            "throttle_seconds": self.throttle.seconds,
            **{name: getattr(counts, name) for name in attempts.COUNTERS},
            "abandoned_threads": self.threads.abandoned,
            "unstored_outcomes": self._outcomes.waiting,
            "stale_running_job_ids": self._stale.reported,
            "tasks": {name: dataclasses.asdict(each) for name, each in counts.tasks.items()},
            "last_errors": counts.last_errors,
        }


class StaleFlags:
    """Report jobs that the plan marks as running, but that do not run here, once each.

    A process that died may have left the mark.
    """

    def __init__(
        self, plan: execution_plan.ExecutionPlan, queue: job_queue.JobQueue, now_fn: NowFn
    ) -> None:
        self._plan = plan
        self._queue = queue
        self._now = now_fn
        self._since: dict[str, float | None] = {}
        """Since when each job has been in this state, None once it is reported."""

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
        """Return the ids of jobs that the plan marks as running, but that do not run here."""
        found: set[str] = set()
        for job in jobs:
            if not self._plan.is_currently_running(job.id) or self._queue.is_active(job.id):
                self._since.pop(job.id, None)
                continue
            found.add(job.id)
            now = self._now()
            since = self._since.setdefault(job.id, now)
            if since is not None and now - since >= STALE_AFTER_S:
                self._since[job.id] = None
                _log.warning(
                    "job '%s' (%s) is marked as running for over %.0f s, but does not run here: "
                    "reset its is_currently_running if no other process runs it",
                    job.label, job.id, now - since,
                )  # fmt: skip
        return found


def _apart(name: str, call: Callable[[], object]) -> service.Service:
    """Start a thread for a call of the plan, which may hang; return it."""
    made = service.Thread(f"local-queue-{name}", lambda _: call())
    made.start()
    return made


# --- Settings.


def _is_time(given: Any) -> bool:
    return type(given) in (int, float) and 0 <= given < math.inf


_RANGES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("workers", "max_attempts"),
        lambda given: type(given) is int and given >= 1,
        "a whole number from 1",
    ),
    (("grace_s", "stagger_s", "cooldown_s"), _is_time, "a number of seconds from 0"),
    (
        ("fetch_every_s", "timeout_s"),
        lambda given: _is_time(given) and given > 0,
        "a number of seconds above 0",
    ),
    (("single_job",), lambda given: isinstance(given, bool), "True or False"),
]


def read_settings(
    workers: int | None, single_job: bool | None, *given: Any
) -> worker_threads.Settings:
    """Return the settings; `given` are the fields after these two. A knob replaces each None.

    Raises `InvalidConfig`, which names the value, if one is out of range.
    """
    if workers is None:
        workers = _default_workers()
    if single_job is None:
        single_job = _single_job()
    found = worker_threads.Settings(workers, single_job, *given)
    knobs = {name: knob.read() for name, knob in _KNOBS.items() if getattr(found, name) is None}
    found = found._replace(**knobs)
    for names, takes, meant in _RANGES:
        for name in names:
            if not takes(value := getattr(found, name)) and (name, value) != ("timeout_s", None):
                knob = _KNOBS.get(name)
                variable = f" (argument, or variable {knob.name})" if knob else ""
                raise errors.InvalidConfig(f"{name}={value!r}{variable}: it must be {meant}")
    return found


def check_function(execute: Any) -> None:
    """Raise `InvalidConfig` for a function whose result would have to be run."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in (execute, type(execute).__call__)):
        raise errors.InvalidConfig(
            f"execute={execute!r}: async functions and generators run as tasks only: give them to "
            "register_ingest_task(), and leave `execute` out"
        )


def _default_workers() -> int:
    """Return 90 % of the cores that this process may use, at least 10."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(LEAST_WORKERS, int((cores or 1) * CORES_SHARE))


def _single_job() -> bool:
    text = config.WORKER_SINGLE_JOB_MODE.read()
    cleaned = text.strip().lower()
    if cleaned not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        _log.warning("WORKER_SINGLE_JOB_MODE=%r is neither true nor false; using true", text)
    return cleaned not in ("false", "0", "no", "off")
