"""Read the events of the history for exports, each of which stores how far it is.

Ids of events are drawn before their transactions commit, so that an event may appear behind later
ones. `event_export.follower` waits for such events; the statements are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row

LEFT_OUT: Final = ("progress_beat", "lease_renew")
"""Events of which an attempt may have any number, and which say nothing about it."""
LAST_ID: Final = 2**63 - 1
_CHUNK: Final = 500


class Positions(NamedTuple):
    """An event id of each history."""

    node_event: int
    ingest_event: int

    def of(self, table: job_tables.JobTable) -> int:
        """Return that of a table's history."""
        return self.node_event if table.in_run else self.ingest_event


class Claim(NamedTuple):
    """A claim of a job; `run_id` and `node_id` are None outside of runs."""

    job_id: str
    claim_no: int
    run_id: str | None = None
    node_id: str | None = None


def take(conn: db.Connection, name: str, who: str, lease_s: float) -> Positions | None:
    """Take or keep an export, which begins with the next event if it is new; None: it is taken.

    All events up to the positions are exported.
    """
    row = statements.event_exports.take(conn, name=name, who=who, lease_s=lease_s)
    if row is None:
        statements.event_exports.create(conn, name=name)
        row = statements.event_exports.take(conn, name=name, who=who, lease_s=lease_s)
    return None if row is None else Positions(**row)


def advance(
    conn: db.Connection,
    name: str,
    who: str,
    to: Positions,
    *,
    begun: Iterable[str] = (),
    ended: Iterable[str] = (),
) -> bool:
    """Store how far an export is, in one transaction; False: another process has taken it.

    `begun`: runs with exported events. `ended`: runs whose end is exported.
    """
    with conn.transaction():
        if statements.event_exports.advance(conn, name=name, who=who, **to._asdict()) is None:
            return False
        if runs := sorted(set(begun)):
            statements.event_exports.add_runs(conn, name=name, runs=runs)
        if runs := sorted(set(ended)):
            statements.event_exports.remove_runs(conn, name=name, runs=runs)
    return True


def last_ids(conn: db.Connection) -> Positions:
    """Return the last event ids that were drawn, by whichever transaction."""
    return Positions(**statements.event_exports.last_ids(conn))


def events(
    conn: db.Connection,
    table: job_tables.JobTable,
    ranges: Sequence[tuple[int, int]],
    batch: int,
) -> list[Row]:
    """Return up to `batch` events with ids in these ranges, in the order of their ids."""
    statement = (
        statements.event_exports.node_events
        if table.in_run
        else statements.event_exports.ingest_events
    )
    return statement(
        conn, lows=[low for low, _ in ranges], highs=[high for _, high in ranges], batch=batch
    )


def attempts(
    conn: db.Connection, table: job_tables.JobTable, claims: Sequence[Claim]
) -> list[list[Row]]:
    """Return the events of each of these claims, the oldest first, with what names the attempt."""
    found: dict[tuple[str, int], list[Row]] = {}
    statement = (
        statements.event_exports.node_attempts
        if table.in_run
        else statements.event_exports.ingest_attempts
    )
    for start in range(0, len(claims), _CHUNK):
        part = claims[start : start + _CHUNK]
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
