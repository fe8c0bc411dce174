"""Define `queue-workflows schedules`: list, add, pause, resume, fire, preview and remove them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, cast

import typer

from queue_workflows import errors
from queue_workflows import schedules as api
from queue_workflows.cli import command, options, output
from queue_workflows.runtime import clock
from queue_workflows.schedule import expression as expressions
from queue_workflows.types import Row

_ALWAYS = ("action", "name", "expression", "app", "as_json", "debug")
_HELD_BACK = {
    "overlap": "nothing queued: the last job or run is not over",
    "idempotency key": "nothing queued: another job has the idempotency key",
}
ACTIONS = ("list", "add", "pause", "resume", "run-now", "preview", "remove")
_WEEK, _YEAR = 7.0, 366.0


def schedules(
    context: typer.Context,
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help=f"{', '.join(ACTIONS)}.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One schedule.")] = None,
    expression: Annotated[
        str | None,
        typer.Argument(metavar="EXPRESSION", help="For add: '0 3 * * 1-5'."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="For add: the task to queue.")] = None,
    workflow: Annotated[str | None, typer.Option(help="For add: the workflow to submit.")] = None,
    tz: Annotated[str, typer.Option(help="For add: the time zone.")] = "UTC",
    queue: Annotated[str | None, typer.Option(help="For add: the queue of the job.")] = None,
    args: Annotated[
        str | None, typer.Option(metavar="JSON", help="For add: args of the task, or inputs.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="For add: of the job or run.")] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="For add: {fire_at} in it becomes the instant."),
    ] = None,
    headers: Annotated[
        str | None, typer.Option(metavar="JSON", help="For add: headers of the job.")
    ] = None,
    catch_up: Annotated[str, typer.Option(help="For add: none, last or all.")] = "last",
    catch_up_max: Annotated[
        int, typer.Option(help="For add with all: how many instants fire.")
    ] = 100,
    catch_up_within_s: Annotated[
        float, typer.Option(help="For add with all: how old these may be.")
    ] = 86_400.0,
    overlap: Annotated[str, typer.Option(help="For add: allow, skip, replace or queue.")] = "skip",
    jitter_s: Annotated[float, typer.Option(help="For add: the longest delay.")] = 0.0,
    start_at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For add: ISO time; in --tz if it has no zone."),
    ] = None,
    end_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="For add: no instant after it.")
    ] = None,
    year: Annotated[
        bool, typer.Option("--year", help="For preview: a year instead of a week.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="For preview: the most instants.")
    ] = 10_000,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List, add, pause, fire, preview or remove schedules.

    `preview` marks each instant that a change of the clock moves, drops or doubles.
    """

    def run_command() -> int:
        _check(action, name, expression, task, workflow)
        _check_options(context, action)
        with command.reading(app):
            if action == "preview":
                found = _preview(name or "", _YEAR if year else _WEEK, limit)
            else:
                found = _act(action, name or "", add, app)
        if as_json:
            output.dump(found)
        else:
            _print(action, found)
        return 0

    def add() -> None:
        target: dict[str, Any] = {"task_name": task, "args": _json("--args", args)}
        if workflow is not None:
            target = {"workflow_name": workflow, "inputs": _json("--args", args)}
        api.add(
            name or "", expression or "", tz=tz, queue=queue, priority=priority,
            idempotency_key=idempotency_key, headers=_json("--headers", headers),
            catch_up=catch_up, catch_up_max=catch_up_max, catch_up_within_s=catch_up_within_s,
            overlap=overlap, jitter_s=jitter_s, start_at=_time("--start-at", start_at, tz),
            end_at=_time("--end-at", end_at, tz), **target,
        )  # fmt: skip

    command.execute("schedules", run_command, debug=debug)


def _check(
    action: str, name: str | None, expression: str | None, task: str | None, workflow: str | None
) -> None:
    if action not in ACTIONS:
        raise errors.InvalidConfig(f"schedules {action!r}: actions are {', '.join(ACTIONS)}")
    if action != "list" and name is None:
        raise errors.InvalidConfig(f"schedules {action} needs the NAME of a schedule")
    if (expression is not None) != (action == "add"):
        raise errors.InvalidConfig("schedules add NAME EXPRESSION: only add takes an expression")
    if action == "add" and (task is None) == (workflow is None):
        raise errors.InvalidConfig("schedules add: give --task or --workflow")


def _check_options(context: typer.Context, action: str) -> None:
    """Refuse options of another action: they would do nothing."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _ALWAYS:
            continue
        owner = "preview" if name in ("year", "limit") else "add"
        if action != owner:
            option = f"--{name.replace('_', '-')}"
            raise errors.InvalidConfig(f"schedules {action}: {option} is an option of {owner}")


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


def _preview(name: str, days: float, limit: int) -> list[dict[str, Any]]:
    found = api.preview(name, days=days, limit=limit + 1)
    if len(found) > limit:
        output.complain(f"these are the first {limit}: --limit N shows more")
    return [one._asdict() for one in found[:limit]]


def _act(action: str, name: str, add: Callable[[], None], app: str | None) -> Any:
    try:
        if action == "run-now":
            return api.fire_now(name)._asdict()
        if action == "add":
            add()
    except (errors.UnknownQueue, errors.UnknownTask) as error:
        if app is not None:
            raise
        raise type(error)(f"{error}; --app names the app that has it") from error
    if action == "pause":
        api.pause(name)
    elif action == "resume":
        api.resume(name)
    elif action == "remove":
        api.remove(name)
    known = api.list()
    found = [row for row in known if not name or row["name"] == name]
    if name and not found and action == "list":
        meant = errors.hint(name, [row["name"] for row in known])
        raise errors.UnknownSchedule(f"no schedule {name!r:.220}{meant}")
    return found


def _print(action: str, found: Any) -> None:
    if action == "run-now":
        output.echo(found["id"] or _HELD_BACK.get(found["skipped"], "nothing queued"))
    elif action == "preview":
        rows = [(one["at"], one["note"] or "") for one in found]
        output.table(("at (UTC)", "note"), rows)
        if not rows:
            output.complain(f"none: preview looks {_WEEK:.0f} days ahead, or with --year a year")
    elif action != "remove":
        head = ("schedule", "expression", "zone", "runs", "next", "last", "state")
        output.table(head, map(_cells, found))


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
    return f"{state}{_changed(row['changes'])}"


def _changed(found: object) -> str:
    """Return which fields the code has changed; a role may have stored anything there."""
    if not found:
        return ""
    names = cast("dict[str, object]", found) if isinstance(found, dict) else ["what cannot be read"]
    return f"; changed: {', '.join(sorted(names))}"
