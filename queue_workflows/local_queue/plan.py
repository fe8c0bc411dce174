"""Define where the jobs of an in-process queue come from, and where their outcomes go."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from queue_workflows import errors
from queue_workflows.local_queue import job_queue


class ExecutionPlan(Protocol):
    """The jobs to run. Its methods are called from several threads, and may raise.

    What raises is logged: `fetch_ready` is called again at the next fetch, `mark_running` gives the
    job up until then, `mark_done` and `mark_failed` are repeated until they succeed.
    """

    def fetch_ready(self) -> Iterable[job_queue.Job]:
        """Return the jobs that are to run.

        One that is marked as running may be among them: it is refused, and reported after a while
        if it does not run here.
        """
        ...

    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; return False if it is not to run, as another has taken it."""
        ...

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Store the result."""
        ...

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool | None:
        """Store the error; the job is ready again unless this was its last attempt (`final`).

        Returns whether the job has failed for good; None: as `final` says.
        """
        ...

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        ...


class Owner(Protocol):
    """The manager, as a `ClaimingPlan` sees it. Its methods may be called from any thread."""

    @property
    def workers(self) -> int:
        """Return how many jobs run at once."""
        ...

    def wake(self) -> None:
        """Fetch soon, but not before the grace period is over."""
        ...

    def withdraw(self, job_id: str) -> bool:
        """Remove a job that waits; return False if it does not wait."""
        ...

    def abandon(self, job_id: str, reason: str) -> bool:
        """End the attempt of a job whose claim is lost; return False if it does not run.

        Its thread is replaced, and what its handler returns is dropped.
        """
        ...


class NotCompleted(Exception):
    """How a `ClaimingPlan` reports that a job did not complete, once it has noted the reason."""


class ClaimingPlan(abc.ABC):
    """A plan that has a claim on each job which it returns, until its outcome or `give_back`.

    So a job that it returns again is not refused for having ended a moment ago.
    """

    @abc.abstractmethod
    def open(self, owner: Owner, /) -> None:
        """Begin; called once, before the first thread of the manager starts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back every claim and end; called once, after the last job."""

    @abc.abstractmethod
    def call(self, job: job_queue.Job, execute: Callable[[job_queue.Job], Any] | None, /) -> Any:
        """Run a job and return its result; raise what `mark_failed` will get.

        `execute` None: run the registered task.
        """

    @abc.abstractmethod
    def give_back(self, job: job_queue.Job, reason: str, /) -> None:
        """Give up the claim of a job that did not start or did not end; counts no attempt."""

    @abc.abstractmethod
    def fetch_ready(self) -> Iterable[job_queue.Job]:
        """Claim jobs and return them."""

    @abc.abstractmethod
    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; return False if its claim is lost."""

    @abc.abstractmethod
    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Store the result."""

    @abc.abstractmethod
    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool | None:
        """Store the error; return whether the job has failed for good."""

    @abc.abstractmethod
    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether a handler of the job runs here."""


State: TypeAlias = Literal["pending", "running", "completed", "failed"]


class Entry(NamedTuple):
    """What a `MemoryPlan` stores of a job; `error` is that of its latest failure."""

    job: job_queue.Job
    state: State = "pending"
    result: Any = None
    error: str | None = None


class _Entry:
    """The same, for changes in place."""

    __slots__ = ("error", "job", "result", "state")

    def __init__(self, job: job_queue.Job) -> None:
        self.job = job
        self.state: State = "pending"
        self.result: Any = None
        self.error: str | None = None


class MemoryPlan:
    """A plan in memory, for jobs that need not outlive the process."""

    def __init__(self, jobs: Iterable[job_queue.Job] = ()) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        for job in jobs:
            self.add(job)

    def add(self, job: job_queue.Job) -> None:
        """Add a job; raise `InvalidConfig` for the id of a job that is here and has not ended."""
        with self._lock:
            known = self._entries.get(job.id)
            if known is not None and known.state in ("pending", "running"):
                raise errors.InvalidConfig(f"job {job.id!r} is {known.state}: ids are unique")
            self._entries[job.id] = _Entry(job)

    def entry(self, job_id: str) -> Entry | None:
        """Return what is known of a job; None for an unknown id."""
        with self._lock:
            found = self._entries.get(job_id)
            return found and Entry(found.job, found.state, found.result, found.error)

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
        with self._lock:
            entry = self._entries.get(job.id)
            if entry is not None:
                entry.job, entry.state, entry.result, entry.error = job, "completed", result, None

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> None:
        """Store the error."""
        with self._lock:
            entry = self._entries.get(job.id)
            if entry is not None:
                entry.job, entry.state = job, "failed" if final else "pending"
                entry.result, entry.error = None, error

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        entry = self._entries.get(job_id)
        return entry is not None and entry.state == "running"
