"""Define `queue-workflows schedules`: list, add, pause, resume, fire, preview and remove them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from queue_workflows import errors
from queue_workflows import schedules as api
from queue_workflows.cli import command, options, output
from queue_workflows.types import Row

ACTIONS = ("list", "add", "pause", "resume", "run-now", "preview", "remove")
_WEEK, _YEAR = 7.0, 366.0


def schedules(
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
    catch_up: Annotated[str, typer.Option(help="For add: none, last or all.")] = "last",
    overlap: Annotated[str, typer.Option(help="For add: allow, skip, replace or queue.")] = "skip",
    jitter_s: Annotated[float, typer.Option(help="For add: the longest delay.")] = 0.0,
    year: Annotated[
        bool, typer.Option("--year", help="For preview: a year instead of a week.")
    ] = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List, add, pause, fire, preview or remove schedules.

    `preview` marks each instant that a change of the clock moves, drops or doubles.
    """

    def run_command() -> int:
        _check(action, name, expression, task, workflow)
        with command.reading(app):
            found = _act(action, name or "", _WEEK if not year else _YEAR, add)
        if as_json:
            output.dump(found)
        else:
            _print(action, found)
        return 0

    def add() -> None:
        target: dict[str, Any] = {"task_name": task, "args": _json(args)}
        if workflow is not None:
            target = {"workflow_name": workflow, "inputs": _json(args)}
        api.add(
            name or "", expression or "", tz=tz, queue=queue, catch_up=catch_up, overlap=overlap,
            jitter_s=jitter_s, **target,
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


def _json(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise errors.InvalidConfig(f"--args is no JSON: {error}") from None


def _act(action: str, name: str, days: float, add: Any) -> Any:
    if action == "preview":
        return [one._asdict() for one in api.preview(name, days=days)]
    if action == "run-now":
        return {"id": api.run_now(name)}
    if action == "add":
        add()
    elif action == "pause":
        api.pause(name)
    elif action == "resume":
        api.resume(name)
    elif action == "remove":
        api.remove(name)
    return [row for row in api.list() if not name or row["name"] == name]


def _print(action: str, found: Any) -> None:
    if action == "run-now":
        output.echo(found["id"] or "nothing queued: the last job or run is not over")
    elif action == "preview":
        rows = [(one["at"], one["note"] or "") for one in found]
        output.table(("at (UTC)", "note"), rows)
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
    if row["changes"]:
        return f"changed: {', '.join(sorted(row['changes']))}"
    return row["last_status"] or "-"
