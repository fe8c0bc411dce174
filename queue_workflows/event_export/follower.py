"""Read each event of a history once, also those that commit behind events with later ids.

An id is drawn before its transaction commits. A missing id may therefore appear later, or never if
its transaction was rolled back. It cannot appear any more once every transaction has ended that ran
when the id was known to be drawn. Until then the stored position stays before it, while the events
behind it are exported; after a crash these are read again.
"""

from __future__ import annotations

from typing import Final

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import event_exports, job_tables
from queue_workflows.types import Row

TABLES: Final = (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
BATCH: Final = 1000
GAPS_MAX: Final = 10_000
"""Ranges of missing ids; with more, nothing behind them is read until they are settled."""
Range = tuple[int, int]


class _Position:
    """How far one history was read: all ids up to `read` but those in `gaps`."""

    def __init__(self, stored: int) -> None:
        self.read = stored
        self.gaps: list[Range] = []

    @property
    def ranges(self) -> list[Range]:
        """Return the ids to read next."""
        behind = (self.read + 1, event_exports.LAST_ID)
        return self.gaps if len(self.gaps) >= GAPS_MAX else [*self.gaps, behind]

    @property
    def stored(self) -> int:
        """Return the id up to which nothing is missing."""
        return self.gaps[0][0] - 1 if self.gaps else self.read

    def seen(self, ids: list[int]) -> None:
        """Note that these ids were read, in ascending order."""
        behind = [each for each in ids if each > self.read]
        self.gaps = _without(self.gaps, [each for each in ids if each <= self.read])
        for each in behind:
            if each > self.read + 1:
                self.gaps.append((self.read + 1, each - 1))
            self.read = each

    def settle(self, last: int) -> None:
        """Note that no missing id up to `last` can appear any more."""
        self.gaps = [(max(low, last + 1), high) for low, high in self.gaps if high > last]


def _without(gaps: list[Range], ids: list[int]) -> list[Range]:
    """Return the ranges without these ids; both ascend."""
    left: list[Range] = []
    at = 0
    for low, high in gaps:
        while at < len(ids) and ids[at] < low:
            at += 1
        start = low
        while at < len(ids) and ids[at] <= high:
            if ids[at] > start:
                left.append((start, ids[at] - 1))
            start = ids[at] + 1
            at += 1
        if start <= high:
            left.append((start, high))
    return left


class Follower:
    """The reading position of an export in both histories; not thread-safe."""

    def __init__(self, stored: event_exports.Positions) -> None:
        self._positions = {table: _Position(stored.of(table)) for table in TABLES}
        self._running: set[str] = set()
        """Transactions that may still commit ids up to `_drawn`."""
        self._drawn: event_exports.Positions | None = None
        self._settling: event_exports.Positions | None = None
        self._unread: dict[job_tables.JobTable, list[int]] = {}

    def read(self, conn: db.Connection) -> dict[job_tables.JobTable, list[Row]]:
        """Return the next events of each history; `done` takes note of them.

        Each statement must see what is committed by then: the connection is in autocommit.
        """
        if self._drawn is not None and not self._running & set(
            statements.event_exports.transactions(conn)
        ):
            self._settling, self._drawn = self._drawn, None
        if self._drawn is None:
            # In this order: an id that is drawn now belongs to a transaction that runs now.
            self._drawn = event_exports.last_ids(conn)
            self._running = set(statements.event_exports.transactions(conn))
        found = {
            table: event_exports.events(conn, table, position.ranges, BATCH)
            for table, position in self._positions.items()
        }
        self._unread = {table: [row["id"] for row in rows] for table, rows in found.items()}
        return found

    def done(self) -> event_exports.Positions:
        """Note that the events of `read` are exported; return the positions to store."""
        for table, position in self._positions.items():
            ids = self._unread.get(table, [])
            position.seen(ids)
            # A full batch may have left out ids of gaps behind it, which the next one reads.
            if self._settling is not None:
                full = len(ids) >= BATCH
                last = self._settling.of(table)
                position.settle(min(last, ids[-1]) if full else last)
        self._unread, self._settling = {}, None
        return event_exports.Positions(*(self._positions[table].stored for table in TABLES))
