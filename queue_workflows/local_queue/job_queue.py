"""A queue of jobs in memory that refuses a job which waits, runs, or has just ended."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from queue_workflows.types import NowFn

WINDOW_S = 30.0
"""Seconds after the end of a job for which it is refused."""
CHUNK = 100
"""Jobs that are added under one hold of the lock, so that a large fetch delays no worker."""
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
    """The jobs that wait, in order, and the ids of those that wait or are active."""

    paused = False
    closed = False

    def _init(self, maxsize: int) -> None:  # noqa: ARG002  the base class gives it
        self.order: deque[Job] = deque()
        self.queued: set[str] = set()
        self.active: dict[str, Job] = {}

    def _qsize(self) -> int:
        return 1 if self.closed else 0 if self.paused else len(self.order)

    def _get(self) -> Job | None:
        if self.closed:
            return None
        job = self.order.popleft()
        self.queued.discard(job.id)
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
        self._mutex = self._waiting.mutex
        self._ended: dict[str, float] = {}
        """When jobs ended, by id."""
        self._ends: deque[tuple[str, float]] = deque()
        """The same in order; a job that came again and ended again is here twice."""

    def add(self, job: Job, *, force: bool = False) -> Refusal | None:
        """Add a job at the end; return None, or why it is refused.

        `force` ignores that it has just ended. A job that waits or is active is always refused.
        """
        return self.add_all((job,), force=force)[0]

    def add_all(self, jobs: Iterable[Job], *, force: bool = False) -> list[Refusal | None]:
        """Add jobs in their order; return for each what `add` returns."""
        found: list[Refusal | None] = []
        rest = iter(jobs)
        while chunk := list(itertools.islice(rest, CHUNK)):
            self._add_chunk(chunk, found, force=force)
        return found

    def _add_chunk(self, jobs: Sequence[Job], found: list[Refusal | None], *, force: bool) -> None:
        now, waiting = self._now(), self._waiting
        with self._mutex:
            queued, active = waiting.queued, waiting.active
            before = len(waiting.order)
            for job in jobs:
                job_id = job.id
                refusal = None
                if job_id in queued or job_id in active or self._ended or waiting.closed:
                    refusal = self._refusal(job_id, now, force=force)
                if refusal is None:
                    queued.add(job_id)
                    waiting.order.append(job)
                found.append(refusal)
            if added := len(waiting.order) - before:
                waiting.not_empty.notify(added)

    def _refusal(self, job_id: str, now: float, *, force: bool) -> Refusal | None:
        waiting = self._waiting
        if waiting.closed:
            return Refusal("closed")
        if job_id in waiting.queued:
            return Refusal("queued")
        if job_id in waiting.active:
            return Refusal("active")
        ended_at = self._ended.get(job_id)
        if ended_at is None:
            return None
        left_s = ended_at + self._window_s - now
        if left_s > 0 and not force:
            return Refusal("processed", left_s)
        del self._ended[job_id]
        return None

    def _forget(self, now: float) -> None:
        """Forget the jobs whose window is over."""
        ends, ended = self._ends, self._ended
        while ends and now - ends[0][1] >= self._window_s:
            job_id, at = ends.popleft()
            if ended.get(job_id) == at:
                del ended[job_id]

    def get(self, timeout_s: float | None = None, *, done: str | None = None) -> Job | None:
        """Wait for the next job, and make it active; None after `timeout_s`, and once closed.

        `done`: the id of an active job that has ended for good, as the method `done` notes it.
        """
        waiting = self._waiting
        with self._mutex:
            if done is not None:
                self._done(done)
            if waiting.order and not waiting.paused:
                job = waiting.order.popleft()
                waiting.queued.discard(job.id)
                waiting.active[job.id] = job
                return job
        try:
            return waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def done(self, job_id: str) -> None:
        """Note that an active job has ended for good; its window begins."""
        with self._mutex:
            self._done(job_id)

    def _done(self, job_id: str) -> None:
        if self._waiting.active.pop(job_id, None) is None:
            return
        self._ended[job_id] = now = self._now()
        self._ends.append((job_id, now))
        if now - self._ends[0][1] >= self._window_s:
            self._forget(now)

    def release(self, job_id: str) -> None:
        """Note that an active job does not run any more, and may be added again at once."""
        with self._mutex:
            self._waiting.active.pop(job_id, None)

    def pause(self) -> None:
        """Let no further job start."""
        with self._mutex:
            self._waiting.paused = True

    def resume(self) -> None:
        """Let jobs start again."""
        with self._mutex:
            self._waiting.paused = False
            self._waiting.not_empty.notify_all()

    def remove(self, job_id: str) -> bool:
        """Remove a job that waits; return False if it does not wait."""
        with self._mutex:
            waiting = self._waiting
            if job_id not in waiting.queued:
                return False
            waiting.queued.discard(job_id)
            waiting.order = deque(each for each in waiting.order if each.id != job_id)
            return True

    def clear(self) -> list[Job]:
        """Remove the jobs that wait, and return them."""
        with self._mutex:
            return self._clear()

    def _clear(self) -> list[Job]:
        left = list(self._waiting.order)
        self._waiting.order.clear()
        self._waiting.queued.clear()
        return left

    def close(self) -> list[Job]:
        """Refuse further jobs and let none start; return those that waited."""
        with self._mutex:
            self._waiting.closed = True
            left = self._clear()
            self._waiting.not_empty.notify_all()
        return left

    @property
    def queued(self) -> list[str]:
        """Return the ids of the jobs that wait, the next one first."""
        with self._mutex:
            return [each.id for each in self._waiting.order]

    @property
    def active(self) -> list[str]:
        """Return the ids of the jobs that run."""
        with self._mutex:
            return list(self._waiting.active)

    def is_active(self, job_id: str) -> bool:
        """Return whether the job runs."""
        with self._mutex:
            return job_id in self._waiting.active
