"""Define the plans that give an in-process queue its jobs and take outcomes; one is in memory."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from queue_workflows import errors
from queue_workflows.local_queue import job_queue

KEEP_ENDED = 10_000
"""Ended jobs that a `MemoryPlan` keeps by default, a few MB without their arguments and results."""


class ExecutionPlan(Protocol):
    """The jobs to run. Its methods are called from several threads, and may raise.

    What raises is logged: `fetch_ready` is called again at the next fetch, `mark_running` gives the
    job up until then, `mark_done` and `mark_failed` are repeated until they succeed.
    """

    def fetch_ready(self) -> Iterable[job_queue.Job]:
        """Return the jobs that are to run.

        A job that is marked as running may be among them. The queue does not start it again, and
        reports it after a while if it does not run in this process.
        """
        ...

    def mark_running(self, job: job_queue.Job, /) -> bool | None:
        """Note that a job begins; return False if another process has taken it.

        Then the job does not run. It runs for True and for None.
        """

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Store the result."""

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool | None:
        """Store the error; the job is ready again unless this was its last attempt (`final`).

        Returns whether the job has failed for good, or None if `final` says it.
        """

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        ...


class NotCompleted(Exception):
    """How a `ClaimingPlan` reports that a job did not complete, once it has noted the reason."""


@runtime_checkable
class ClaimingPlan(ExecutionPlan, Protocol):
    """A plan that has a claim on each job which it returns, until its outcome or `give_back`.

    So a job that it returns again is not refused for having ended a moment ago. `mark_failed` of
    such a plan decides whether a job has failed for good.
    """

    @property
    def others_fill_memory(self) -> bool:
        """Return whether jobs of other processes may free memory of this one, if it is full."""
        ...

    def open(self, owner: Any, /) -> None:
        """Begin; called by the manager, its owner, before the first of its threads starts."""

    def close(self) -> None:
        """Give back every claim and end; called once, after the last job."""

    def call(self, job: job_queue.Job, execute: Callable[[job_queue.Job], Any] | None, /) -> Any:
        """Run a job by `execute`, or by its registered task if None; return its result.

        `mark_failed` gets the error that this raises.
        """

    def give_back(self, job: job_queue.Job, reason: str, /) -> None:
        """Give up the claim of a job that did not start or did not end; counts no attempt."""


State: TypeAlias = Literal["pending", "running", "completed", "failed"]


@dataclasses.dataclass(slots=True)
class Entry:
    """A job in a `MemoryPlan` with its state; `error` is the error of its latest failure."""

    job: job_queue.Job
    state: State = "pending"
    result: Any = None
    error: str | None = None


class MemoryPlan:
    """A plan in memory, for jobs that need not outlive the process.

    It keeps the `keep_ended` jobs that ended last, with their results, and forgets earlier ones;
    with None it keeps all. Jobs that are pending or run are always kept.
    """

    def __init__(
        self, jobs: Iterable[job_queue.Job] = (), *, keep_ended: int | None = KEEP_ENDED
    ) -> None:
        if keep_ended is not None and (type(keep_ended) is not int or keep_ended < 0):
            raise errors.InvalidConfig(
                f"keep_ended={keep_ended!r}: it must be a whole number from 0, or None for no limit"
            )
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._keep_ended = math.inf if keep_ended is None else keep_ended
        self._ended = OrderedDict[str, None]()
        """The ids of the jobs that have ended, the first ended first."""
        for job in jobs:
            self.add(job)

    def add(self, job: job_queue.Job) -> None:
        """Add a job; raise `InvalidConfig` for the id of a job that is here and has not ended."""
        with self._lock:
            known = self._entries.get(job.id)
            if known is not None and known.state in ("pending", "running"):
                raise errors.InvalidConfig(f"job {job.id!r} is {known.state}: ids are unique")
            self._entries[job.id] = Entry(job)
            self._ended.pop(job.id, None)

    def entry(self, job_id: str) -> Entry | None:
        """Return the entry of a job; None for an id that is unknown, or was forgotten."""
        with self._lock:
            found = self._entries.get(job_id)
            return found and copy.copy(found)

    def fetch_ready(self) -> list[job_queue.Job]:
        """Return the pending jobs, the first added first."""
        with self._lock:
            return [each.job for each in self._entries.values() if each.state == "pending"]

    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; False unless it is pending."""
        with self._lock:
            entry = self._entries.get(job.id)
            if entry is None or entry.state != "pending":
                return False
            entry.state = "running"
        return True

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Store the result."""
        self._mark(job, "completed", result, None)

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> None:
        """Store the error."""
        self._mark(job, "failed" if final else "pending", None, error)

    def _mark(self, job: job_queue.Job, state: State, result: Any, error: str | None) -> None:
        """Store the outcome of a job; beyond `keep_ended`, forget the job that ended first."""
        ended = self._ended
        with self._lock:
            entry = self._entries.get(job.id)
            if entry is None:
                return
            entry.job, entry.state, entry.result, entry.error = job, state, result, error
            if state != "pending":
                ended[job.id] = None
                if len(ended) > self._keep_ended:
                    del self._entries[ended.popitem(last=False)[0]]

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        entry = self._entries.get(job_id)
        return entry is not None and entry.state == "running"
