"""Plan the rows of `schedules`, and fire those that are due.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

import logging
import random
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import row_isolation, schedule_definitions, schedule_fires
from queue_workflows.schedule import definition, entry
from queue_workflows.types import Row

_log = logging.getLogger("queue_workflows.scheduler")
CHANNEL = "schedules_changed"
KIND = "schedule"
BATCH = 50
"""How many schedules one transaction plans and fires."""
OVERLAP_POLL_S = 1.0
"""Seconds between two checks whether the job that an instant waits for is over."""


class Scope(NamedTuple):
    """Which schedules a scheduler fires: those of the table, and those of its app's code."""

    app: str | None
    tasks: list[str]
    """The tasks it knows. It leaves schedules of others to other schedulers for a minute."""
    names: list[str] | None = None
    """No other schedules than these; None: all of them."""

    def given(self, aside: list[str]) -> dict[str, Any]:
        """Return the parameters of the statements; `aside` are names that must wait."""
        return self._asdict() | {"aside": aside, "patience_s": schedule_definitions.PATIENCE_S}


class Missed(NamedTuple):
    """A schedule whose instant passed: its catch-up policy left it out, and all that follow."""

    name: str
    at: datetime


class Fired(NamedTuple):
    """What one batch of due schedules did."""

    found: int
    queued: list[str]
    """Ids of jobs and runs."""
    missed: list[Missed]


def fire_due(
    conn: db.Connection,
    now: datetime,
    scope: Scope,
    isolation: row_isolation.Isolation,
    *,
    limit: int = BATCH,
) -> Fired:
    """Plan and fire up to `limit` schedules.

    Schedules that another transaction has locked are left to it. One that cannot fire keeps the
    reason in `error`, is tried again later, and does not keep the others from firing.
    """
    given = scope.given(isolation.aside(KIND)) | {"now": now, "limit": limit}
    rows = conn.execute(statements.schedule_rows.due, given).fetchall()
    fired = Fired(len(rows), [], [])
    planned: list[Row] = []
    for row in rows:
        general = isolation.attempt(
            KIND,
            row["name"],
            lambda row=row: _plan_or_fire(conn, row, now, fired, planned),
            lambda error, _, row=row: _store_error(conn, row, error),
        )
        if general is not None:
            raise general
    if planned:
        columns = {key: [row[key] for row in planned] for key in ("name", "next_at", "wake_at")}
        conn.execute(statements.schedule_rows.plan_many, columns, prepare=True)
    return fired


def _plan_or_fire(
    conn: db.Connection, row: Row, now: datetime, fired: Fired, planned: list[Row]
) -> psycopg.Error | None:
    """Plan a schedule without a plan; fire it if that is due. Return what `_fire_apart` does."""
    if row["next_at"] is None:
        next_at = definition.first_after(row, _planned_from(row, now))
        wake_at = None if next_at is None else _wake_at(row, next_at)
        if wake_at is None or wake_at > now:
            planned.append({"name": row["name"], "next_at": next_at, "wake_at": wake_at})
            return None
        row["next_at"] = next_at
    return _fire_apart(conn, row, now, fired)


def _fire_apart(conn: db.Connection, row: Row, now: datetime, fired: Fired) -> psycopg.Error | None:
    """Fire one schedule; return an error that is not this row's, such as a missing table."""
    missed: list[Missed] = []
    try:
        with conn.transaction():
            queued = _fire_row(conn, row, now, missed)
    except psycopg.Error as error:
        if row_isolation.is_of_row(error) or row_isolation.is_busy(error):
            raise
        return error
    fired.queued.extend(queued)
    fired.missed.extend(missed)
    return None


def _store_error(conn: db.Connection, row: Row, error: BaseException) -> bool:
    text = payload.error_text(" ".join(str(error).split()))
    if text != row["error"]:
        _log.warning("schedule %r does not fire: %s", row["name"], text)
        conn.execute(statements.schedule_rows.fail, {"name": row["name"], "error": text})
    return False


def next_wake(
    conn: db.Connection, scope: Scope, isolation: row_isolation.Isolation
) -> tuple[bool, datetime | None]:
    """Return whether there are schedules, and when the next is due, if any is planned."""
    given = scope.given(isolation.aside(KIND))
    row = conn.execute(statements.schedule_rows.wake, given).fetchone()
    assert row is not None
    return row["any"], row["wake_at"]


def plan_again(conn: db.Connection, now: datetime, *, whole: bool) -> None:
    """Forget what a clock that was ahead had planned; `whole`: all that is planned after `now`."""
    conn.execute(statements.schedule_rows.plan_again, {"now": now, "all": whole})


def _fire_row(conn: db.Connection, row: Row, now: datetime, missed: list[Missed]) -> list[str]:
    due = definition.due(row, now)
    if not due:
        left_out = row["next_at"] if row["next_at"] <= now else None
        if left_out is not None:
            missed.append(Missed(row["name"], left_out))
        _plan(conn, row, definition.first_after(row, now), missed_at=left_out)
        return []
    if row["overlap"] != "queue":
        ids = [made for at in due if (made := schedule_fires.fire(conn, row, at)) is not None]
        _plan(conn, row, definition.first_after(row, max(now, due[-1])))
        return ids
    if schedule_fires.is_active(conn, row):
        _plan(conn, row, row["next_at"], wake_at=now + timedelta(seconds=OVERLAP_POLL_S))
        return []
    made = schedule_fires.fire(conn, row, due[0])
    _plan(conn, row, due[1] if len(due) > 1 else definition.first_after(row, max(now, due[0])))
    return [] if made is None else [made]


def _planned_from(row: Row, now: datetime) -> datetime:
    """Return after which instant a schedule without a plan fires: its change or its last fire."""
    known = [at for at in (row["changed_at"], row["last_fire_at"]) if at is not None and at <= now]
    return max(known, default=now)


def _plan(
    conn: db.Connection,
    row: Row,
    next_at: datetime | None,
    *,
    wake_at: datetime | None = None,
    missed_at: datetime | None = None,
) -> None:
    if next_at is not None and wake_at is None:
        wake_at = _wake_at(row, next_at)
    values = {"name": row["name"], "next_at": next_at, "wake_at": wake_at, "missed_at": missed_at}
    conn.execute(statements.schedule_rows.plan, values, prepare=True)


def _wake_at(row: Row, instant: datetime) -> datetime:
    """Return when an instant is due: later by a jitter that all schedulers compute alike."""
    if not row["jitter_s"]:
        return instant
    seed = f"{row['name']} {entry.as_utc(instant).isoformat()}"
    share = random.Random(seed).random()  # noqa: S311  no secret
    return instant + timedelta(seconds=share * row["jitter_s"])
