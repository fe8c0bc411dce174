"""Define `queue-workflows queues`: show, pause, resume and limit queues."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queue_workflows import errors
from queue_workflows import queues as api
from queue_workflows.cli import command, options, output
from queue_workflows.runtime import clock, display
from queue_workflows.types import Row

ACTIONS = ("list", "pause", "resume", "limit")
_NONE = "none"
_LIMITS = ("max_running", "rate", "partition_max_running", "partition_rate")


_Limit = Annotated[str | None, typer.Option(metavar="N|none", help="How many run at once.")]
_Rate = Annotated[
    str | None,
    typer.Option(metavar="N/PERIOD|none", help="Starts in any period: 100/m, 5/30s, 1/d."),
]


def queues(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, pause, resume or limit.")
    ] = "list",
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="One queue; `list` without one: all.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only this partition key of the queue.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When the pause ends: 30s, 45m, 2h, 1d, or an ISO time."),
    ] = None,
    max_running: _Limit = None,
    rate: _Rate = None,
    partition_max_running: Annotated[
        str | None, typer.Option(metavar="N|none", help="The same for each partition key.")
    ] = None,
    partition_rate: Annotated[
        str | None, typer.Option(metavar="N/PERIOD|none", help="The same for each partition key.")
    ] = None,
    requested_by: Annotated[
        str | None, typer.Option(metavar="WHO", help="Who requests it, for the record.")
    ] = None,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show queues, or pause, resume or limit one.

    The list has depth, age, rates, state and limits. Only ingest queues can be limited. Running
    jobs continue. `none` removes a limit.
    """
    given = (max_running, rate, partition_max_running, partition_rate)
    limits = {name: value for name, value in zip(_LIMITS, given, strict=True) if value is not None}

    def run_command() -> int:
        _check(action, queue, partition, until, requested_by, limits)
        with command.reading(app):
            if action == "pause":
                api.pause(
                    queue or "",
                    partition=partition,
                    until=None if until is None else clock.parse_until(until),
                    requested_by=requested_by,
                )
            elif action == "resume":
                api.resume(queue or "", partition=partition)
            elif action == "limit":
                api.limit(queue or "", partition=partition, **_values(limits))
            rows = _rows(queue)
        if as_json:
            output.dump(rows)
        else:
            _list(rows)
        return 0

    command.execute("queues", run_command, debug=debug)


def _rows(queue: str | None) -> list[Row]:
    """Return the named queue, used or not, or all queues that are used."""
    rows = api.list(used_only=queue is None)
    return [row for row in rows if queue in (None, row["queue"])]


def _check(
    action: str,
    queue: str | None,
    partition: str | None,
    until: str | None,
    requested_by: str | None,
    limits: dict[str, str],
) -> None:
    if action not in ACTIONS:
        raise errors.InvalidConfig(f"{action!r} is none of {', '.join(ACTIONS)}")
    if action != "list" and queue is None:
        raise errors.InvalidConfig(f"{action} needs the name of a queue")
    if action == "list" and partition is not None:
        raise errors.InvalidConfig("list takes a queue at most; --json shows its partitions")
    if action != "pause" and (until is not None or requested_by is not None):
        raise errors.InvalidConfig("--until and --requested-by belong to pause")
    if action != "limit" and limits:
        names = ", ".join("--" + name.replace("_", "-") for name in limits)
        raise errors.InvalidConfig(f"{names} can be given to limit only")


def _values(limits: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in limits.items():
        if text == _NONE:
            values[name] = None
        elif name.endswith("max_running"):
            if not text.isascii() or not text.isdigit() or len(text) > 9:
                raise errors.InvalidConfig(
                    f"{name} {text[:40]!r} should be a whole number from 1, or none"
                )
            values[name] = int(text)
        else:
            values[name] = text
    return values


def _list(rows: list[Row]) -> None:
    if not rows:
        output.echo("no queue is in use: none has jobs, settings or workers; --app names an app's")
        return
    output.table(
        ("queue", "state", "running", "ready", "limited", "not due", "oldest", "in/min", "out/min",
         "limits"),
        [
            (
                row["queue"],
                _state(row),
                row["running"],
                row["ready"],
                row["limited"] + row["locked"],
                row["not_due"],
                output.seconds(row["oldest_s"]),
                f"{row['in_per_min']:g}",
                f"{row['out_per_min']:g}",
                _limits(row),
            )
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        for one in row["partitions"]:
            text = f"{row['queue']}, partition {one['partition']}: {_state(one)}"
            output.echo(output.line(", ".join(filter(None, (text, _limits(one))))))


def _state(row: Row) -> str:
    if row["state"] == "open":
        return "open"
    until = f" until {display.moment(row['paused_until'])}" if row["paused_until"] else ""
    by = f" by {row['paused_by']}" if row["paused_by"] else ""
    return f"paused{until}{by}"


def _limits(row: Row) -> str:
    parts = [
        f"{row['max_running']} at once" if row["max_running"] else "",
        row["rate"] or "",
    ]
    each = [
        f"{row['partition_max_running']} at once" if row.get("partition_max_running") else "",
        row.get("partition_rate") or "",
    ]
    if any(each):
        parts.append("each partition " + ", ".join(filter(None, each)))
    return ", ".join(filter(None, parts))
