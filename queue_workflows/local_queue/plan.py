"""Define where the jobs of an in-process queue come from, and where their outcomes go."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

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

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> None:
        """Store the error; the job is ready again unless this was its last attempt (`final`)."""
        ...

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        ...


class Entry(NamedTuple):
    """What a `MemoryPlan` stores of a job; `error` is that of its latest failure."""

    job: job_queue.Job
    state: Literal["pending", "running", "completed", "failed"] = "pending"
    result: Any = None
    error: str | None = None


class MemoryPlan:
    """A plan in memory, for jobs that need not outlive the process."""

    def __init__(self, jobs: Iterable[job_queue.Job] = ()) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        for job in jobs:
            self.add(job)

    def add(self, job: job_queue.Job) -> None:
        """Add a job; raise `InvalidConfig` for the id of a job that is here and has not ended."""
        with self._lock:
            known = self._entries.get(job.id)
            if known is not None and known.state in ("pending", "running"):
                raise errors.InvalidConfig(f"job {job.id!r} is {known.state}: ids are unique")
            self._entries[job.id] = Entry(job)

    def entry(self, job_id: str) -> Entry | None:
        """Return what is known of a job; None for an unknown id."""
        with self._lock:
            return self._entries.get(job_id)

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
            self._entries[job.id] = entry._replace(state="running")
            return True

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Store the result."""
        self._end(job, Entry(job, "completed", result))

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> None:
        """Store the error."""
        self._end(job, Entry(job, "failed" if final else "pending", None, error))

    def _end(self, job: job_queue.Job, entry: Entry) -> None:
        with self._lock:
            if job.id in self._entries:
                self._entries[job.id] = entry

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether the job is marked as running."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry is not None and entry.state == "running"
