"""Define `queue-workflows queues`: show, pause, resume and limit queues."""

from __future__ import annotations

from queue_workflows import queues as api
from queue_workflows.cli import define, output, texts
from queue_workflows.requests import catalog
from queue_workflows.types import Row

app = define.group("queues", "Show queues, or pause, resume or limit one.")
_HEAD = (
    "queue", "state", "running", "ready", "limited", "not due", "oldest", "in/min", "out/min",
    "limits",
)  # fmt: skip


@define.command("list", "QUEUE  One queue; without one: all.", app=app)
def list_(queue: str | None = None) -> define.Shown:
    """List queues with their depth, age, rates, state and limits."""
    return _shown(queue)


def _shown(queue: str | None) -> define.Shown:
    """Show the named queue, used or not, or all queues that are used."""
    rows = [row for row in api.list(used_only=queue is None) if queue in (None, row["queue"])]
    return define.Shown(rows, lambda: _list(rows))


define.request(app, "pause", catalog.PauseQueue, lambda asked: _shown(asked.queue))
define.request(app, "resume", catalog.ResumeQueue, lambda asked: _shown(asked.queue))
define.request(app, "limit", catalog.LimitQueue, lambda asked: _shown(asked.queue))


def _list(rows: list[Row]) -> None:
    if not rows:
        output.echo("no queue is in use: none has jobs, settings or workers; --app names an app's")
        return
    output.table(_HEAD, map(_cells, rows))
    for row in rows:
        for one in row["partitions"]:
            text = f"{row['queue']}, partition {one['partition']}: {_state(one)}"
            output.echo(output.line(output.listed(text, _limits(one))))


def _cells(row: Row) -> tuple[object, ...]:
    return (
        row["queue"], _state(row), row["running"], row["ready"], row["limited"] + row["locked"],
        row["not_due"], output.seconds(row["oldest_s"]), f"{row['in_per_min']:g}",
        f"{row['out_per_min']:g}", _limits(row),
    )  # fmt: skip


def _state(row: Row) -> str:
    is_open = row["state"] == "open"
    return "open" if is_open else texts.paused(row["paused_until"], row["paused_by"])


def _limits(row: Row) -> str:
    most, rate = row.get("partition_max_running"), row.get("partition_rate")
    each = output.listed(most and f"{most} at once", rate)
    at_once = row["max_running"] and f"{row['max_running']} at once"
    return output.listed(at_once, row["rate"], each and f"each partition {each}")
