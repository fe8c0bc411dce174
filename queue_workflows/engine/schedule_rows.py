"""Plan and fire the rows of `schedules`: one row of `schedule_fires` for each name and instant.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import psycopg

from queue_workflows import config, db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import cancellation, ingest_jobs, job_tables, row_isolation, runs
from queue_workflows.schedule import definition, entry
from queue_workflows.tasks import job_validation
from queue_workflows.types import TERMINAL_JOB_STATUSES, TERMINAL_RUN_STATUSES, Row, Rows

_log = logging.getLogger("queue_workflows.scheduler")
CHANNEL = "schedules_changed"
BATCH = 50
"""How many schedules one transaction plans and fires."""
OVERLAP_POLL_S = 1.0
"""Seconds between two checks whether the job that an instant waits for is over."""
OVERLAP, SAME_KEY = "overlap", "idempotency key"
"""Why an instant queued nothing."""
JOB, RUN = "job_id", "run_id"
_TERMINAL = TERMINAL_JOB_STATUSES | TERMINAL_RUN_STATUSES


# --- what is due -------------------------------------------------------------------------------


def fire_due(conn: db.Connection, now: datetime, *, limit: int = BATCH) -> tuple[int, list[str]]:
    """Plan and fire up to `limit` schedules; return how many there were, and the ids queued.

    Schedules that another transaction has locked are left to it. One that cannot fire keeps the
    reason in `error` and does not keep the others from firing.
    """
    rows = conn.execute(statements.schedule_rows.due, {"now": now, "limit": limit}).fetchall()
    queued: list[str] = []
    for row in rows:
        try:
            with conn.transaction():
                queued += _fire_row(conn, row, now)
        except (errors.QueueWorkflowsError, psycopg.Error) as error:
            if isinstance(error, psycopg.Error) and not row_isolation.is_of_row(error):
                raise
            text = " ".join(str(error).split())
            _log.warning("schedule %r does not fire: %s", row["name"], text)
            fault = {"name": row["name"], "error": payload.error_text(text)}
            conn.execute(statements.schedule_rows.fail, fault)
    return len(rows), queued


def next_wake(conn: db.Connection) -> tuple[bool, datetime | None]:
    """Return whether there are schedules, and when the next is due, if any is planned."""
    row = conn.execute(statements.schedule_rows.wake).fetchone()
    assert row is not None
    return row["any"], row["wake_at"]


def plan_again(conn: db.Connection, now: datetime, *, whole: bool) -> None:
    """Forget what a clock that was ahead had planned; `whole`: all that is planned after `now`."""
    conn.execute(statements.schedule_rows.plan_again, {"now": now, "all": whole})


def forget_errors(conn: db.Connection) -> None:
    """Let schedules that could not fire try again."""
    conn.execute(statements.schedule_rows.forget_errors)


def _fire_row(conn: db.Connection, row: Row, now: datetime) -> list[str]:
    if row["next_at"] is None:
        row["next_at"] = definition.first_after(row, _planned_from(row, now))
        if row["next_at"] is None or _wake_at(row, row["next_at"]) > now:
            _plan(conn, row, row["next_at"])
            return []
    due = definition.due(row, now)
    if not due:
        _plan(conn, row, definition.first_after(row, now))
        return []
    if row["overlap"] != "queue":
        ids = [made for at in due if (made := fire(conn, row, at)) is not None]
        _plan(conn, row, definition.first_after(row, max(now, due[-1])))
        return ids
    if _is_active(conn, row):
        retry = {"name": row["name"], "next_at": row["next_at"]}
        wake_at = now + timedelta(seconds=OVERLAP_POLL_S)
        conn.execute(statements.schedule_rows.plan, {**retry, "wake_at": wake_at})
        return []
    made = fire(conn, row, due[0])
    _plan(conn, row, due[1] if len(due) > 1 else definition.first_after(row, max(now, due[0])))
    return [] if made is None else [made]


def _planned_from(row: Row, now: datetime) -> datetime:
    """Return after which instant a schedule without a plan fires: its change or its last fire."""
    known = [at for at in (row["changed_at"], row["last_fire_at"]) if at is not None and at <= now]
    return max(known, default=now)


def _plan(conn: db.Connection, row: Row, next_at: datetime | None) -> None:
    wake_at = None if next_at is None else _wake_at(row, next_at)
    values = {"name": row["name"], "next_at": next_at, "wake_at": wake_at}
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
    over and the policy says skip, or another job has the idempotency key.
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


# --- rows --------------------------------------------------------------------------------------


def put(conn: db.Connection, schedule: definition.Schedule, source: str) -> bool:
    """Insert a schedule, or replace its definition; return whether anything changed.

    Raises `InvalidConfig` if the name is that of a schedule from the other source.
    """
    values = {name: getattr(schedule, name) for name in definition.COLUMNS}
    for name in ("args", "inputs"):
        values[name] = payload.encode(dict(values[name] or {}), f"{name} of {schedule.name!r}")
    if values["headers"] is not None:
        values["headers"] = payload.encode(dict(values["headers"]), f"headers of {schedule.name!r}")
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    values |= {"source": source, "definition_hash": digest[:32], "columns": [*definition.COLUMNS]}
    if conn.execute(statements.schedule_rows.put, values).fetchone() is not None:
        return True
    owner = conn.execute(statements.schedule_rows.owner, {"name": schedule.name}).fetchone()
    if owner is not None and owner["source"] != source:
        remedy = "rename it, or `queue-workflows schedules remove` the one of the table"
        raise errors.InvalidConfig(
            f"schedule {schedule.name!r} exists, from {owner['source']}: {remedy}"
        )
    return False


def mark_gone(conn: db.Connection, names: Iterable[str]) -> list[str]:
    """Mark the schedules of code that are none of `names`; return their names."""
    found = conn.execute(statements.schedule_rows.mark_gone, {"names": sorted(names)}).fetchall()
    return [row["name"] for row in found]


def set_paused(conn: db.Connection, name: str, paused: bool) -> bool:
    """Pause or resume a schedule; return whether there is one."""
    values = {"name": name, "paused": paused}
    return conn.execute(statements.schedule_rows.set_paused, values).fetchone() is not None


def remove(conn: db.Connection, name: str) -> bool:
    """Delete a schedule; return whether there was one."""
    return conn.execute(statements.schedule_rows.remove, {"name": name}).fetchone() is not None


def lock(conn: db.Connection, name: str) -> Row | None:
    """Lock a schedule and return it, or None."""
    return conn.execute(statements.schedule_rows.lock, {"name": name}).fetchone()


def find(conn: db.Connection, name: str | None = None) -> Rows:
    """Return the schedules with the status of their last fire and its failures in a row."""
    return conn.execute(statements.schedule_rows.find, {"name": name}).fetchall()
