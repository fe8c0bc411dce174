"""Store, plan and fire the rows of schedules.

Each function takes part in the transaction of its connection. Only the app that stored a schedule
from its code replaces the schedule or marks it as gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from queue_workflows import config, db, errors
from queue_workflows.claim import job_tables, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.schedule import expression, timetable
from queue_workflows.tasks import job_validation
from queue_workflows.types import TERMINAL_JOB_STATUSES, TERMINAL_RUN_STATUSES, Row

_log = logging.getLogger("queue_workflows.scheduler")
CHANNEL = "schedules_changed"
KIND = "schedule"
BATCH = 50
"""How many schedules one transaction plans and fires."""
BATCH_S = 1.0
"""Seconds after which a transaction fires no further instant; many are due after an outage."""
OVERLAP_POLL_S = 1.0
"""Seconds between two checks whether the job that an instant waits for has ended."""
PATIENCE_S = 60.0
"""Seconds after which an instant that no scheduler has fired counts as late."""
OVERLAP, SAME_KEY = "overlap", "idempotency key"
"""Why an instant queued no job or run."""
_TERMINAL = TERMINAL_JOB_STATUSES | TERMINAL_RUN_STATUSES


def encoded(schedule: timetable.Schedule) -> tuple[dict[str, Any], str]:
    """Return the columns of a schedule and their digest; raise for what JSON cannot carry."""
    values = {name: getattr(schedule, name) for name in timetable.COLUMNS}
    for name in ("args", "inputs", "headers"):
        if name != "headers" or values[name] is not None:
            text = payload.encode(dict(values[name] or {}), f"{name} of {schedule.name!r}")
            values[name] = text
    values["on_failure"] = schedule.on_failure is not None
    whole = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    return values, whole[:32]


def put(conn: db.Connection, schedule: timetable.Schedule, app: str | None = None) -> Row | None:
    """Insert a schedule, or replace its definition; return `inserted`, or None if it is the same.

    `app` is the app whose code has it, or None for a schedule that was added to the table. Raises
    `InvalidConfig` if the name belongs to another kind of schedule or to another app.
    """
    values, digest = encoded(schedule)
    source = "table" if app is None else "code"
    values |= {"source": source, "app": app, "definition_hash": digest}
    values["columns"] = [*timetable.COLUMNS]
    found = statements.schedule_definitions.put(conn, **values)
    if found is not None:
        return found
    owner = statements.schedule_definitions.owner(conn, name=schedule.name)
    if owner is not None and (owner["source"], owner["app"]) != (source, app):
        whose = "the table" if owner["app"] is None else f"code, of app {owner['app']!r:.100}"
        raise errors.InvalidConfig(
            f"schedule {schedule.name!r} exists, from {whose}: rename it, or, if that one is not "
            f"needed any more, `queue-workflows schedules remove {schedule.name!r}`"
        )
    return None


class Fired(NamedTuple):
    """The result of firing. If `id` and `skipped` are None, the instant was claimed before."""

    id: str | None = None
    """The id of the job or run."""
    skipped: str | None = None
    """Why nothing was queued, which is `overlap` or `idempotency key`."""


def fire_now(conn: db.Connection, row: Row, now: datetime) -> Fired:
    """Fire a locked schedule in addition to its instants, unless its overlap policy holds it back.

    The policy `queue` holds it back too while the last job or run has not ended, since only
    instants of the expression wait. A schedule without a plan is first planned from its last change
    on, so that its instants up to now still fire.
    """
    waits = not (row["paused"] or row["ended"]) and row["gone_at"] is None and row["error"] is None
    if row["next_at"] is None and waits:
        # The scheduler reports why a schedule cannot be planned.
        with contextlib.suppress(errors.QueueWorkflowsError):
            _plan(conn, row, timetable.first_after(row, _planned_from(conn, row, now)))
            # A scheduler that found the row locked, without a plan, does not know when it is due.
            statements.schedule_rows.notify(conn)
    if row["overlap"] == "queue" and _is_active(conn, row):
        return Fired(skipped=OVERLAP)
    return fire(conn, row, now, reason="manual")


def fire(conn: db.Connection, row: Row, at: datetime, *, reason: str = "tick") -> Fired:
    """Claim an instant of a locked schedule and queue its job or run.

    It queues no job if the instant was claimed before, if an earlier job has not ended and the
    policy is skip, or if another job has the idempotency key.
    """
    name = row["name"]
    if statements.schedule_rows.claim(conn, name=name, fire_at=at) is None:
        return Fired()
    if row["overlap"] in ("skip", "replace") and _is_active(conn, row):
        if row["overlap"] == "skip":
            nothing = {"job_id": None, "run_id": None, "skipped": OVERLAP}
            statements.schedule_rows.record(conn, name=name, fire_at=at, **nothing)
            return Fired(skipped=OVERLAP)
        _cancel_last(conn, row)
    made = _queue(conn, row, name, at, reason)
    if not any(made.values()):
        return Fired(skipped=SAME_KEY)
    row.update(last_fire_at=at, last_job_id=made["job_id"], last_run_id=made["run_id"])
    statements.schedule_rows.fired(conn, name=name, fire_at=at, **made)
    return Fired(made["job_id"] or made["run_id"])


def boot(conn: db.Connection, row: Row, now: datetime) -> str | None:
    """Queue a locked schedule with reason `boot`, and return the job's id.

    Returns None if it does not fire at present, or if it has fired within its own period, which is
    the time between the instants before and after `now`.
    """
    period = timetable.period(row, now)
    if row["paused"] or row["gone_at"] is not None or period is None:
        return None
    name = row["name"] + timetable.BOOT_SUFFIX
    names = [row["name"], name]
    since = now - period
    if statements.schedule_rows.fired_since(conn, names=names, since=since, now=now) is not None:
        return None
    made = fire_once(conn, row, name, now, "boot")
    if made is None or not any(made.values()):
        return None
    # The boot kick is not an instant of the expression, so the last one that fired stays.
    statements.schedule_rows.fired(conn, name=row["name"], fire_at=row["last_fire_at"], **made)
    return made["job_id"] or made["run_id"]


def fire_once(
    conn: db.Connection, row: Row, name: str, at: datetime, reason: str
) -> dict[str, str | None] | None:
    """Claim an instant under `name` and queue its job or run, ignoring the overlap policy.

    Returns the id of each, or None if the instant was claimed before. It waits for a transaction
    that claims the same instant, so callers fire several always in the same order.
    """
    if statements.schedule_rows.claim(conn, name=name, fire_at=at) is None:
        return None
    return _queue(conn, row, name, at, reason)


def _queue(
    conn: db.Connection, row: Row, name: str, at: datetime, reason: str
) -> dict[str, str | None]:
    """Queue the job or run of an instant, which is claimed under `name`; return the id of each."""
    made: dict[str, str | None] = {"job_id": None, "run_id": None}
    if row["workflow_name"] is None:
        job = new_job(row, at)._replace(reason=reason)
        (batch,) = job_validation.batches([job])
        (queued,) = batch.ids(
            statements.ingest_jobs.insert_batch(conn, prefix=batch.prefix, jobs=batch.jobs)
        )
        made["job_id"] = str(queued) if queued.created else None
    else:
        check_inputs(row["workflow_name"], row["inputs"])
        priority = row["priority"]
        made["run_id"] = statements.runs.submit(
            conn,
            run_id=str(uuid.uuid4()),
            workflow_name=row["workflow_name"],
            parcel_id=None,
            out_dir=None,
            priority=job_validation.DEFAULT_PRIORITY if priority is None else priority,
            context=payload.encode(row["inputs"], "inputs"),
            headers=None,
        )["id"]
    skipped = None if any(made.values()) else SAME_KEY
    statements.schedule_rows.record(conn, name=name, fire_at=at, **made, skipped=skipped)
    return made


def new_job(row: Mapping[str, Any], at: datetime) -> job_validation.NewJob:
    """Return the job to queue, with the instant for `{fire_at}` in the idempotency key."""
    instant = expression.as_utc(at).isoformat()
    key = row["idempotency_key"]
    return job_validation.NewJob(
        task_name=row["task_name"],
        queue=row["queue"],
        priority=row["priority"],
        args=row["args"],
        idempotency_key=None if key is None else key.replace("{fire_at}", instant),
        headers={**(row["headers"] or {}), "schedule": row["name"], "fire_at": instant},
    )


def check_inputs(workflow_name: str, inputs: Mapping[str, Any] | None) -> None:
    """Raise `ArgsRefused` for inputs that a workflow declared in this process does not take."""
    declared = config.get_config().workflow_map.get(workflow_name)
    if declared is not None:
        declared.check_inputs(dict(inputs or {}))


def _is_active(conn: db.Connection, row: Row) -> bool:
    """Return whether the last job or run of the schedule has not ended."""
    status = statements.schedule_rows.last_status(
        conn, job_id=row["last_job_id"], run_id=row["last_run_id"]
    )
    return status is not None and status not in _TERMINAL


def _cancel_last(conn: db.Connection, row: Row) -> None:
    if row["last_run_id"] is not None:
        statements.runs.cancel(conn, run_id=row["last_run_id"], error=None)
    elif row["last_job_id"] is not None:
        cancel = statements.cancellation.cancel[job_tables.INGEST_JOBS.name]
        cancel(conn, ids=[row["last_job_id"]])


class Scope(NamedTuple):
    """Which schedules a scheduler fires, of the table and of its app's code."""

    app: str | None
    tasks: list[str]
    """The tasks it knows. It leaves schedules of other tasks to other schedulers for a minute."""
    names: list[str] | None = None
    """The only schedules that it fires, or None for all."""

    def given(self, isolation: row_isolation.Isolation) -> dict[str, Any]:
        """Return the parameters of the statements, with the names of schedules to skip."""
        return self._asdict() | {"aside": isolation.aside(KIND), "patience_s": PATIENCE_S}


class Batch:
    """The schedules that one transaction plans and fires, for about `BATCH_S` seconds.

    Schedules that another transaction has locked are left to it. One that cannot fire keeps the
    reason in `error`, is tried again later, and does not keep the others from firing.
    """

    def __init__(self, conn: db.Connection, now: datetime, scope: Scope) -> None:
        self._conn, self._now, self._scope = conn, now, scope
        self.queued: list[str] = []
        """Ids of jobs and runs."""
        self.missed: list[tuple[str, datetime, datetime]] = []
        """Schedules with the first and the last instant that their catch-up policy left out."""
        self._ends_at = time.monotonic() + BATCH_S
        self.more = False
        """Whether others may be due now."""

    def run(self, isolation: row_isolation.Isolation) -> None:
        """Plan and fire up to BATCH schedules that are due, for about BATCH_S seconds."""
        conn, given = self._conn, self._scope.given(isolation)
        # A submitter's open transaction may hold the idempotency keys of many schedules.
        db.set_local(conn, {"lock_timeout": str(int(db.LOOP_LOCK_S * 1000))})
        rows = statements.schedule_rows.due(conn, **given, now=self._now, limit=BATCH)
        self.more = len(rows) >= BATCH
        for row in rows:
            general = isolation.attempt(
                KIND,
                row["name"],
                lambda row=row: self._plan_or_fire(row),
                lambda error, _, row=row: _store_error(conn, row, error),
            )
            if general is not None:
                raise general
            if self._is_over():
                self.more = True
                break

    def _is_over(self) -> bool:
        """Return whether the other schedules have to wait for the next transaction."""
        return time.monotonic() >= self._ends_at

    def _plan_or_fire(self, row: Row) -> db.Error | None:
        """Plan a schedule without a plan, and fire it if that is due.

        Returns an error that is not this row's, such as a missing table. A schedule that is due,
        and whose task is unknown here, waits for another scheduler from now on.
        """
        conn, now, wake_at, waits = self._conn, self._now, None, False
        if row["next_at"] is None:
            row["next_at"] = timetable.first_after(row, _planned_from(conn, row, now))
            if row["next_at"] is not None:
                wake_at = max(_wake_at(row, row["next_at"]), now)
            is_unknown = row["task_name"] not in (None, *self._scope.tasks)
            waits = wake_at is None or wake_at > now or is_unknown
        queued: list[str] = []
        planned_at: Any = row["next_at"]
        try:
            with conn.transaction():
                if waits:
                    _plan(conn, row, planned_at, wake_at=wake_at)
                    return None
                left_out = self._fire_due(row, queued)
        except db.Error as error:
            if row_isolation.is_of_row(error) or row_isolation.is_busy(error):
                raise
            return error
        self.queued += queued
        if left_out is not None:
            self.missed.append((row["name"], planned_at, left_out))
        return None

    def _fire_due(self, row: Row, queued: list[str]) -> datetime | None:
        """Fire the due instants; at the batch's end leave the rest to the next transaction.

        Returns the last of the missed instants if none is due, else None.
        """
        conn, now = self._conn, self._now
        due = timetable.due(row, now)
        if not due:
            left_out = _left_out(conn, row, now)
            _plan(conn, row, timetable.first_after(row, now), missed_at=left_out)
            return left_out
        waits = row["overlap"] == "queue"
        if waits and _is_active(conn, row):
            _plan(conn, row, row["next_at"], wake_at=now + timedelta(seconds=OVERLAP_POLL_S))
            return None
        for number, at in enumerate(due, 1):
            made = fire(conn, row, at).id
            queued += [] if made is None else [made]
            if number < len(due) and (waits or self._is_over()):
                # Other schedules that were due earlier come first.
                _plan(conn, row, due[number], wake_at=None if waits else now)
                return None
        _plan(conn, row, timetable.first_after(row, max(now, due[-1])))
        return None


def _store_error(conn: db.Connection, row: Row, error: BaseException) -> bool:
    text = payload.error_text(" ".join(str(error).split()))
    if text != row["error"]:
        _log.warning("schedule %r does not fire: %s", row["name"], text)
        statements.schedule_rows.fail(conn, name=row["name"], error=text)
    return False


def _left_out(conn: db.Connection, row: Row, now: datetime) -> datetime | None:
    """Return the last instant that was missed for good, or None if none was."""
    passed = timetable.last_until(row, now)
    if passed is None:
        return None
    claimed = statements.schedule_rows.last_claimed(conn, name=row["name"], now=now)
    return passed if claimed is None or claimed < passed else None


def _planned_from(conn: db.Connection, row: Row, now: datetime) -> datetime:
    """Return the time after which instants of a schedule without a plan fire.

    It is the latest of its change, last fire and last missed instant. Times further ahead than this
    transaction lasts, from a clock that was ahead, are ignored: instants since then still fire.
    """
    last_fire_at = row["last_fire_at"]
    if last_fire_at is not None and last_fire_at > now:
        last_fire_at = statements.schedule_rows.last_claimed(conn, name=row["name"], now=now)
    known = (row["changed_at"], last_fire_at, row["missed_at"])
    end = now + timedelta(seconds=BATCH_S)
    return max((at for at in known if at is not None and at <= end), default=now)


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
    """Return when an instant is due, with a jitter that is the same in all schedulers."""
    if not row["jitter_s"]:
        return instant
    seed = f"{row['name']} {expression.as_utc(instant).isoformat()}"
    share = random.Random(seed).random()  # noqa: S311  no secret
    return instant + timedelta(seconds=share * row["jitter_s"])
