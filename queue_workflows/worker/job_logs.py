"""Keep and mask the first and the last part of handlers' output until it is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final

from queue_workflows import config, db
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.runtime import clock, masking
from queue_workflows.types import NowFn
from queue_workflows.worker import claimed_job

STORE_S: Final = 2.0
"""Seconds until the output of running handlers is stored."""
BETWEEN_S: Final = 0.05
"""Shortest time in seconds between two stores of the output of ended handlers."""
LAST_BYTES: Final = 2000
LAST_LINES: Final = 5
"""The record of a death contains so many bytes and lines of the end of the log."""
KEPT_MAX: Final = 256
"""Ended attempts whose log is not stored yet; beyond that the oldest are dropped."""


class Recording:
    """The first and the last half of the log of one attempt, in bytes of UTF-8."""

    def __init__(self, lease: job_tables.Lease, cap_kb: int) -> None:
        self.lease = lease
        self._half = cap_kb * 1024 // 2
        self._head, self._tail = bytearray(), bytearray()
        self._total = self._head_stored = 0
        self.changed = False
        """Whether anything was added since the last `written`."""

    def add(self, data: bytes | bytearray) -> None:
        """Add output; keep as much as the limit allows."""
        self._total += len(data)
        self.changed = True
        if room := self._half - len(self._head):
            self._head += data[:room]
            data = data[room:]
        # One byte more than is kept shows whether a line begins there.
        self._tail += data[-self._half - 1 :]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half - 1]

    def written(self) -> tuple[str | None, str, int]:
        """Return the first and last part of the log to store now, and how many bytes are omitted.

        The first part is None if it is stored already. Neither has a NUL or a lone surrogate.
        """
        self.changed = False
        head, tail, total = bytes(self._head), bytes(self._tail), self._total
        if total > len(head):
            size = _end_of_whole(head)
            head, rest = head[:size], head[size:]
            if total == size + len(rest) + min(len(tail), self._half):
                tail = rest + tail
            else:
                tail = tail[-self._half - 1 :]
                tail = tail[_start_of_whole(tail) :]
        cut = total - len(head) - len(tail)
        new = len(head) != self._head_stored
        self._head_stored = len(head)
        return _text(head) if new else None, _text(tail), cut

    @property
    def last_lines(self) -> list[str]:
        """Return the end of the log, masked."""
        kept = self._head + self._tail
        data = bytes(kept[-min(LAST_BYTES, self._half) :])
        if len(data) < len(kept):
            data = data[_start_of_whole(data) :]
        return _text(data).splitlines()[-LAST_LINES:]

    def mark_unstored(self) -> None:
        """Note that the last `written` was not stored, so that the next one repeats it."""
        self._head_stored = 0
        self.changed = True


def store(logs: Sequence[Recording]) -> db.Script[None]:
    """Store the changes of these logs."""
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        if of_table := [each for each in logs if each.lease.table is table]:
            heads, tails, cuts = zip(*(each.written() for each in of_table), strict=True)
            yield from statements.logs.write[table.name].script(
                jobs=[each.lease.job_id for each in of_table],
                claims=[each.lease.claim_no for each in of_table],
                heads=[*heads],
                tails=[*tails],
                cuts=[*cuts],
            )


class JobLogs:
    """The logs of handlers that run, and of handlers that have ended."""

    def __init__(self, wake_at: Callable[[float], object], now_fn: NowFn = clock.boot_s) -> None:
        self._wake_at, self._now = wake_at, now_fn
        self.open: dict[job_tables.Lease, Recording] = {}
        """The logs of handlers that run and have printed."""
        self._ended: list[Recording] = []
        self.store_at, self._stored_at = math.inf, -math.inf
        """`store_at` is when the next logs are to be stored."""

    def add(self, job: claimed_job.ClaimedJob, data: bytes) -> None:
        """Keep the output of a handler."""
        own = self.open.get(job.lease)
        if own is None:
            if (cap_kb := config.LOG_CAPTURE_KB.read()) <= 0:
                return
            own = self.open[job.lease] = Recording(job.lease, cap_kb)
        own.add(data)
        self._store_in(STORE_S)

    def end(self, job: claimed_job.ClaimedJob) -> Recording | None:
        """Store at once the output of a handler that has ended; return its log, if it has one."""
        if (own := self.open.pop(job.lease, None)) is not None:
            self._ended.append(own)
            del self._ended[:-KEPT_MAX]
            self._store_in(max(0.0, self._stored_at + BETWEEN_S - self._now()))
        return own

    def _store_in(self, seconds: float) -> None:
        at = self._now() + seconds
        if at < self.store_at:
            self.store_at = at
            self._wake_at(at)

    def take(self) -> list[Recording]:
        """Return the logs that are to be stored."""
        every = [*self._ended, *self.open.values()]
        self._ended, self._stored_at = [], self._now()
        return [each for each in every if each.changed]

    def put_back(self, taken: Sequence[Recording], *, keep: bool) -> None:
        """Note that these logs were not stored; with `keep`, try again later."""
        for each in taken:
            each.mark_unstored()
        if keep:
            known = [*self._ended, *self.open.values()]
            self._ended = [each for each in taken if each not in known] + self._ended
            del self._ended[:-KEPT_MAX]
            self._store_in(STORE_S)


_DSN_BEGUN = re.compile(rb":(?:/|//\S*)?\Z")


def _end_of_whole(head: bytes) -> int:
    """Return where to end the first part, so that no secret is cut in two and escapes masking.

    It ends after a line or a word, unless that drops more than half.
    """
    for mark in (b"\n", b" "):
        if (at := head.rfind(mark)) >= len(head) // 2:
            return at + 1
    begun = _DSN_BEGUN.search(head, len(head) // 2)
    return begun.start() if begun else len(head)


def _start_of_whole(tail: bytes) -> int:
    """Return where to begin the last part by the same rule; its first byte is never kept."""
    for mark in (b"\n", b" "):
        if (at := tail.find(mark, 0, len(tail) // 2)) >= 0:
            return at + 1
    word = tail.split(maxsplit=1)[0] if tail[:1].strip() else b""
    return max(word.rfind(b"@") + 1, 1)


def _text(data: bytes) -> str:
    """Return the text masked, without NUL and without a character that was cut."""
    return masking.mask(data.decode("utf-8", "ignore").replace("\0", "\N{REPLACEMENT CHARACTER}"))
