"""Fire one schedule: claim an instant in `schedule_fires`, and queue its job or run.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import cancellation, ingest_jobs, job_tables, runs
from queue_workflows.schedule import definition, entry
from queue_workflows.tasks import job_validation
from queue_workflows.types import TERMINAL_JOB_STATUSES, TERMINAL_RUN_STATUSES, Row

OVERLAP, SAME_KEY = "overlap", "idempotency key"
"""Why an instant queued nothing."""
KEEP_PLAN = False
"""Whether a connection keeps the plans of these statements on `schedules`: no.

A plan that was made while the table had one page would read all of a table that has grown.
"""
BOOT, MANUAL = "boot", "manual"
JOB, RUN = "job_id", "run_id"
_TERMINAL = TERMINAL_JOB_STATUSES | TERMINAL_RUN_STATUSES


class Fired(NamedTuple):
    """What a fire queued. Without `id` and `skipped` the instant was claimed before."""

    id: str | None = None
    """The job or the run."""
    skipped: str | None = None
    """Why nothing was queued: `overlap` or `idempotency key`."""


def fire_now(conn: db.Connection, row: Row, now: datetime) -> Fired:
    """Fire a locked schedule beside its instants, unless its overlap policy holds it back.

    With the policy `queue` too, nothing is queued while the last job or run is not over: what waits
    are instants of the expression.
    """
    if row["overlap"] == "queue" and is_active(conn, row):
        return Fired(skipped=OVERLAP)
    return fire(conn, row, now, reason=MANUAL)


def fire(conn: db.Connection, row: Row, at: datetime, *, reason: str = "tick") -> Fired:
    """Claim an instant of a locked schedule and queue its job or run.

    Nothing is queued if the instant was claimed before, if an earlier job is not over and the
    policy is skip, or if another job has the idempotency key.
    """
    name = row["name"]
    if statements.schedule_rows.claim(conn, name=name, fire_at=at) is None:
        return Fired()
    made: dict[str, Any] = {JOB: None, RUN: None}
    skipped = None
    if row["overlap"] in ("skip", "replace") and is_active(conn, row):
        skipped = OVERLAP if row["overlap"] == "skip" else None
        if skipped is None:
            _cancel_last(conn, row)
    if skipped is None:
        kind, made_id = _queue(conn, row, at, reason)
        made[kind] = made_id
        skipped = SAME_KEY if made_id is None else None
    statements.schedule_rows.record(conn, name=name, fire_at=at, **made, skipped=skipped)
    if skipped is not None:
        return Fired(skipped=skipped)
    row.update(last_fire_at=at, last_job_id=made[JOB], last_run_id=made[RUN])
    statements.schedule_rows.fired(conn, name=name, fire_at=at, **made)
    return Fired(made[JOB] or made[RUN])


def boot(conn: db.Connection, row: Row, now: datetime) -> str | None:
    """Queue a locked schedule with reason `boot`, and return the job's id.

    Returns None if it does not fire at present, or if it has fired within its own period: the time
    between the instants before and after `now`.
    """
    period = definition.period(row, now)
    if row["paused"] or row["gone_at"] is not None or period is None:
        return None
    name = row["name"] + entry.BOOT_SUFFIX
    names = [row["name"], name]
    since = now - period
    if statements.schedule_rows.fired_since(conn, names=names, since=since, now=now) is not None:
        return None
    if statements.schedule_rows.claim(conn, name=name, fire_at=now) is None:
        return None
    kind, made_id = _queue(conn, row, now, BOOT)
    made: dict[str, Any] = {JOB: None, RUN: None, kind: made_id}
    skipped = SAME_KEY if made_id is None else None
    statements.schedule_rows.record(conn, name=name, fire_at=now, **made, skipped=skipped)
    statements.schedule_rows.kicked(conn, name=row["name"], **made)
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


def is_active(conn: db.Connection, row: Row) -> bool:
    """Return whether the job or run of the last fire is not over."""
    status = statements.schedule_rows.last_status(
        conn, job_id=row["last_job_id"], run_id=row["last_run_id"]
    )
    return status is not None and status not in _TERMINAL


def _cancel_last(conn: db.Connection, row: Row) -> None:
    if row["last_run_id"] is not None:
        statements.runs.cancel(conn, run_id=row["last_run_id"], error=None)
    elif row["last_job_id"] is not None:
        cancellation.cancel_job(conn, job_tables.INGEST_JOBS, row["last_job_id"])
