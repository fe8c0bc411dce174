"""Plan and fire the rows of `schedules`: one row of `schedule_fires` for each name and instant.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import (
    cancellation,
    ingest_jobs,
    job_tables,
    row_isolation,
    runs,
    schedule_definitions,
)
from queue_workflows.schedule import definition, entry
from queue_workflows.tasks import job_validation
from queue_workflows.types import TERMINAL_JOB_STATUSES, TERMINAL_RUN_STATUSES, Row

_log = logging.getLogger("queue_workflows.scheduler")
CHANNEL = "schedules_changed"
KIND = "schedule"
BATCH = 50
"""How many schedules one transaction plans and fires."""
OVERLAP_POLL_S = 1.0
"""Seconds between two checks whether the job that an instant waits for is over."""
OVERLAP, SAME_KEY = "overlap", "idempotency key"
"""Why an instant queued nothing."""
BOOT = "boot"
JOB, RUN = "job_id", "run_id"
_TERMINAL = TERMINAL_JOB_STATUSES | TERMINAL_RUN_STATUSES


# --- what is due -------------------------------------------------------------------------------


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
        ids = [made for at in due if (made := fire(conn, row, at)) is not None]
        _plan(conn, row, definition.first_after(row, max(now, due[-1])))
        return ids
    if _is_active(conn, row):
        _plan(conn, row, row["next_at"], wake_at=now + timedelta(seconds=OVERLAP_POLL_S))
        return []
    made = fire(conn, row, due[0])
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


# --- one fire ----------------------------------------------------------------------------------


def fire(conn: db.Connection, row: Row, at: datetime, *, reason: str = "tick") -> str | None:
    """Claim an instant of a locked schedule and queue its job or run; return the id.

    Returns None if the instant was claimed before, or if it queues nothing: an earlier job is not
    over and the policy is skip, or another job has the idempotency key.
    """
    instant = {"name": row["name"], "fire_at": at}
    if conn.execute(statements.schedule_rows.claim, instant, prepare=True).fetchone() is None:
        return None
    made: dict[str, str | None] = {JOB: None, RUN: None}
    skipped = None
    if row["overlap"] in ("skip", "replace") and _is_active(conn, row):
        skipped = OVERLAP if row["overlap"] == "skip" else None
        if skipped is None:
            _cancel_last(conn, row)
    if skipped is None:
        kind, made_id = _queue(conn, row, at, reason)
        made[kind] = made_id
        skipped = SAME_KEY if made_id is None else None
    conn.execute(statements.schedule_rows.record, {**instant, **made, "skipped": skipped})
    if skipped is not None:
        return None
    row.update(last_fire_at=at, last_job_id=made[JOB], last_run_id=made[RUN])
    conn.execute(statements.schedule_rows.fired, {**instant, **made})
    return made[JOB] or made[RUN]


def boot(conn: db.Connection, row: Row, now: datetime) -> str | None:
    """Queue a locked schedule with reason `boot`, and return the job's id.

    Returns None if it does not fire at present, or if it has fired within its own period: the time
    between the instants before and after `now`.
    """
    period = definition.period(row, now)
    if row["paused"] or row["gone_at"] is not None or period is None:
        return None
    name = row["name"] + entry.BOOT_SUFFIX
    since = {"names": [row["name"], name], "since": now - period, "now": now}
    if conn.execute(statements.schedule_rows.fired_since, since).fetchone() is not None:
        return None
    instant = {"name": name, "fire_at": now}
    if conn.execute(statements.schedule_rows.claim, instant).fetchone() is None:
        return None
    kind, made_id = _queue(conn, row, now, BOOT)
    made = {JOB: None, RUN: None, kind: made_id}
    skipped = SAME_KEY if made_id is None else None
    conn.execute(statements.schedule_rows.record, {**instant, **made, "skipped": skipped})
    conn.execute(statements.schedule_rows.kicked, {"name": row["name"], **made})
    return made_id


def _queue(conn: db.Connection, row: Row, at: datetime, reason: str) -> tuple[str, str | None]:
    if row["workflow_name"] is not None:
        return RUN, _submit(conn, row)
    job = new_job(row, at)._replace(reason=reason)
    (made,) = ingest_jobs.insert_batch(conn, job_validation.batches([job])[0])
    return JOB, str(made) if made.created else None


def new_job(row: Mapping[str, Any], at: datetime) -> job_validation.NewJob:
    """Return the job of a fire: `{fire_at}` in the idempotency key becomes the instant."""
    instant = entry.as_utc(at).isoformat()
    key = row["idempotency_key"]
    return job_validation.NewJob(
        task_name=row["task_name"],
        queue=row["queue"],
        priority=row["priority"],
        args=row["args"],
        idempotency_key=None if key is None else key.replace("{fire_at}", instant),
        headers={**(row["headers"] or {}), "schedule": row["name"], "fire_at": instant},
    )


def _submit(conn: db.Connection, row: Row) -> str:
    check_inputs(row["workflow_name"], row["inputs"])
    values: dict[str, Any] = {
        "run_id": str(uuid.uuid4()),
        "workflow_name": row["workflow_name"],
        "parcel_id": None,
        "out_dir": None,
        "status": "queued",
        "priority": job_validation.DEFAULT_PRIORITY if row["priority"] is None else row["priority"],
        "mode": "node",
        "context": payload.encode(row["inputs"], "inputs"),
    }
    return runs.submit(conn, values)["id"]


def check_inputs(workflow_name: str, inputs: Mapping[str, Any] | None) -> None:
    """Raise `ArgsRefused` for inputs that a workflow declared in this process does not take."""
    declared = config.get_config().workflow_map.get(workflow_name)
    if declared is not None:
        declared.check_inputs(dict(inputs or {}))


def _is_active(conn: db.Connection, row: Row) -> bool:
    """Return whether the job or run of the last fire is not over."""
    last = {"job_id": row["last_job_id"], "run_id": row["last_run_id"]}
    found = conn.execute(statements.schedule_rows.last_status, last).fetchone()
    status = found["status"] if found else None
    return status is not None and status not in _TERMINAL


def _cancel_last(conn: db.Connection, row: Row) -> None:
    if row["last_run_id"] is not None:
        runs.cancel(conn, row["last_run_id"])
    elif row["last_job_id"] is not None:
        cancellation.cancel_job(conn, job_tables.INGEST_JOBS, row["last_job_id"])
