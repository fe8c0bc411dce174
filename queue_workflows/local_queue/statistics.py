"""Count what an in-process queue does."""

from __future__ import annotations

import threading
from typing import NamedTuple


class TaskCount(NamedTuple):
    """The ended attempts of one task: all, those that failed, and the seconds of all."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class Statistics:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetched = 0
        self.finished = 0
        self.failed = 0
        """Jobs that have failed for good."""
        self.timed_out = 0
        self.late_results = 0
        """Results of jobs that had timed out, which were dropped."""
        self.dead_threads = 0
        self._tasks: dict[str, TaskCount] = {}
        self._errors: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def ended(self, task: str, seconds: float, *, worker: str, error: str | None) -> None:
        """Count an attempt that has ended; None: it was a success."""
        with self._lock:
            before = self._tasks.get(task, TaskCount())
            self._tasks[task] = TaskCount(
                before.ended + 1, before.failed + (error is not None), before.seconds + seconds
            )
            if error is not None:
                self._errors[worker] = error

    @property
    def tasks(self) -> dict[str, TaskCount]:
        """Return the counts by task."""
        with self._lock:
            return dict(self._tasks)

    @property
    def last_errors(self) -> dict[str, str]:
        """Return the latest error of each worker that had one."""
        with self._lock:
            return dict(self._errors)
