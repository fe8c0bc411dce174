"""Export the history in a loop: each event reaches its sinks before the position is stored."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from queue_workflows import config, db
from queue_workflows.db import Connection, statements
from queue_workflows.engine import event_exports, job_tables
from queue_workflows.event_export import attempts, follower
from queue_workflows.runtime import identity, service
from queue_workflows.types import Row

T = TypeVar("T")
POLL_S: Final = 2.0
LEASE_S: Final = 60.0
"""How long an export belongs to a process that does not return. A sink has less time than that."""
RUNS: Final = 200
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes what is exported; raises if it could not, and then gets it again."""

    wants_attempts: bool
    wants_events: bool

    def events(self, rows: Sequence[Row]) -> None:
        """Export events of jobs; those of nodes have a `run_id`."""

    def records(self, records: Sequence[attempts.Record]) -> None:
        """Export attempts and runs that have ended."""

    def close(self) -> None:
        """Free what it holds."""


class Exporter:
    """Export to one sink under a name, as long as no other process has this name."""

    def __init__(self, name: str, sink: Sink, *, poll_s: float = POLL_S) -> None:
        self.name = name
        self._sink = sink
        self._who = identity.new_worker_id(config.host_label())
        self._dedicated = db.DedicatedConnection()
        self._follower: follower.Follower | None = None
        self._stored: event_exports.Positions | None = None
        self._stopping = threading.Event()
        self._loop = service.Loop(f"export {name}"[:60], [service.Task("export", poll_s, self.run)])

    def start(self) -> None:
        """Start its thread."""
        self._loop.start()

    def stop(self) -> None:
        """Stop soon, and let another process continue at once."""
        self._stopping.set()
        if not self._loop.stop():
            return
        with contextlib.suppress(db.Error), self._dedicated.using() as conn:
            statements.event_exports.release(conn, name=self.name, who=self._who)
        self._dedicated.close()
        self._sink.close()

    def __enter__(self) -> Exporter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> int:
        """Export what is there; return how many events and runs. Raises what the sink does."""
        count = 0
        with self._dedicated.using() as conn:
            while (step := self._step(conn)) > 0:
                count += step
                if self._stopping.is_set():
                    break
        return count

    def _step(self, conn: Connection) -> int:
        """Export one batch; return its size, or 0 if there is nothing or another process has it."""
        stored = event_exports.take(conn, self.name, self._who, LEASE_S)
        if stored is None or stored != self._stored or self._follower is None:
            self._follower = None
            if stored is None:
                return 0
            self._follower, self._stored = follower.Follower(stored), stored
        # In this order: all events of an ended run are then among those that are read.
        ended = (
            statements.event_exports.ended_runs(conn, name=self.name, batch=RUNS)
            if self._sink.wants_attempts
            else []
        )
        found = self._follower.read(conn)
        if any(len(rows) >= follower.BATCH for rows in found.values()):
            ended = []
        self._export(conn, found, ended)
        try:
            return self._advance(conn, found, ended)
        except db.Error:
            self._follower = None  # it is ahead of what is stored
            raise

    def _export(
        self, conn: Connection, found: dict[job_tables.JobTable, list[Row]], ended: Sequence[Row]
    ) -> None:
        if self._sink.wants_events and (rows := [row for each in found.values() for row in each]):
            self._sink.events(sorted(rows, key=lambda row: row["created_at"]))
        if not self._sink.wants_attempts:
            return
        records: list[attempts.Record] = []
        for table, rows in found.items():
            if claims := attempts.ended_claims(rows):
                for events in event_exports.attempts(conn, table, claims):
                    _add(records, events[0]["job_id"], attempts.of_attempt, events)
        for run in ended:
            _add(records, run["run_id"], attempts.of_run, run)
        if records:
            self._sink.records(records)

    def _advance(
        self, conn: Connection, found: dict[job_tables.JobTable, list[Row]], ended: Sequence[Row]
    ) -> int:
        assert self._follower is not None
        to = self._follower.done()
        begun = [
            row["run_id"]
            for row in found[job_tables.NODE_JOBS]
            if self._sink.wants_attempts and row["event_type"] not in attempts.CAUSES
        ]
        over = [row["run_id"] for row in ended]
        count = sum(map(len, found.values())) + len(over)
        if count or to != self._stored:
            if not event_exports.advance(conn, self.name, self._who, to, begun=begun, ended=over):
                self._follower = None
                return 0
            self._stored = to
        return count


def _add(
    records: list[attempts.Record],
    name: str,
    build: Callable[[T], attempts.Record | None],
    given: T,
) -> None:
    """Add a record, unless its rows hold what none can be made of."""
    try:
        found = build(given)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        _log.warning("%s cannot be exported: %s: %s", name, type(error).__name__, error)
        return
    if found is not None:
        records.append(found)
