"""Queue jobs in memory, and refuse a job that waits, runs, or has just ended."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
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

    `timeout_s` None: the manager's; inf: none.
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
    """Why a job was not added.

    `wait_s`: the rest of the window of a job that has just ended, or of the wait that it asked for.
    """

    reason: Literal["queued", "active", "processed", "waits", "stuck", "closed"]
    wait_s: float | None = None

    def __str__(self) -> str:
        if self.wait_s is not None:
            why = "asked to wait" if self.reason == "waits" else "ended a moment ago"
            return f"{why}, refused for {self.wait_s:.1f} s more"
        return {
            "queued": "already in queue",
            "active": "already running",
            "stuck": "every thread runs a job that has timed out",
        }.get(self.reason, "the queue is closed")


class JobQueue:
    """First in, first out. Every method may be called from any thread.

    A job is refused while it waits, while it is active, and for `window_s` seconds after `done`.
    All of it is decided under one lock.
    """

    def __init__(self, *, window_s: float = WINDOW_S, now_fn: NowFn = time.monotonic) -> None:
        self._window_s = window_s
        self._now = now_fn
        self._mutex = threading.Lock()
        self._ready = threading.Condition(self._mutex)
        """Notified when a job may start."""
        self._order: deque[Job] = deque()
        """The jobs that wait, the next one first."""
        self._active: dict[str, Job] = {}
        self._paused = self._closed = False
        self._known: dict[str, float | None] = {}
        """When a job has ended; None: it waits or is active."""
        self._ends: deque[str] = deque()
        """The jobs that have ended, in order; one that came again since is here too."""
        self._waits: dict[str, float] = {}
        """Until when the jobs wait that asked to."""
        self._wait_ends: list[tuple[float, int, str]] = []
        """A heap of the ends of these waits; one that is over, or was replaced, is here too."""
        self._numbers = itertools.count()
        self._forget_at = math.inf
        """When the first window may be over."""

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
        now, known = self._now(), self._known
        with self._mutex:
            order = self._order
            before = len(order)
            try:
                for job in jobs:
                    refusal = None
                    if job.id in known or self._closed or job.id in self._waits:
                        refusal = self._refusal(job.id, now, force=force)
                    if refusal is None:
                        known[job.id] = None
                        order.append(job)
                    found.append(refusal)
            finally:  # an id of a wrong type ends it after some were added
                if added := len(order) - before:
                    self._ready.notify(added)

    def _refusal(self, job_id: str, now: float, *, force: bool) -> Refusal | None:
        if self._closed:
            return Refusal("closed")
        if (wait_s := self._waits.get(job_id, now) - now) > 0:
            return None if force else Refusal("waits", wait_s)
        ended_at = self._known.get(job_id, -math.inf)
        if ended_at is None:
            return Refusal("active" if job_id in self._active else "queued")
        left_s = ended_at + self._window_s - now
        return Refusal("processed", left_s) if left_s > 0 and not force else None

    def get(self, timeout_s: float | None = None, *, done: str | None = None) -> Job | None:
        """Wait for the next job, and make it active; None after `timeout_s`, and once closed.

        `done`: the id of an active job that has ended for good, as the method `done` notes it.
        """
        with self._mutex:
            if done is not None:
                self._done(done)
            if not self._order or self._paused:
                self._ready.wait_for(
                    lambda: self._closed or (self._order and not self._paused), timeout_s
                )
                if self._closed or self._paused or not self._order:
                    return None
            job = self._order.popleft()
            self._active[job.id] = job
            return job

    def done(self, job_id: str) -> None:
        """Note that an active job has ended for good; its window begins."""
        with self._mutex:
            self._done(job_id)

    def _done(self, job_id: str) -> None:
        if self._active.pop(job_id, None) is None:
            return
        self._known[job_id] = now = self._now()
        self._ends.append(job_id)
        if now >= self._forget_at or len(self._ends) == 1:
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Forget the jobs whose window is over."""
        known, ends = self._known, self._ends
        while ends:
            ended_at = known.get(ends[0])
            if ended_at is not None:
                if now - ended_at < self._window_s:
                    self._forget_at = ended_at + self._window_s
                    return
                del known[ends[0]]
            ends.popleft()

    def release(self, job_id: str, *, wait_s: float = 0.0) -> None:
        """Note that an active job does not run any more, and may be added again after `wait_s`."""
        with self._mutex:
            if self._active.pop(job_id, None) is not None:
                del self._known[job_id]
                if wait_s:
                    self._wait(job_id, wait_s)

    def _wait(self, job_id: str, wait_s: float) -> None:
        now, waits, ends = self._now(), self._waits, self._wait_ends
        while ends and ends[0][0] <= now:
            end, _, over = heapq.heappop(ends)
            if waits.get(over) == end:
                del waits[over]
        waits[job_id] = now + wait_s
        heapq.heappush(ends, (now + wait_s, next(self._numbers), job_id))

    def pause(self) -> None:
        """Let no further job start."""
        with self._mutex:
            self._paused = True

    def resume(self) -> None:
        """Let jobs start again."""
        with self._mutex:
            self._paused = False
            self._ready.notify_all()

    def remove(self, job_id: str) -> bool:
        """Remove a job that waits; return False if it does not wait."""
        with self._mutex:
            if self._known.get(job_id, 0.0) is not None or job_id in self._active:
                return False
            del self._known[job_id]
            self._order = deque(each for each in self._order if each.id != job_id)
            return True

    def clear(self) -> list[Job]:
        """Remove the jobs that wait, and return them."""
        with self._mutex:
            return self._clear()

    def _clear(self) -> list[Job]:
        left = list(self._order)
        self._order.clear()
        for job in left:
            del self._known[job.id]
        return left

    def close(self) -> list[Job]:
        """Refuse further jobs and let none start; return those that waited."""
        with self._mutex:
            self._closed = True
            left = self._clear()
            self._ready.notify_all()
        return left

    @property
    def queued(self) -> list[str]:
        """Return the ids of the jobs that wait, the next one first."""
        with self._mutex:
            return [each.id for each in self._order]

    @property
    def active(self) -> list[str]:
        """Return the ids of the jobs that run."""
        with self._mutex:
            return list(self._active)

    def is_active(self, job_id: str) -> bool:
        """Return whether the job runs."""
        with self._mutex:
            return job_id in self._active
