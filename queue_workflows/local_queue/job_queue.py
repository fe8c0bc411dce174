"""Queue jobs in memory, and refuse a job that waits, runs, or has just ended."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from queue_workflows.types import NowFn

WINDOW_S = 30.0
"""Seconds after the end of a job for which it is refused."""
CHUNK = 100
"""Jobs that are added under one hold of the lock, so that a large fetch delays no worker."""
NO_ARGS: Mapping[str, Any] = {}


class Job(NamedTuple):
    """One job. Its id is unique in its plan; `name` is its name in logs, by default the task.

    `timeout_s`: None stands for the manager's, inf for no limit.
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

    A job is refused while it waits, while it is active, and for `WINDOW_S` after `done`.
    All of it is decided under one lock.
    """

    def __init__(self, *, now_fn: NowFn = time.monotonic) -> None:
        self._now = now_fn
        self._mutex = threading.Lock()
        self._ready = threading.Condition(self._mutex)
        """Notified when a job may start."""
        self._order: deque[Job] = deque()
        """The jobs that wait, the next one first."""
        self._active: dict[str, Job] = {}
        self._here: set[str] = set()
        """The jobs that wait or are active."""
        self._pauses: set[str] = set()
        """The reasons for its pause: the app, and the manager while memory is full."""
        self._closed = False
        self._refused: dict[str, tuple[float, Literal["processed", "waits"]]] = {}
        """For each refused job: until when the queue refuses it, and why."""
        self._ends: list[tuple[float, str]] = []
        """A heap of these times. It may also have times that `_refused` no longer has."""

    def add(self, job: Job, *, force: bool = False) -> Refusal | None:
        """Add a job at the end; return None, or why it is refused.

        `force` ignores that it has just ended. A job that waits or is active is always refused.
        """
        return self.add_all((job,), force=force)[0]

    def add_all(self, jobs: Iterable[Job], *, force: bool = False) -> list[Refusal | None]:
        """Add jobs in their order; return for each what `add` returns."""
        found: list[Refusal | None] = []
        rest, order, here = iter(jobs), self._order, self._here
        while chunk := list(itertools.islice(rest, CHUNK)):
            with self._mutex:
                before = len(order)
                try:
                    for job in chunk:
                        refusal = None
                        if job.id in here or job.id in self._refused or self._closed:
                            refusal = self._refusal(job.id, force=force)
                        if refusal is None:
                            here.add(job.id)
                            order.append(job)
                        found.append(refusal)
                finally:  # an id of a wrong type ends it after some were added
                    self._ready.notify(len(order) - before)
        return found

    def _refusal(self, job_id: str, *, force: bool) -> Refusal | None:
        if self._closed:
            return Refusal("closed")
        if job_id in self._here:
            return Refusal("active" if job_id in self._active else "queued")
        until, reason = self._refused[job_id]
        if (wait_s := until - self._now()) > 0 and not force:
            return Refusal(reason, wait_s)
        del self._refused[job_id]
        return None

    def get(self, timeout_s: float | None = None) -> Job | None:
        """Wait for the next job, and make it active; None after `timeout_s`, and once closed."""
        with self._mutex:
            if self._closed or self._pauses or not self._order:
                self._ready.wait_for(
                    lambda: self._closed or (self._order and not self._pauses), timeout_s
                )
                if self._closed or self._pauses or not self._order:
                    return None
            job = self._order.popleft()
            self._active[job.id] = job
            return job

    def done(self, job_id: str) -> None:
        """Note that an active job has ended for good; its window begins."""
        with self._mutex:
            self._leave(job_id, WINDOW_S, "processed")

    def release(self, job_id: str, *, wait_s: float = 0.0) -> None:
        """Note that an active job does not run any more, and may be added again after `wait_s`."""
        with self._mutex:
            self._leave(job_id, wait_s, "waits")

    def _leave(self, job_id: str, wait_s: float, reason: Literal["processed", "waits"]) -> None:
        """Remove an active job, and refuse to add it again for `wait_s` seconds."""
        if self._active.pop(job_id, None) is None:
            return
        self._here.remove(job_id)
        now, ends, refused = self._now(), self._ends, self._refused
        while ends and ends[0][0] <= now:
            end, over = heapq.heappop(ends)
            if over in refused and refused[over][0] == end:
                del refused[over]
        if wait_s > 0:
            refused[job_id] = now + wait_s, reason
            heapq.heappush(ends, (now + wait_s, job_id))

    def pause(self, who: str = "app") -> None:
        """Let no further job start until the same one calls `resume`."""
        with self._mutex:
            self._pauses.add(who)

    def resume(self, who: str = "app") -> None:
        """Let jobs start again, unless somebody else has paused it."""
        with self._mutex:
            self._pauses.discard(who)
            self._ready.notify_all()

    def remove(self, job_id: str) -> bool:
        """Remove a job that waits; return False if it does not wait."""
        with self._mutex:
            if job_id not in self._here or job_id in self._active:
                return False
            self._here.remove(job_id)
            self._order.remove(next(each for each in self._order if each.id == job_id))
            return True

    def clear(self) -> list[Job]:
        """Remove the jobs that wait, and return them."""
        with self._mutex:
            left = list(self._order)
            self._order.clear()
            self._here.intersection_update(self._active)
            return left

    def close(self) -> list[Job]:
        """Refuse further jobs and let none start; return the jobs that waited."""
        with self._mutex:
            self._closed = True
            self._ready.notify_all()
        return self.clear()

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
