"""Count the attempts of an in-process queue by task, and keep each worker's latest error."""

from __future__ import annotations

import threading
from typing import NamedTuple

MAX_TASKS = 1000
"""Tasks that are counted by name, since any name may be in a row of a queue."""
OTHER_TASKS = "(others)"


class TaskCount(NamedTuple):
    """The ended attempts of one task: all, those that failed, and the seconds of all."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class _Count:
    """The same, for changes in place."""

    __slots__ = ("ended", "failed", "seconds")

    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.seconds = 0.0


class Cell:
    """The counts of one slot of a thread; one thread at a time writes them, without a lock."""

    __slots__ = ("finished", "tasks")

    def __init__(self) -> None:
        self.finished = 0
        self.tasks: dict[str, _Count] = {}

    def ended(self, task: str, seconds: float, failed: bool) -> None:
        """Count an attempt that has ended."""
        count = self.tasks.get(task)
        if count is None:
            count = self.tasks.setdefault(
                task if len(self.tasks) < MAX_TASKS else OTHER_TASKS, _Count()
            )
        count.ended += 1
        count.seconds += seconds
        if failed:
            count.failed += 1


class Statistics:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetched = 0
        self.failed = 0
        """Jobs that have failed for good."""
        self.timed_out = 0
        self.late_results = 0
        """Results of jobs that had timed out, which were dropped."""
        self.dead_threads = 0
        self._cells: list[Cell] = []
        self._lost = Cell()
        """What is counted for a thread by another one."""
        self._errors: dict[str, str] = {}

    def add(self, **counts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def new_cell(self) -> Cell:
        """Return the counts of one slot of a thread."""
        cell = Cell()
        with self._lock:
            self._cells.append(cell)
        return cell

    def lost(self, task: str, seconds: float, *, worker: str, error: str) -> None:
        """Count an attempt that was ended while its thread goes on."""
        with self._lock:
            self._lost.ended(task, seconds, True)
            self._errors[worker] = error

    def note_error(self, worker: str, error: str) -> None:
        """Remember the latest error of a worker."""
        with self._lock:
            self._errors[worker] = error

    @property
    def finished(self) -> int:
        """Return the number of completed jobs."""
        with self._lock:
            return sum(cell.finished for cell in self._cells)

    @property
    def tasks(self) -> dict[str, TaskCount]:
        """Return the counts by task."""
        with self._lock:
            found: dict[str, TaskCount] = {}
            for cell in [self._lost, *self._cells]:
                for task, count in cell.tasks.copy().items():
                    before = found.get(task, TaskCount())
                    found[task] = TaskCount(
                        before.ended + count.ended,
                        before.failed + count.failed,
                        before.seconds + count.seconds,
                    )
        return found

    @property
    def last_errors(self) -> dict[str, str]:
        """Return the latest error of each worker that had one."""
        with self._lock:
            return dict(self._errors)
