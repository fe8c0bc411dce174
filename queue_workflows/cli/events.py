"""Define `queue-workflows events`: list and send the events that handlers wait for."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from queue_workflows import errors
from queue_workflows import events as api
from queue_workflows.cli import command, options, output
from queue_workflows.runtime import display

app = typer.Typer(
    name="events",
    help="List and send the events that handlers wait for.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
CUT = 100
"""Characters of a value that the list shows."""
_HEAD = ("event", "key", "sent (UTC)", "value")


@app.command("list")
def list_(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only events of this name.")
    ] = None,
    limit: options.Limit = 20,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List events, the newest first."""

    def run_command() -> int:
        with command.reading(app):
            rows = api.list(name, limit=limit)
        if as_json:
            output.dump(rows)
            return 0
        output.table(
            _HEAD,
            [
                (
                    row["name"],
                    row["key"],
                    display.moment(row["created_at"]),
                    output.line(row["value"], CUT),
                )
                for row in rows
            ],
        )
        return 0

    command.execute("events list", run_command, debug=debug)


@app.command("send")
def send(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the handlers wait for.")],
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Which of the events of this name.")
    ] = None,
    value: Annotated[
        str, typer.Option("--value", metavar="JSON", help="What the handlers get.")
    ] = "null",
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Send an event. The first one of a name and key counts: exit code 1 if there is one."""

    def run_command() -> int:
        read = _value(value)
        with command.reading(app):
            is_first = api.send(name, key=key, value=read)
        if as_json:
            output.dump({"name": name, "key": key or "", "sent": is_first})
        elif is_first:
            output.echo(f"event {name}{f' (key {key})' if key else ''}: sent")
        if not is_first:
            command.refuse("events send", f"event {name!r} with key {key or ''!r} was sent before")
        return 0 if is_first else 1

    command.execute("events send", run_command, debug=debug)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidConfig(
            f"--value {output.line(text, 60)} is not JSON: {error}; a text needs quotes: '\"yes\"'"
        ) from None
