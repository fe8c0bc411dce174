"""Queue jobs in memory, and refuse a job that waits, runs, or has just ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from queue_workflows.types import NowFn

WINDOW_S = 30.0
"""Seconds after the end of a job for which it is refused."""
NO_ARGS: Mapping[str, Any] = {}


class Job(NamedTuple):
    """One job. Its id is unique in its plan; `name` is how logs call it, by default the task.

    `timeout_s` None: the manager's.
    """

    id: str
    task: str
    args: Mapping[str, Any] = NO_ARGS
    name: str | None = None
    timeout_s: float | None = None

    @property
    def label(self) -> str:
        """Return how logs call the job."""
        return self.name or self.task


class Refusal(NamedTuple):
    """Why a job was not added. `wait_s`: the rest of the window of a job that has just ended."""

    reason: Literal["queued", "active", "processed", "closed"]
    wait_s: float | None = None

    def __str__(self) -> str:
        if self.wait_s is not None:
            return f"ended a moment ago, refused for {self.wait_s:.1f} s more"
        return {"queued": "already in queue", "active": "already running"}.get(
            self.reason, "the queue is closed"
        )


class _Waiting(queue.Queue["Job | None"]):
    """The jobs that wait, by id; `get` makes a job active in the same hold of the mutex."""

    paused = False
    closed = False

    def _init(self, maxsize: int) -> None:  # noqa: ARG002  the base class gives it
        self.queued: dict[str, Job] = {}
        self.active: dict[str, Job] = {}

    def _qsize(self) -> int:
        return 1 if self.closed else 0 if self.paused else len(self.queued)

    def _get(self) -> Job | None:
        if self.closed:
            return None
        job = self.queued.pop(next(iter(self.queued)))
        self.active[job.id] = job
        return job


class JobQueue:
    """First in, first out. Every method may be called from any thread.

    A job is refused while it waits, while it is active, and for `window_s` seconds after `done`.
    All of it is decided under one lock, the mutex of a `queue.Queue`.
    """

    def __init__(self, *, window_s: float = WINDOW_S, now_fn: NowFn = time.monotonic) -> None:
        self._window_s = window_s
        self._now = now_fn
        self._waiting = _Waiting()
        self._ended: dict[str, float] = {}
        """When jobs ended, the earliest first."""

    def add(self, job: Job, *, force: bool = False) -> Refusal | None:
        """Add a job at the end; return None, or why it is refused.

        `force` ignores that it has just ended. A job that waits or is active is always refused.
        """
        now = self._now()
        with self._waiting.mutex:
            refusal = self._refusal(job.id, now, force=force)
            if refusal is None:
                self._ended.pop(job.id, None)
                self._waiting.queued[job.id] = job
                self._waiting.not_empty.notify()
        return refusal

    def _refusal(self, job_id: str, now: float, *, force: bool) -> Refusal | None:
        if self._waiting.closed:
            return Refusal("closed")
        if job_id in self._waiting.queued:
            return Refusal("queued")
        if job_id in self._waiting.active:
            return Refusal("active")
        self._forget(now)
        ended_at = self._ended.get(job_id)
        if ended_at is None or force:
            return None
        return Refusal("processed", ended_at + self._window_s - now)

    def _forget(self, now: float) -> None:
        """Forget the jobs whose window is over."""
        while self._ended:
            job_id = next(iter(self._ended))
            if now - self._ended[job_id] < self._window_s:
                return
            del self._ended[job_id]

    def get(self, timeout_s: float | None = None) -> Job | None:
        """Wait for the next job, and make it active; None after `timeout_s`, and once closed."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def done(self, job_id: str) -> None:
        """Note that an active job has ended for good; its window begins."""
        now = self._now()
        with self._waiting.mutex:
            if self._waiting.active.pop(job_id, None) is not None:
                self._ended[job_id] = now
                self._forget(now)

    def release(self, job_id: str) -> None:
        """Note that an active job does not run any more, and may be added again at once."""
        with self._waiting.mutex:
            self._waiting.active.pop(job_id, None)

    def pause(self) -> None:
        """Let no further job start."""
        with self._waiting.mutex:
            self._waiting.paused = True

    def resume(self) -> None:
        """Let jobs start again."""
        with self._waiting.mutex:
            self._waiting.paused = False
            self._waiting.not_empty.notify_all()

    def close(self) -> list[Job]:
        """Refuse further jobs and let none start; return those that waited."""
        with self._waiting.mutex:
            self._waiting.closed = True
            left = list(self._waiting.queued.values())
            self._waiting.queued.clear()
            self._waiting.not_empty.notify_all()
        return left

    @property
    def queued(self) -> list[str]:
        """Return the ids of the jobs that wait, the next one first."""
        with self._waiting.mutex:
            return list(self._waiting.queued)

    @property
    def active(self) -> list[str]:
        """Return the ids of the jobs that run."""
        with self._waiting.mutex:
            return list(self._waiting.active)

    def is_active(self, job_id: str) -> bool:
        """Return whether the job runs."""
        with self._waiting.mutex:
            return job_id in self._waiting.active
