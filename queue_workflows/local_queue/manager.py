"""Run an in-process queue: one thread fetches jobs, one supervises, and the others run jobs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from queue_workflows import config, errors
from queue_workflows.local_queue import job_queue, outcomes, plan, settings, statistics, tasks
from queue_workflows.runtime import service
from queue_workflows.telemetry import pressure
from queue_workflows.types import JsonDict, NowFn

_log = logging.getLogger("queue_workflows.local_queue")
REPEAT_S = 1.0
"""Seconds until an outcome that the plan did not take is given to it again."""
STALE_AFTER_S = 120.0
"""Seconds until a job that only the plan calls running is reported."""
ERROR_CHARS = 2000


class _Worker:
    """One place for a thread, which runs one job at a time."""

    def __init__(self, number: int, start_at: float) -> None:
        self.number = number
        self.name = f"Worker-{number}"
        self.start_at = start_at
        self.thread: service.Pool | None = None
        self.run: _Run | None = None
        self.ended_at: float | None = None
        """When its latest thread has ended as it should."""

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.alive


class _Run:
    """One attempt at one job."""

    def __init__(self, job: job_queue.Job, attempt: int, began: float, deadline: float) -> None:
        self.job = job
        self.attempt = attempt
        self.began = began
        self.deadline = deadline
        self.control = tasks.Control()
        self.returned = False
        """Whether the handler has returned, so that its outcome is the one that counts."""


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
        plan: plan.ExecutionPlan,
        execute: Callable[[job_queue.Job], Any] | None = None,
        *,
        workers: int | None = None,
        single_job: bool | None = None,
        grace_s: float | None = None,
        stagger_s: float | None = None,
        cooldown_s: float | None = None,
        fetch_every_s: float = settings.FETCH_EVERY_S,
        timeout_s: float | None = None,
        max_attempts: int = settings.MAX_ATTEMPTS,
        throttle: pressure.Throttle | None = None,
        queue: job_queue.JobQueue | None = None,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self.settings = settings.read(
            workers=workers,
            single_job=single_job,
            grace_s=grace_s,
            stagger_s=stagger_s,
            cooldown_s=cooldown_s,
            fetch_every_s=fetch_every_s,
            timeout_s=timeout_s,
            max_attempts=max_attempts,
        )
        self.plan = plan
        self.queue = job_queue.JobQueue(now_fn=now_fn) if queue is None else queue
        self.throttle = pressure.Throttle(now_fn=now_fn) if throttle is None else throttle
        self.statistics = statistics.Statistics()
        self._execute = execute
        self._now = now_fn
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._outcomes = outcomes.Outcomes(
            plan, self.queue, self.statistics, self.settings.max_attempts
        )
        self._abandoned: list[service.Pool] = []
        self._stale: dict[str, float | None] = {}
        """Jobs that only the plan calls running, and since when; None: reported."""
        self._fetch_at = math.inf
        self._stopping = False
        self._has_loops = True
        self._master = self._new_master()
        self._supervisor = service.Loop(
            "local-queue-supervisor",
            [
                service.Task("memory", config.MEMORY_CHECK_INTERVAL.read, self._check_memory),
                service.Task("outcomes", REPEAT_S, self._outcomes.store_again),
                service.Task("workers", self._pause_s, self._check_workers),
            ],
            now_fn=now_fn,
        )

    # --- Start and stop.

    def start(self, *, threads: bool = True) -> None:
        """Start all threads, the workers one after the other; raise RuntimeError the second time.

        With `threads=False` there are no threads but those of the workers: the caller has to call
        `run_due` again and again.
        """
        now = self._now()
        with self._lock:
            if self._workers:
                raise RuntimeError("the manager was started before; make a new one")
            self._fetch_at = now + self.settings.grace_s
            self._workers = [
                _Worker(number + 1, now + number * self.settings.stagger_s)
                for number in range(self.settings.workers)
            ]
        self._has_loops = threads
        if threads:
            self._master.start()
            self._supervisor.start()

    def run_due(self) -> float:
        """Do what is due: fetch, check memory, start threads; return the seconds until more is."""
        return min(self._supervisor.run_due(), self._master.run_due())

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Start no further job, and wait for those that run; return whether all have ended.

        Those that still run after `timeout_s` are asked to end, and are pending again in the plan.
        Jobs that only waited were never marked as running.
        """
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        self._supervisor.stop()
        self._master.stop()
        self.queue.close()
        threads = [each.thread for each in self._workers if each.thread is not None]
        for thread in threads:
            thread.stop(0.0)  # all of them first: one that rests must not wait for one that works
        for thread in threads:
            thread.stop(max(0.0, deadline - time.monotonic()))
        busy = [(each, each.run) for each in self._workers]
        left = [
            worker
            for worker, run in busy
            if run is not None
            and self._end_attempt(worker, run, "the queue was stopped", counted=False)
        ]
        self._outcomes.store_again()
        return not left and not any(each.alive for each in self._workers)

    def __enter__(self) -> JobQueueManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fetch_now(self) -> None:
        """Fetch at once, for an app that has just added a job to its plan."""
        self._fetch_at = -math.inf
        self._master.wake("fetch")

    # --- The master's thread.

    def _new_master(self) -> service.Loop:
        task = service.Task("fetch", self._fetch_pause_s, self._fetch)
        return service.Loop("local-queue-master", [task], now_fn=self._now)

    def _fetch_pause_s(self) -> float:
        rest_s = self._fetch_at - self._now()
        return rest_s if rest_s > 0 else self.settings.fetch_every_s

    def _fetch(self) -> None:
        if self._now() < self._fetch_at or self._stopping or self.throttle.active:
            return
        jobs = list(self.plan.fetch_ready())
        gone = [each for each in self._stale if not self.plan.is_currently_running(each)]
        for job_id in gone:
            del self._stale[job_id]
        self.statistics.add(fetched=len(jobs))
        _log.info("👑 Master fetched %d jobs from database", len(jobs))
        self.add(jobs)
        counts = self.stats()
        _log.info(
            "📊 %d jobs in the queue, %d active, %d of %d workers alive, %d finished, %d failed",
            counts["queue_size"], counts["active_jobs"], counts["alive_workers"],
            counts["total_workers"], self.statistics.finished, self.statistics.failed,
        )  # fmt: skip

    def add(
        self, jobs: Iterable[job_queue.Job], *, force: bool = False
    ) -> list[job_queue.Refusal | None]:
        """Add jobs to the queue; return for each None, or why it is refused."""
        found: list[job_queue.Refusal | None] = []
        for job in jobs:
            if self._runs_elsewhere(job):
                found.append(job_queue.Refusal("active"))
                continue
            refusal = self.queue.add(job, force=force)
            if refusal is None:
                _log.info("📥 Added job '%s' to queue (%s)", job.label, job.id)
            else:
                _log.debug("job '%s' (%s): %s", job.label, job.id, refusal)
            found.append(refusal)
        return found

    def _runs_elsewhere(self, job: job_queue.Job) -> bool:
        """Return whether only the plan calls a job running; report it once if that lasts."""
        if not self.plan.is_currently_running(job.id) or self.queue.is_active(job.id):
            self._stale.pop(job.id, None)
            return False
        now = self._now()
        since = self._stale.setdefault(job.id, now)
        if since is not None and now - since >= STALE_AFTER_S:
            self._stale[job.id] = None
            _log.warning(
                "job '%s' (%s) is marked as running for over %.0f s, but does not run here: "
                "reset its is_currently_running if no other process runs it",
                job.label, job.id, now - since,
            )  # fmt: skip
        return True

    # --- The threads of the workers.

    def _work(self, worker: _Worker, stop: threading.Event) -> None:
        while not stop.is_set():
            job = self.queue.get()
            if job is None:
                break
            if not self._run(worker, job):
                return  # the job had timed out, and another thread has this place
            if self.settings.single_job:
                break
            stop.wait(self.settings.cooldown_s)
        worker.ended_at = self._now()
        self._supervisor.wake("workers")

    def _run(self, worker: _Worker, job: job_queue.Job) -> bool:
        """Run one job; return False if it has timed out meanwhile."""
        _log.info("👷 %s pulled job '%s' from queue (%s)", worker.name, job.label, job.id)
        if not self._mark_running(job):
            self.queue.release(job.id)
            return True
        run = self._begin(worker, job)
        error: BaseException | None = None
        result: Any = None
        try:
            result = self._call(run, worker)
        except BaseException as raised:  # noqa: BLE001  the boundary around app code: a task may exit
            error = raised
        with self._lock:
            mine = run.returned = worker.run is run
            run.deadline = math.inf
        if mine:
            self._ended(worker, run, result, error)
            with self._lock:
                worker.run = None
        else:
            self.statistics.add(late_results=1)
            _log.warning("%s: the late result of job %s is dropped", worker.name, job.id)
        return mine

    def _mark_running(self, job: job_queue.Job) -> bool:
        try:
            if self.plan.mark_running(job):
                return True
        except BaseException:  # noqa: BLE001  the boundary around app code
            _log.exception("the plan cannot mark job %s as running", job.id)
            return False
        _log.info("job '%s' (%s) is not to run any more", job.label, job.id)
        return False

    def _begin(self, worker: _Worker, job: job_queue.Job) -> _Run:
        now = self._now()
        timeout_s = self.settings.timeout_s if job.timeout_s is None else job.timeout_s
        deadline = math.inf if timeout_s is None else now + timeout_s
        run = _Run(job, self._outcomes.attempt(job), now, deadline)
        with self._lock:
            worker.run = run
        if deadline < math.inf:
            self._supervisor.wake("workers")
        return run

    def _call(self, run: _Run, worker: _Worker) -> Any:
        if self._execute is not None:
            return self._execute(run.job)
        return tasks.run(run.job, run.control, attempt=run.attempt, worker=worker.name)

    def _ended(self, worker: _Worker, run: _Run, result: Any, error: BaseException | None) -> None:
        job, seconds = run.job, self._now() - run.began
        text = None if error is None else _described(error)
        self.statistics.ended(job.task, seconds, worker=worker.name, error=text)
        if error is None:
            _log.info("✅ %s finished job '%s' in %.1f s", worker.name, job.label, seconds)
            self._outcomes.completed(job, result)
            return
        _log.error("❌ %s failed job '%s' (%s)", worker.name, job.label, job.id, exc_info=error)
        final = isinstance(error, errors.Discard)
        self._outcomes.failed(job, run.attempt, text or "", final=final)

    # --- The supervisor's thread.

    def _check_memory(self) -> None:
        working = any(each.run is not None for each in self._workers)
        before = self.throttle.active
        if self.throttle.check(working=working):
            self.queue.pause()
        else:
            self.queue.resume()
            if before:
                self._master.wake("fetch")

    def _pause_s(self) -> float:
        """Return the seconds until a worker is to be started, or a job reaches its time-out."""
        times: list[float] = []
        for each in self._workers:
            run = each.run
            if each.thread is None:
                times.append(each.start_at)
            elif run is not None:
                times.append(run.deadline)
        return max(0.0, min([REPEAT_S, *(at - self._now() for at in times)]))

    def _check_workers(self) -> None:
        now = self._now()
        for worker in self._workers:
            if worker.thread is not None and not worker.thread.alive:
                self._end_thread(worker, now)
            elif worker.run is not None and now >= worker.run.deadline:
                self._time_out(worker, worker.run)
            if worker.thread is None and now >= worker.start_at and not self._stopping:
                self._start(worker)
        self._abandoned = [each for each in self._abandoned if each.alive]
        if self._has_loops and not self._master.alive and not self._stopping:
            _log.critical("FATAL: the master thread has died; another one is started")
            self.statistics.add(dead_threads=1)
            self._master = self._new_master()
            self._master.start()

    def _start(self, worker: _Worker) -> None:
        worker.ended_at = None
        worker.thread = service.Pool(
            f"local-queue-{worker.name.lower()}", 1, lambda stop: self._work(worker, stop)
        )
        worker.thread.start()

    def _end_thread(self, worker: _Worker, now: float) -> None:
        if worker.ended_at is not None:
            worker.start_at = worker.ended_at + self.settings.cooldown_s
        else:
            _log.critical("FATAL: %s has died; another thread is started", worker.name)
            self.statistics.add(dead_threads=1)
            worker.start_at = now
            run = worker.run
            if run is not None:
                run.returned = False
                self._end_attempt(worker, run, "its thread has died")
        worker.thread = None

    def _time_out(self, worker: _Worker, run: _Run) -> None:
        text = f"timed out after {run.deadline - run.began:g} s"
        thread = worker.thread
        if not self._end_attempt(worker, run, text) or thread is None:
            return
        _log.error("⏰ %s: job '%s' (%s) %s", worker.name, run.job.label, run.job.id, text)
        self.statistics.add(timed_out=1)
        self._abandoned.append(thread)
        worker.thread, worker.start_at = None, self._now()

    def _end_attempt(self, worker: _Worker, run: _Run, text: str, *, counted: bool = True) -> bool:
        """Fail a job whose thread still runs it, and drop its result; False: it has just ended."""
        with self._lock:
            if worker.run is not run or run.returned:
                return False
            worker.run = None
        run.control.interrupt(text)
        seconds = self._now() - run.began
        self.statistics.ended(run.job.task, seconds, worker=worker.name, error=text)
        self._outcomes.failed(run.job, run.attempt, text, final=False, counted=counted)
        return True

    # --- What is going on.

    def stats(self) -> JsonDict:
        """Return the counts: those of the queue, of the threads, by task and by resource."""
        queued, active = self.queue.queued, self.queue.active
        counts = self.statistics
        return {
            "queue_size": len(queued),
            "active_jobs": len(active),
            "active_job_ids": active,
            "queued_job_ids": queued,
            "total_workers": self.settings.workers,
            "alive_workers": sum(each.alive for each in self._workers),
            "master_thread_alive": self._master.alive,
            "throttled_by": self.throttle.reason,
            "throttle_seconds": self.throttle.seconds,
            "fetched": counts.fetched,
            "finished": counts.finished,
            "failed": counts.failed,
            "timed_out": counts.timed_out,
            "abandoned_threads": sum(each.alive for each in self._abandoned),
            "late_results": counts.late_results,
            "dead_threads": counts.dead_threads,
            "unstored_outcomes": self._outcomes.waiting,
            "stale_running_job_ids": [each for each, since in self._stale.items() if since is None],
            "tasks": {name: each._asdict() for name, each in counts.tasks.items()},
            "last_errors": counts.last_errors,
        }


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
