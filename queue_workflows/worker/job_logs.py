"""Keep what the handlers of a worker print until it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from queue_workflows import config, db
from queue_workflows.engine import job_tables, logs
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn
from queue_workflows.worker import claimed_job, recordings

STORE_S: Final = 2.0
"""Seconds until what handlers print is stored that run."""
BETWEEN_S: Final = 0.05
"""Shortest time in seconds between two stores of what ended handlers have printed."""
KEPT_MAX: Final = 256
"""Ended attempts whose log is not stored yet; beyond that the oldest are dropped."""


class Taken(NamedTuple):
    """The recordings to store now."""

    ended: list[recordings.Recording]
    changed: list[recordings.Recording]

    def __bool__(self) -> bool:
        return bool(self.changed)

    def script(self) -> db.Script[None]:
        """Store them."""
        for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
            if written := [each.written() for each in self.changed if each.lease.table is table]:
                yield logs.writing(table, written)


class JobLogs:
    """The logs of attempts: of handlers that run, and of those that have ended."""

    def __init__(self, wake_at: Callable[[float], object], now_fn: NowFn = clock.boot_s) -> None:
        self._wake_at = wake_at
        self._now = now_fn
        self._open: dict[job_tables.Lease, recordings.Recording] = {}
        self._ended: list[recordings.Recording] = []
        self.store_at = math.inf
        """When there is something to store."""
        self._stored_at = -math.inf

    def add(self, job: claimed_job.ClaimedJob, data: bytes) -> None:
        """Keep what a handler has printed."""
        own = self._open.get(job.lease)
        if own is None:
            if (cap_kb := config.LOG_CAPTURE_KB.read()) <= 0:
                return
            own = self._open[job.lease] = recordings.Recording(job.lease, cap_kb)
        own.add(data)
        self._store_in(STORE_S)

    def end(self, job: claimed_job.ClaimedJob) -> None:
        """Store at once what the handler of a job has printed, which has ended."""
        if self._open and (own := self._open.pop(job.lease, None)) is not None:
            self._ended.append(own)
            del self._ended[:-KEPT_MAX]
            self._store_in(max(0.0, self._stored_at + BETWEEN_S - self._now()))

    def _store_in(self, seconds: float) -> None:
        at = self._now() + seconds
        if at < self.store_at:
            self.store_at = at
            self._wake_at(at)

    def take(self) -> Taken:
        """Return what is to be stored."""
        ended, self._ended = self._ended, []
        self._stored_at = self._now()
        every = [*ended, *self._open.values()]
        return Taken(ended, [each for each in every if each.changed])

    def put_back(self, taken: Taken, *, keep: bool) -> None:
        """Note that it was not stored; `keep`: try again later."""
        for each in taken.changed:
            each.mark_unstored()
        if keep:
            self._ended = [*taken.ended, *self._ended][-KEPT_MAX:]
            self._store_in(STORE_S)
