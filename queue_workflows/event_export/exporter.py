"""Export the history in a loop: each event reaches its sinks before the position is stored.

An event's id is drawn before its transaction commits. A missing id may therefore appear later, or
never if its transaction was rolled back. It cannot appear any more once every transaction has ended
that ran when the id was known to be drawn. Until then the stored position stays before it, while
the events behind it are exported; after a crash these are read again.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

from queue_workflows import config, db, errors
from queue_workflows.claim import job_tables
from queue_workflows.db import Connection, statements
from queue_workflows.event_export import sinks
from queue_workflows.runtime import identity, logs, service
from queue_workflows.types import Row

SPANS: Final = ("all", "traced")
POLL_S: Final = 2.0
LEASE_S: Final = 60.0
"""How long an export belongs to a process that does not return. A sink has less time than that."""
RUNS: Final = 200
TABLES: Final = (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
BATCH: Final = 1000
GAPS_MAX: Final = 10_000
"""Ranges of missing ids; with more, the events behind them are read when they are settled."""
LEFT_OUT: Final = ("progress_beat", "lease_renew")
"""Types of events that an attempt may have in any number, and that do not describe it."""
LAST_ID: Final = 2**63 - 1
CHUNK: Final = 500
"""The number of claims whose events one statement reads."""
Range = tuple[int, int]
_log = logging.getLogger(__name__)


def wanted(*, spans: str | None = None, exporter_: object = None) -> list[Exporter]:
    """Return the exports of AUDIT_LOG_PATH, METRIC_PATH and SPANS; none without these.

    `spans`: instead of SPANS. Raises `InvalidConfig` for a file that cannot be written and a value
    of SPANS that does not exist, `MissingExtra` without OpenTelemetry.
    """
    found: list[Exporter] = []
    for setting, name, sink in (
        (config.AUDIT_LOG_PATH, "audit", sinks.AuditLog),
        (config.METRIC_PATH, "metric", sinks.MetricLog),
    ):
        if (path := logs.path_of(setting.read(), f"{name}.log")) is not None:
            full = f"{name} log {config.host_label()}:{path}"[:300]
            found.append(Exporter(full, sink(logs.opened(path))))
    kind = (spans or config.SPANS.read()).lower()
    if kind and kind not in SPANS:
        name = config.SPANS.variables[0]
        raise errors.InvalidConfig(f"{name}={kind!r:.40} must be one of {', '.join(SPANS)}")
    if kind:
        traced = sinks.Spans(only_traced=kind == "traced", exporter=exporter_)
        found.append(Exporter("spans", traced))
    return found


@contextlib.contextmanager
def running(exports: list[Exporter]) -> Generator[None]:
    """Run these exports, each on a thread of its own."""
    with contextlib.ExitStack() as stack:
        for each in exports:
            stack.enter_context(each)
        yield


class Exporter:
    """Export to one sink under a name, as long as no other process has this name."""

    def __init__(self, name: str, sink: sinks.Sink) -> None:
        self.name = name
        self._sink = sink
        self._who = identity.new_worker_id(config.host_label())
        self._dedicated = db.DedicatedConnection()
        self._follower: Follower | None = None
        self._stored: Positions | None = None
        self._stopping = threading.Event()
        self._loop = service.Loop(f"export {name}"[:60], [service.Task("export", POLL_S, self.run)])

    def __enter__(self) -> Exporter:
        """Start its thread."""
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop soon, and let another process continue at once."""
        self._stopping.set()
        if not self._loop.stop():
            return
        with contextlib.suppress(db.Error), self._dedicated.using() as conn:
            statements.event_exports.release(conn, name=self.name, who=self._who)
        self.close()

    def close(self) -> None:
        """Close the connection and the sink of an export that is not running."""
        self._dedicated.close()
        self._sink.close()

    def run(self) -> int:
        """Export all there is; return how many events and runs. Raises the errors of the sink."""
        count = 0
        with self._dedicated.using() as conn:
            while (step := self._step(conn)) > 0:
                count += step
                if self._stopping.is_set():
                    break
        return count

    def _step(self, conn: Connection) -> int:
        """Export one batch; return its size, or 0 without an event or the export."""
        stored = self._taken(conn)
        if stored is None:
            self._follower = None
            return 0
        if stored != self._stored or self._follower is None:
            self._follower, self._stored = Follower(stored), stored
        # In this order, as all events of an ended run are then among the ones that are read.
        ended: list[Row] = []
        if self._sink.wants_attempts:
            ended = statements.event_exports.ended_runs(conn, name=self.name, batch=RUNS)
        found = self._follower.read(conn)
        if any(len(rows) >= BATCH for rows in found.values()):
            ended = []
        self._export(conn, found, ended)
        try:
            return self._advance(conn, found, ended)
        except db.Error:
            self._follower = None  # it is ahead of the stored position
            raise

    def _taken(self, conn: Connection) -> Positions | None:
        """Take or keep the export, which begins with the next event if it is new.

        All events up to the positions are exported. Returns None if another process has it.
        """
        own: dict[str, Any] = {"name": self.name, "who": self._who, "lease_s": LEASE_S}
        row = statements.event_exports.take(conn, **own)
        if row is None:
            statements.event_exports.create(conn, name=self.name)
            row = statements.event_exports.take(conn, **own)
        return None if row is None else Positions(**row)

    def _export(
        self, conn: Connection, found: dict[job_tables.JobTable, list[Row]], ended: Sequence[Row]
    ) -> None:
        if self._sink.wants_events and (rows := [row for each in found.values() for row in each]):
            self._sink.events(sorted(rows, key=lambda row: row["created_at"]))
        if not self._sink.wants_attempts:
            return
        given: list[tuple[str, Callable[[Any], sinks.Record | None], Any]] = [
            (events[0]["job_id"], sinks.of_attempt, events)
            for table, rows in found.items()
            for events in _events_of(conn, table, sinks.ended_claims(rows))
        ]
        given += [(run["run_id"], sinks.of_run, run) for run in ended]
        records: list[sinks.Record] = []
        for name, build, source in given:
            try:
                record = build(source)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                _log.warning("%s cannot be exported: %s: %s", name, type(error).__name__, error)
                continue
            if record is not None:
                records.append(record)
        if records:
            self._sink.records(records)

    def _advance(
        self, conn: Connection, found: dict[job_tables.JobTable, list[Row]], ended: Sequence[Row]
    ) -> int:
        assert self._follower is not None
        to = self._follower.done()
        begun = {
            row["run_id"]
            for row in found[job_tables.NODE_JOBS]
            if self._sink.wants_attempts and row["event_type"] not in sinks.CAUSES
        }
        count = sum(map(len, found.values())) + len(ended)
        if not count and to == self._stored:
            return 0
        own = {"name": self.name, "who": self._who}
        with conn.transaction():
            if statements.event_exports.advance(conn, **own, **to._asdict()) is None:
                self._follower = None  # another process has taken it
                return 0
            if begun:
                statements.event_exports.add_runs(conn, name=self.name, runs=sorted(begun))
            if over := sorted({row["run_id"] for row in ended}):
                statements.event_exports.remove_runs(conn, name=self.name, runs=over)
        self._stored = to
        return count


def _events_of(
    conn: Connection, table: job_tables.JobTable, claims: Sequence[sinks.Claim]
) -> list[list[Row]]:
    """Return the events of each claim, the oldest first, with the names of the attempt."""
    found: dict[tuple[str, int], list[Row]] = {}
    statement = statements.event_exports.attempts[table.name]
    for start in range(0, len(claims), CHUNK):
        part = claims[start : start + CHUNK]
        given: dict[str, Any] = {
            "runs": [each.run_id for each in part],
            "nodes": [each.node_id for each in part],
            "jobs": [each.job_id for each in part],
            "claims": [each.claim_no for each in part],
            "without": list(LEFT_OUT),
        }
        for row in statement(conn, **given):
            found.setdefault((row["job_id"], row["claim_no"]), []).append(row)
    return [*found.values()]


# --- where it stands ---------------------------------------------------------------------------


class Positions(NamedTuple):
    """An event id of each history."""

    node_event: int
    ingest_event: int

    def of(self, table: job_tables.JobTable) -> int:
        """Return the event id of a table's history."""
        return self.node_event if table.in_run else self.ingest_event


class _Position:
    """How far one history was read: all ids up to `read` that are not in `gaps`."""

    def __init__(self, stored: int) -> None:
        self.read = stored
        self.gaps: list[Range] = []

    @property
    def ranges(self) -> list[Range]:
        """Return the ids to read next."""
        behind = (self.read + 1, LAST_ID)
        return self.gaps if len(self.gaps) >= GAPS_MAX else [*self.gaps, behind]

    @property
    def stored(self) -> int:
        """Return the id up to which nothing is missing."""
        return self.gaps[0][0] - 1 if self.gaps else self.read

    def seen(self, ids: list[int]) -> None:
        """Note that these ids were read, in ascending order."""
        for each in ids:
            if each > self.read:
                if each > self.read + 1:
                    self.gaps.append((self.read + 1, each - 1))
                self.read = each
            else:
                at = bisect.bisect(self.gaps, (each, LAST_ID)) - 1
                low, high = self.gaps[at]
                halves = (low, each - 1), (each + 1, high)
                self.gaps[at : at + 1] = [half for half in halves if half[0] <= half[1]]

    def settle(self, last: int) -> None:
        """Note that no missing id up to `last` can appear any more."""
        self.gaps = [(max(low, last + 1), high) for low, high in self.gaps if high > last]


class Follower:
    """The reading position of an export in both histories; not thread-safe."""

    def __init__(self, stored: Positions) -> None:
        self._positions = {table: _Position(stored.of(table)) for table in TABLES}
        self._running: set[str] = set()
        """Transactions that may still commit ids up to `_drawn`."""
        self._drawn: Positions | None = None
        self._settling: Positions | None = None
        self._unread: dict[job_tables.JobTable, list[int]] = {}

    def read(self, conn: db.Connection) -> dict[job_tables.JobTable, list[Row]]:
        """Return the next events of each history, which `done` notes; `conn` is in autocommit."""
        if self._drawn is not None and not self._running & set(
            statements.event_exports.transactions(conn)
        ):
            self._settling, self._drawn = self._drawn, None
        if self._drawn is None:
            # In this order: an id that is drawn now belongs to a transaction that runs now.
            self._drawn = Positions(**statements.event_exports.last_ids(conn))
            self._running = set(statements.event_exports.transactions(conn))
        found: dict[job_tables.JobTable, list[Row]] = {}
        for table, position in self._positions.items():
            lows, highs = zip(*position.ranges, strict=True)
            read = statements.event_exports.events[table.name]
            found[table] = read(conn, lows=[*lows], highs=[*highs], batch=BATCH)
            self._unread[table] = [row["id"] for row in found[table]]
        return found

    def done(self) -> Positions:
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
        return Positions(*(self._positions[table].stored for table in TABLES))
