"""Declare, add, pause, resume, remove, fire, list and preview schedules.

Each call is one transaction, or joins the transaction of `conn`. Its length: one noun of the public
API is one module.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from queue_workflows import acts, config, db, errors
from queue_workflows import check as workflow_check
from queue_workflows.dag import payload
from queue_workflows.db import check_violations, statements
from queue_workflows.dispatch import schedule_rows
from queue_workflows.schedule import expression, timetable
from queue_workflows.tasks import job_validation, registry
from queue_workflows.types import Row, Rows, Who

if TYPE_CHECKING:
    from typing_extensions import Unpack

ScheduleEntry = timetable.ScheduleEntry
Schedule = timetable.Schedule
Occurrence = expression.Occurrence
Fired = schedule_rows.Fired
F = TypeVar("F")
_LISTED = "`queue-workflows schedules list` names them"
MOST = 10_000
"""The most schedules that `list` returns."""
MAX_DAYS = 36_525
"""The most days that a preview looks ahead."""
_ANY_INSTANT = datetime(2000, 1, 1, tzinfo=timezone.utc)


# --- in code -----------------------------------------------------------------------------------


def set(entries: Iterable[ScheduleEntry | Schedule]) -> None:  # noqa: A001  the verb that users look for
    """Replace the schedules that the scheduler of this process follows.

    Raises `InvalidConfig` (a ValueError), without a change, for a value that is neither a
    `ScheduleEntry` nor a `Schedule`, for two entries with one name that fire at the same instants
    but queue different jobs, and for two schedules with one name.
    """
    chosen = [*entries]
    timetable.split(chosen)
    config.set_ingest_schedule(chosen)


def schedule(expression: str = "", *, name: str | None = None, **options: Any) -> Callable[[F], F]:
    """Return a decorator that schedules a registered task or a `@workflow`.

    `options` are the fields of `Schedule`: `every`, `tz`, `args` or `inputs`, `queue` ... The
    default name is the name of the task or workflow; give a second schedule of one target its own
    name. The decorator stands above the one that registers the task. Raises `InvalidConfig` (a
    ValueError), also if another schedule has the name.
    """

    def declare(target: F) -> F:
        task_name, workflow_name = _target(target)
        own_name = name if name is not None else task_name or workflow_name or ""
        target_of = {"task_name": task_name, "workflow_name": workflow_name}
        found = _built(own_name, expression, target_of | options)
        if workflow_name is not None:
            schedule_rows.check_inputs(workflow_name, found.inputs)
        others = [one for one in config.get_config().ingest_schedule if one != found]
        set([*others, found])
        return target

    return declare


def _target(target: Any) -> tuple[str | None, str | None]:
    """Return the names of the task and of the workflow; one of the two is None."""
    cfg = config.get_config()
    workflows = [name for name, one in cfg.workflow_map.items() if one is target]
    if workflows:
        return None, workflows[0]
    tasks = [name for name, one in cfg.ingest_task_map.items() if one is target]
    if tasks:
        return tasks[0], None
    raise errors.InvalidConfig(
        f"@schedule: {getattr(target, '__name__', target)!r:.80} is neither a @workflow nor a "
        "registered task: put @schedule above the decorator that registers it"
    )


# --- in the table ------------------------------------------------------------------------------


@check_violations.translated()
def add(
    name: str,
    expression: str = "",
    *,
    by: str | None = None,
    reason: str | None = None,
    conn: db.Connection | None = None,
    **options: Any,
) -> None:
    """Store a schedule in the table, or replace the definition of the one of this name.

    `options` are the fields of `Schedule`, `on_failure` excepted. `by`, `reason`: who does it and
    why, for the record, see `acts`. Raises before any write: `InvalidConfig`, for a name that the
    code uses too; `UnknownTask`, `UnknownQueue`, `InvalidJob`, `ArgsRefused`; and `UnknownWorkflow`
    (a LookupError) if this process has workflows, but not this one.
    """
    found = _built(name, expression, options)
    if found.on_failure is not None:
        raise errors.InvalidConfig(
            f"schedule {name!r}: on_failure is a function, which no table can hold: declare the "
            "schedule in code, or use set_on_failed()"
        )
    check(found)
    subject = ("schedule", name)
    with db.transaction(conn) as own, acts.recorded(own, "add", subject, by=by, reason=reason):
        schedule_rows.put(own, found)


def _built(name: str, expression: str, options: Mapping[str, Any]) -> Schedule:
    known = (*timetable.COLUMNS[2:], "every", "on_failure")
    unknown = [key for key in options if key not in known]
    if unknown:
        raise errors.InvalidConfig(
            f"schedule {name!r}: {unknown[0]!r:.80} is none of {', '.join(known)}"
        )
    return Schedule(name, expression, **options)


def check(found: Schedule) -> None:
    """Raise as `add` does for a target that is wrong as far as this process knows."""
    if found.workflow_name is not None:
        # A process without any workflow cannot know which ones the orchestrators have.
        if config.get_config().workflow_loader is not None:
            try:
                workflow_check.workflow(found.workflow_name)
            except errors.UnknownWorkflow as error:
                raise errors.UnknownWorkflow(f"schedule {found.name!r}: {error}") from error
        schedule_rows.check_inputs(found.workflow_name, found.inputs)
        return
    row = {name: getattr(found, name) for name in timetable.COLUMNS}
    try:
        registry.refuse_dropped(found.task_name or "", found.args)
        job_validation.batches([schedule_rows.new_job(row, _ANY_INSTANT)])
    except (ValueError, TypeError) as error:
        if not isinstance(error, errors.QueueWorkflowsError):
            raise
        raise type(error)(f"schedule {found.name!r}: {error}") from None


def pause(name: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> None:
    """Stop a schedule until `resume`; raise `UnknownSchedule` (a KeyError) if there is none.

    `by`, `reason`: as in `add`.
    """
    _demand("pause", name, conn, who, statements.schedule_definitions.set_paused, paused=True)


def resume(name: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> None:
    """Let a paused schedule fire again; instants of the pause never fire.

    `by`, `reason` and the errors are as in `pause`.
    """
    _demand("resume", name, conn, who, statements.schedule_definitions.set_paused, paused=False)


def remove(name: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> None:
    """Delete a schedule; `by`, `reason` and the errors are as in `pause`.

    A schedule that the code of a scheduler still names returns when that scheduler starts.
    """
    _demand("remove", name, conn, who, statements.schedule_definitions.remove)


def _demand(
    action: str,
    name: str,
    conn: db.Connection | None,
    who: Who,
    change: Callable[..., int],
    **given: bool,
) -> None:
    _check_name(name)
    with db.transaction(conn) as own, acts.recorded(own, action, ("schedule", name), **who):
        if not change(own, name=name, **given):
            raise _unknown(name, own)


def _check_name(name: Any) -> None:
    """Raise `UnknownSchedule` for a value that cannot be a schedule's name."""
    if not timetable.is_name(name):
        raise errors.UnknownSchedule(f"no schedule {name!r:.220}: {_LISTED}")


def _unknown(name: str, conn: db.Connection | None) -> errors.UnknownSchedule:
    meant = errors.hint(name, [row["name"] for row in list(conn=conn)])
    return errors.UnknownSchedule(f"no schedule {name!r:.220}{meant or f': {_LISTED}'}")


def run_now(name: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> str | None:
    """Fire a schedule now, in addition to its instants; return the id of the job or run.

    Returns None if its overlap policy or its idempotency key holds it back. A paused schedule fires
    too. `by`, `reason`: as in `add`. Raises `UnknownSchedule` (a KeyError), and what `add` raises.
    """
    return fire_now(name, conn=conn, **who).id


@check_violations.translated()
def fire_now(name: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> Fired:
    """Do as `run_now` does; also return in `skipped` why the schedule was held back.

    `overlap` means that the last job or run has not ended, and the policy is skip or queue.
    `idempotency key` means that another job has the key.
    """
    _check_name(name)
    subject = ("schedule", name)
    with db.transaction(conn) as own, acts.recorded(own, "run now", subject, **who) as act:
        row = statements.schedule_definitions.lock(own, name=name)
        if row is None:
            raise _unknown(name, own)
        fired = schedule_rows.fire_now(own, row, statements.schedules.now(own))
        act.detail["id"] = fired.id
        if fired.id is None:
            act.subjects.clear()
        return fired


def list(*, conn: db.Connection | None = None) -> Rows:  # noqa: A001  the verb that users look for
    """Return the schedules of the table, the first MOST by name, the next to fire first.

    `name`, `expression`, `tz`, `task_name`, `workflow_name`, `queue`, `next_fire_at`,
    `last_fire_at`, `last_status`, `failures` (in a row, 100 at most), `late_s`, `missed_at`,
    `paused`, `error`, `source`, `app`, `clash`, `gone_at`, `changes`; `minute` and `hours` of this
    process's old-style entries, which are listed even if no scheduler has stored them.
    """
    entries = _entries()
    with db.transaction(conn) as own:
        rows = [_listed(row, entries.get(row["name"])) for row in _find(own, limit=MOST)]
        rows += _unstored(own, entries, entries.keys() - {row["name"] for row in rows})
    return sorted(rows, key=_by_next_fire)


def get(name: str, *, conn: db.Connection | None = None) -> Row | None:
    """Return the schedule or entry of a name as `list` does; None if there is none."""
    if not payload.is_storable(name):
        return None
    entries = _entries()
    with db.transaction(conn) as own:
        if found := _find(own, name):
            return _listed(found[0], entries.get(name))
        return next(iter(_unstored(own, entries, entries.keys() & {name})), None)


def _unstored(
    conn: db.Connection, entries: Mapping[str, ScheduleEntry], names: Collection[str]
) -> Rows:
    """Return rows of old-style entries that no scheduler has stored."""
    if not names:
        return []
    now = statements.schedules.now(conn)
    fires = statements.schedules.last_fires(conn, names=sorted(names), until=now)
    last = {row["name"]: row["fire_at"] for row in fires}
    return [_entry_row(name, entries[name], now, last.get(name)) for name in names]


def _by_next_fire(row: Row) -> tuple[bool, datetime, str]:
    next_at = row["next_fire_at"]
    return next_at is None, next_at or _ANY_INSTANT, row["name"]


def troubled(*, limit: int = 50, conn: db.Connection | None = None) -> Rows:
    """Return up to `limit` schedules, by name, that have a `problem`; rows as `list` returns them.

    Schedules that are paused or gone from the code have none.
    """
    with db.transaction(conn) as own:
        return [_listed(row, None) for row in _find(own, troubled=True, limit=limit)]


def _entries() -> dict[str, ScheduleEntry]:
    """Return this process's old-style entries by the names of their rows."""
    return timetable.named(timetable.split(config.get_config().ingest_schedule)[0])


def _find(
    conn: db.Connection,
    name: str | None = None,
    *,
    troubled: bool = False,
    limit: int | None = None,
) -> Rows:
    """Return schedules by name, with the outcomes of their last fires; see the statement."""
    return statements.schedule_definitions.find(
        conn, name=name, troubled=troubled, limit=limit, patience_s=schedule_rows.PATIENCE_S
    )


def problem(row: Mapping[str, Any]) -> str | None:
    """Return the problem of a row of `list` in one line, or None."""
    if row["error"] is not None:
        return f"cannot fire: {row['error']}"
    if row["late_s"] is not None:
        whose = "" if row["app"] is None else f" of app {row['app']}"
        return f"overdue by {row['late_s']:.0f} s: no scheduler{whose} fires it"
    if row["missed"]:
        return f"missed its instant {row['missed_at'].isoformat()}"
    if row["failures"]:
        return "failed the last time" if row["failures"] == 1 else (
            f"failed {row['failures']} times in a row"
        )  # fmt: skip
    if row["clash"] is not None:
        return f"app {row['clash']} names one too, which does not fire: rename one of the two"
    return None


def _listed(row: Row, one: ScheduleEntry | None) -> Row:
    next_at, now = row["next_at"], row.pop("read_at")
    if next_at is None and not row["ended"] and not row["paused"] and row["gone_at"] is None:
        # No scheduler has planned it since it was written. If it cannot fire, leave this empty.
        with contextlib.suppress(errors.QueueWorkflowsError):
            next_at = timetable.first_after(row, now)
    return row | {"next_fire_at": next_at} | _minute(one)


def _minute(one: ScheduleEntry | None) -> Row:
    if one is None:
        return {"minute": None, "hours": None}
    return {"minute": one.minute, "hours": None if one.hours is None else sorted(one.hours)}


def _entry_row(name: str, one: ScheduleEntry, now: datetime, last: datetime | None) -> Row:
    nothing = dict.fromkeys(
        ("workflow_name", "last_status", "missed_at", "late_s", "error", "app", "clash", "gone_at",
         "changes")
    )  # fmt: skip
    return {
        **nothing,
        **_minute(one),
        "name": name,
        "expression": one.expression,
        "tz": "UTC",
        "task_name": one.task_name,
        "queue": one.queue,
        "next_fire_at": one.next_fire_at(now),
        "last_fire_at": last,
        "failures": 0,
        "missed": False,
        "paused": False,
        "source": "code",
    }


def preview(
    name: str, *, days: float = 7.0, limit: int = 1000, conn: db.Connection | None = None
) -> builtins.list[Occurrence]:
    """Return the coming instants of a schedule or entry, with the effects of clock changes.

    They begin at the database's now, at most `limit`. Raises `UnknownSchedule` (a KeyError), and
    `InvalidConfig` (a ValueError) for days that are not above 0 and up to 36,525.
    """
    _check_name(name)
    if not 0 < days <= MAX_DAYS:
        raise errors.InvalidConfig(f"days is a number above 0, up to {MAX_DAYS}, not {days!r:.40}")
    with db.transaction(conn) as own:
        now, row = statements.schedules.now(own), get(name, conn=own)
        if row is None:
            raise _unknown(name, own)
    start_at, end_at = row.get("start_at"), row.get("end_at")
    found = timetable.parsed(row["expression"], row["tz"], start_at)
    after = now if start_at is None else max(now, start_at - timedelta(microseconds=1))
    until = now + timedelta(days=days)
    until = until if end_at is None else min(until, end_at)
    occurrences = found.occurrences(after, until)
    return [one for one, _ in zip(occurrences, range(limit), strict=False)]
