"""Plan the rows of `schedules`, and fire those that are due.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from queue_workflows import db, errors
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
BATCH_S = 1.0
"""Seconds after which a transaction fires no further instant: what an outage missed may be much."""
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
    """A schedule whose instants passed: its catch-up policy left them out."""

    name: str
    first: datetime
    last: datetime


class Fired(NamedTuple):
    """What one batch of due schedules did."""

    queued: list[str]
    """Ids of jobs and runs."""
    missed: list[Missed]
    more: bool
    """Whether others may be due now."""


class _Batch:
    """What one transaction has done so far, and how much longer it may go on."""

    def __init__(self, scope: Scope, now: datetime) -> None:
        self.scope, self.now = scope, now
        self.queued: list[str] = []
        self.missed: list[Missed] = []
        self.planned: list[Row] = []
        self._ends_at = time.monotonic() + BATCH_S

    def is_over(self) -> bool:
        """Return whether what is left has to wait for the next transaction."""
        return time.monotonic() >= self._ends_at


def fire_due(
    conn: db.Connection,
    now: datetime,
    scope: Scope,
    isolation: row_isolation.Isolation,
    *,
    limit: int = BATCH,
) -> Fired:
    """Plan up to `limit` schedules and fire as many, for about `BATCH_S` seconds.

    Schedules that another transaction has locked are left to it. One that cannot fire keeps the
    reason in `error`, is tried again later, and does not keep the others from firing.
    """
    # A submitter's open transaction may hold the idempotency keys of many schedules.
    statements.sessions.wait_for_locks(conn, lock_ms=str(int(db.LOOP_LOCK_S * 1000)))
    rows = statements.schedule_rows.due(
        conn, **scope.given(isolation.aside(KIND)), now=now, limit=limit
    )
    batch = _Batch(scope, now)
    more = len(rows) >= limit
    for row in rows:
        general = isolation.attempt(
            KIND,
            row["name"],
            lambda row=row: _plan_or_fire(conn, row, batch),
            lambda error, _, row=row: _store_error(conn, row, error),
        )
        if general is not None:
            raise general
        if batch.is_over():
            more = True
            break
    if batch.planned:
        columns = {
            key: [row[key] for row in batch.planned] for key in ("name", "next_at", "wake_at")
        }
        statements.schedule_rows.plan_many(conn, **columns)
    return Fired(batch.queued, batch.missed, more)


def _plan_or_fire(conn: db.Connection, row: Row, batch: _Batch) -> psycopg.Error | None:
    """Plan a schedule without a plan, and fire it if that is due; return what `_fire_apart` does.

    One that is due, and whose task is unknown here, waits for another scheduler from now on.
    """
    now = batch.now
    if row["next_at"] is None:
        next_at = definition.first_after(row, _planned_from(conn, row, now))
        wake_at = None if next_at is None else _wake_at(row, next_at)
        task_name = row["task_name"]
        is_unknown = task_name is not None and task_name not in batch.scope.tasks
        if wake_at is None or wake_at > now or is_unknown:
            wake_at = None if wake_at is None else max(wake_at, now)
            batch.planned.append({"name": row["name"], "next_at": next_at, "wake_at": wake_at})
            return None
        row["next_at"] = next_at
    return _fire_apart(conn, row, batch)


def _fire_apart(conn: db.Connection, row: Row, batch: _Batch) -> psycopg.Error | None:
    """Fire one schedule; return an error that is not this row's, such as a missing table."""
    missed: list[Missed] = []
    try:
        with conn.transaction():
            queued = _fire_row(conn, row, batch, missed)
    except psycopg.Error as error:
        if row_isolation.is_of_row(error) or row_isolation.is_busy(error):
            raise
        return error
    batch.queued.extend(queued)
    batch.missed.extend(missed)
    return None


def _store_error(conn: db.Connection, row: Row, error: BaseException) -> bool:
    text = payload.error_text(" ".join(str(error).split()))
    if text != row["error"]:
        _log.warning("schedule %r does not fire: %s", row["name"], text)
        statements.schedule_rows.fail(conn, name=row["name"], error=text)
    return False


def fire_now(conn: db.Connection, row: Row, now: datetime) -> schedule_fires.Fired:
    """Fire a locked schedule beside its instants, unless its overlap policy holds it back.

    One that no scheduler has planned yet is planned before, from its change: its instants up to now
    still fire.
    """
    waits = not (row["paused"] or row["ended"]) and row["gone_at"] is None and row["error"] is None
    if row["next_at"] is None and waits:
        # What is wrong with a schedule that cannot be planned is for the scheduler to report.
        with contextlib.suppress(errors.QueueWorkflowsError):
            _plan(conn, row, definition.first_after(row, _planned_from(conn, row, now)))
            # A scheduler that found the row locked and without a plan does not know when it is due.
            statements.schedule_rows.notify(conn)
    return schedule_fires.fire_now(conn, row, now)


def next_wake(
    conn: db.Connection, scope: Scope, isolation: row_isolation.Isolation
) -> tuple[bool, datetime | None]:
    """Return whether there are schedules, and when the next is due, if any is planned."""
    given = scope.given(isolation.aside(KIND))
    row = statements.schedule_rows.wake(conn, **given)
    return row["any"], row["wake_at"]


def _fire_row(conn: db.Connection, row: Row, batch: _Batch, missed: list[Missed]) -> list[str]:
    now = batch.now
    due = definition.due(row, now)
    if not due:
        left_out = _left_out(conn, row, now)
        if left_out is not None:
            missed.append(Missed(row["name"], row["next_at"], left_out))
        _plan(conn, row, definition.first_after(row, now), missed_at=left_out)
        return []
    if row["overlap"] != "queue":
        return _fire_all(conn, row, due, batch)
    if schedule_fires.is_active(conn, row):
        _plan(conn, row, row["next_at"], wake_at=now + timedelta(seconds=OVERLAP_POLL_S))
        return []
    made = schedule_fires.fire(conn, row, due[0]).id
    _plan(conn, row, due[1] if len(due) > 1 else definition.first_after(row, max(now, due[0])))
    return [] if made is None else [made]


def _fire_all(conn: db.Connection, row: Row, due: list[datetime], batch: _Batch) -> list[str]:
    """Fire the instants in turn; at the batch's end leave the rest to the next transaction."""
    ids: list[str] = []
    for number, at in enumerate(due, 1):
        made = schedule_fires.fire(conn, row, at).id
        ids += [] if made is None else [made]
        if number < len(due) and batch.is_over():
            # Behind what others are waiting for since an earlier time.
            _plan(conn, row, due[number], wake_at=batch.now)
            return ids
    _plan(conn, row, definition.first_after(row, max(batch.now, due[-1])))
    return ids


def _left_out(conn: db.Connection, row: Row, now: datetime) -> datetime | None:
    """Return the last instant that nothing fires any more; None if none passed or it has fired."""
    passed = definition.last_until(row, now)
    if passed is None:
        return None
    claimed = statements.schedule_rows.last_claimed(conn, name=row["name"], now=now)
    return passed if claimed is None or claimed < passed else None


def _planned_from(conn: db.Connection, row: Row, now: datetime) -> datetime:
    """Return after which instant a schedule without a plan fires.

    The latest of its change, its last fire and the last instant that it missed, as far as these are
    not in the future: a clock that was ahead leaves such times, and what came due meanwhile fires.
    """
    last_fire_at = row["last_fire_at"]
    if last_fire_at is not None and last_fire_at > now:
        last_fire_at = statements.schedule_rows.last_claimed(conn, name=row["name"], now=now)
    known = (row["changed_at"], last_fire_at, row["missed_at"])
    return max((at for at in known if at is not None and at <= now), default=now)


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
    statements.schedule_rows.plan(
        conn, name=row["name"], next_at=next_at, wake_at=wake_at, missed_at=missed_at
    )


def _wake_at(row: Row, instant: datetime) -> datetime:
    """Return when an instant is due: later by a jitter that all schedulers compute alike."""
    if not row["jitter_s"]:
        return instant
    seed = f"{row['name']} {entry.as_utc(instant).isoformat()}"
    share = random.Random(seed).random()  # noqa: S311  no secret
    return instant + timedelta(seconds=share * row["jitter_s"])
