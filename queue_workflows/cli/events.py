"""Define `queue-workflows events`: list and send the events that handlers wait for."""

from __future__ import annotations

import json
from typing import Annotated, Any

from queue_workflows import errors
from queue_workflows import events as api
from queue_workflows.cli import command, define, options, output
from queue_workflows.runtime import display

app = define.group("events", "List and send the events that handlers wait for.", is_listed=False)
CUT = 100
"""Characters of a value that the list shows."""
_HEAD = ("event", "key", "sent (UTC)", "value")


@app.command("list")
@define.command("events list")
def list_(
    name: Annotated[str | None, options.argument("NAME", "Only events of this name.")] = None,
    limit: options.Limit = 20,
) -> define.Shown:
    """List events, the newest first."""
    rows = api.list(name, limit=limit)
    cells = [
        (row["name"], row["key"], display.moment(row["created_at"]), output.line(row["value"], CUT))
        for row in rows
    ]
    return define.Shown(rows, lambda: output.table(_HEAD, cells))


@app.command("send")
@define.command("events send", reads=False)
def send(
    name: Annotated[str, options.argument("NAME", "What the handlers wait for.")],
    key: Annotated[
        str | None, options.option("KEY", "Which of the events of this name.", "--key")
    ] = None,
    value: Annotated[str, options.option("JSON", "What the handlers get.", "--value")] = "null",
    *,
    app: str | None,
) -> define.Shown:
    """Send an event. The first one of a name and key counts: exit code 1 if there is one."""
    sent = _value(value)
    with command.reading(app):
        is_first = api.send(name, key=key, value=sent)
    if not is_first:
        command.refuse("events send", f"event {name!r} with key {key or ''!r} was sent before")
    text = f"event {name}{f' (key {key})' if key else ''}: sent"
    done = {"name": name, "key": key or "", "sent": is_first}
    return define.Shown(done, lambda: is_first and output.echo(text), 0 if is_first else 1)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidConfig(
            f"--value {output.line(text, 60)} is not JSON: {error}; a text needs quotes: '\"yes\"'"
        ) from None
