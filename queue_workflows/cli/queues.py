"""Define `queue-workflows queues`: show, pause, resume and limit queues."""

from __future__ import annotations

from typing import Annotated, Any

from queue_workflows import queues as api
from queue_workflows.cli import define, options, output
from queue_workflows.requests import catalog
from queue_workflows.runtime import display
from queue_workflows.types import Row

app = define.group("queues", "Show queues, or pause, resume or limit one.")


@app.command("list")
@define.command("queues list")
def list_(
    queue: Annotated[str | None, options.argument("QUEUE", "One queue; without one: all.")] = None,
) -> define.Shown:
    """List queues with their depth, age, rates, state and limits."""
    return _shown(queue)


def _changed(asked: Any, _: object) -> define.Shown:
    return _shown(asked.queue)


define.request(app, "pause", catalog.PauseQueue, _changed)
define.request(app, "resume", catalog.ResumeQueue, _changed)
define.request(app, "limit", catalog.LimitQueue, _changed)


def _shown(queue: str | None) -> define.Shown:
    """Show the named queue, used or not, or all queues that are used."""
    rows = [row for row in api.list(used_only=queue is None) if queue in (None, row["queue"])]
    return define.Shown(rows, lambda: _list(rows))


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
    parts = [f"{row['max_running']} at once" if row["max_running"] else "", row["rate"] or ""]
    each = [
        f"{row['partition_max_running']} at once" if row.get("partition_max_running") else "",
        row.get("partition_rate") or "",
    ]
    if any(each):
        parts.append("each partition " + ", ".join(filter(None, each)))
    return ", ".join(filter(None, parts))
