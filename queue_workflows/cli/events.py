"""Define `queue-workflows events`: list and send the events that handlers wait for."""

from __future__ import annotations

import json

from queue_workflows import errors
from queue_workflows import events as api
from queue_workflows.cli import command, define, output
from queue_workflows.runtime import display
from queue_workflows.types import Row

app = define.group("events", "List and send the events that handlers wait for.", is_listed=False)
CUT = 100
"""Characters of a value that the list shows."""
_HEAD = ("event", "key", "sent (UTC)", "value")


@define.command(
    "list", "NAME  Only events of this name.", "--limit N 1..100000  How many at most.", app=app
)
def list_(name: str | None = None, limit: int = 20) -> define.Shown:
    """List events, the newest first."""
    return define.listed(api.list(name, limit=limit), _HEAD, _cells)


def _cells(row: Row) -> tuple[str, ...]:
    at, value = display.moment(row["created_at"]), output.line(row["value"], CUT)
    return row["name"], row["key"], at, value


@define.command(
    "send",
    """NAME  What the handlers wait for.
    --key KEY  Which of the events of this name.
    --value JSON  What the handlers get.""",
    reads=False,
    app=app,
)
def send(
    name: str, key: str | None = None, value: str = "null", *, app: str | None
) -> define.Shown:
    """Send an event. The first one of a name and key counts: exit code 1 if there is one."""
    try:
        sent = json.loads(value)
    except (ValueError, RecursionError) as error:
        given = output.line(value, 60)
        raise errors.InvalidConfig(
            f"--value {given} is not JSON: {error}; a text needs quotes: '\"yes\"'"
        ) from None
    with command.reading(app):
        is_first = api.send(name, key=key, value=sent)
    if not is_first:
        command.refuse("events send", f"event {name!r} with key {key or ''!r} was sent before")
    text = f"event {name}{f' (key {key})' if key else ''}: sent"
    done = {"name": name, "key": key or "", "sent": is_first}
    return define.Shown(done, lambda: is_first and output.echo(text), 0 if is_first else 1)
