"""Define `queue-workflows schedules`: list, add, pause, resume, fire, preview and remove them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from datetime import datetime
from typing import Any

from queue_workflows import errors
from queue_workflows import schedules as api
from queue_workflows.cli import define, output
from queue_workflows.requests import catalog
from queue_workflows.runtime import clock, stored_json
from queue_workflows.schedule import expression as expressions
from queue_workflows.types import Row

_HELD_BACK = {
    "overlap": "nothing queued: the last job or run is not over",
    "idempotency key": "nothing queued: another job has the idempotency key",
}
_WEEK, _YEAR = 7.0, 366.0
_HEAD = ("schedule", "expression", "zone", "runs", "next", "last", "state")
_NAME = "NAME  One schedule."

app = define.group("schedules", "List, add, pause, fire, preview or remove schedules.")


@define.command("list", "NAME  Only this one.", app=app)
def list_(name: str | None = None) -> define.Shown:
    """List schedules, the next to fire first."""
    rows = api.list()
    if name is not None and name not in (known := [row["name"] for row in rows]):
        raise errors.UnknownSchedule(f"no schedule {name!r:.220}{errors.hint(name, known)}")
    return _shown(name, rows)


def _shown(name: str | None, rows: list[Row]) -> define.Shown:
    chosen = [row for row in rows if name in (None, row["name"])]
    return define.listed(chosen, _HEAD, _cells)


@define.command(
    "add",
    _NAME,
    """EXPRESSION  When it fires: '0 3 * * 1-5'.
    --task  The task to queue.
    --workflow  The workflow to submit.
    --tz  The time zone.
    --queue  The queue of the job.
    --args JSON  Args of the task, or inputs.
    --priority  Of the job or run.
    --idempotency-key KEY  {fire_at} in it becomes the instant.
    --headers JSON  Headers of the job.
    --catch-up  none, last or all.
    --catch-up-max  With all: how many instants fire.
    --catch-up-within-s  With all: how old these may be.
    --overlap  allow, skip, replace or queue.
    --jitter-s  The longest delay.
    --start-at TIME  ISO time; in --tz if it has no zone.
    --end-at TIME  No instant after it.""",
    app=app,
)
def add(
    name: str, expression: str, task: str | None = None, workflow: str | None = None,
    tz: str = "UTC", queue: str | None = None, args: str | None = None, priority: int | None = None,
    idempotency_key: str | None = None, headers: str | None = None, catch_up: str = "last",
    catch_up_max: int = 100, catch_up_within_s: float = 86_400.0, overlap: str = "skip",
    jitter_s: float = 0.0, start_at: str | None = None, end_at: str | None = None, *,
    app: str | None,
) -> define.Shown:  # fmt: skip
    """Add a schedule, or replace the definition of the one of this name."""
    if (task is None) == (workflow is None):
        raise errors.InvalidConfig("schedules add: give --task or --workflow")
    given = _json("--args", args)
    target: dict[str, Any] = {"task_name": task, "args": given}
    if workflow is not None:
        target = {"workflow_name": workflow, "inputs": given}
    with _naming_app(app):
        api.add(
            name, expression, tz=tz, queue=queue, priority=priority,
            idempotency_key=idempotency_key, headers=_json("--headers", headers),
            catch_up=catch_up, catch_up_max=catch_up_max, catch_up_within_s=catch_up_within_s,
            overlap=overlap, jitter_s=jitter_s, start_at=_time("--start-at", start_at, tz),
            end_at=_time("--end-at", end_at, tz), **target,
        )  # fmt: skip
    return _shown(name, api.list())


for _name, _kind in (("pause", catalog.PauseSchedule), ("resume", catalog.ResumeSchedule)):
    define.request(app, _name, _kind, lambda asked: _shown(asked.name, api.list()))


@define.command("run-now", _NAME, app=app)
def run_now(name: str, *, app: str | None) -> define.Shown:
    """Fire a schedule now."""
    with _naming_app(app):
        fired = api.fire_now(name)
    text = fired.id or _HELD_BACK.get(fired.skipped or "", "nothing queued")
    return define.Shown(fired._asdict(), lambda: output.echo(text))


@define.command(
    "preview",
    _NAME,
    """--year  A year instead of a week.
    --limit 1..1000000  The most instants.""",
    app=app,
)
def preview(name: str, year: bool = False, limit: int = 10_000) -> define.Shown:
    """Show the coming instants, and which of them a change of the clock moves, drops or doubles."""
    found = api.preview(name, days=_YEAR if year else _WEEK, limit=limit + 1)
    if len(found) > limit:
        output.complain(f"these are the first {limit}: --limit N shows more")
    shown = [one._asdict() for one in found[:limit]]

    def show() -> None:
        output.table(("at (UTC)", "note"), [(one["at"], one["note"] or "") for one in shown])
        if not shown:
            output.complain(f"none: preview looks {_WEEK:.0f} days ahead, or with --year a year")

    return define.Shown(shown, show)


@define.command("remove", _NAME, app=app)
def remove(name: str) -> define.Shown:
    """Remove a schedule of the database."""
    api.remove(name)
    return define.Shown([], lambda: None)


@contextlib.contextmanager
def _naming_app(app: str | None) -> Generator[None]:
    """Add to the error of an unknown name that --app may have it."""
    try:
        yield
    except (errors.UnknownQueue, errors.UnknownTask) as error:
        if app is not None:
            raise
        raise type(error)(f"{error}; --app names the app that has it") from error


def _json(option: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidConfig(f"{option} is no JSON: {error}") from None


def _time(option: str, text: str | None, tz: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = clock.iso_time(text)
    except ValueError:
        raise errors.InvalidConfig(
            f"{option} {text!r:.40} is no ISO time such as 2026-03-01T06:00 or 2026-03-01T05:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=expressions.load_zone(tz))


def _cells(row: Row) -> tuple[object, ...]:
    runs = row["task_name"] or row["workflow_name"]
    last = row["last_fire_at"] or "-"
    return (
        row["name"], row["expression"], row["tz"], runs, row["next_fire_at"] or "-", last,
        _state(row),
    )  # fmt: skip


def _state(row: Row) -> str:
    """Return what a person has to know first."""
    if row["gone_at"] is not None:
        return "gone from the code"
    if row["paused"]:
        return "paused"
    if (found := api.problem(row)) is not None:
        return found
    state = row["last_status"] or ("no instant is left" if row.get("ended") else "-")
    if not (found := row["changes"]):
        return state
    # Which fields the code has changed; a role may have stored anything there.
    names = stored_json.mapping(found) or ["what cannot be read"]
    return f"{state}; changed: {', '.join(sorted(names))}"
