"""Define `queue-workflows runs`: list the newest runs."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated, get_args

from queue_workflows import db, errors
from queue_workflows import runs as api
from queue_workflows.admin import overview
from queue_workflows.cli import define, options, output
from queue_workflows.runtime import display
from queue_workflows.types import Row, RunStatus

STATUSES = frozenset(get_args(RunStatus))
_HEAD = ("run", "workflow", "status", "created (UTC)", "nodes", "error")

_KEYS = (
    "id", "workflow_name", "status", "priority", "mode", "generation", "created_at", "started_at",
    "finished_at", "out_dir", "error", "nodes_total", "nodes",
)  # fmt: skip


@define.command("runs")
def runs(
    status: Annotated[str | None, options.option("STATUS", "Only runs of this status.")] = None,
    limit: Annotated[int, options.option("N", "How many at most.", min=1, max=10000)] = 20,
) -> define.Shown:
    """List the newest runs with their nodes by state."""
    if status is not None:
        _check(status)
    rows = api.list(limit=limit, status=status)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    listed = [{key: row[key] for key in _KEYS} for row in rows]
    return define.Shown(listed, lambda: show(rows, width))


def _check(status: str) -> None:
    """Raise `InvalidConfig` for a status that is neither the engine's nor that of any run."""
    with db.transaction() as conn:
        known = STATUSES | overview.runs_by_status(conn).keys()
    if status not in known:
        raise errors.InvalidConfig(f"--status {status} is none of {', '.join(sorted(known))}")


def show(rows: list[Row], width: int | None) -> None:
    """Print a table, or lines below each run's id if it does not fit `width` columns."""
    cells = [_cells(row) for row in rows]
    columns = zip(_HEAD, *cells, strict=True)
    needed = sum(2 + max(len(output.line(cell, 60)) for cell in column) for column in columns) - 2
    if width is None or needed <= width:
        output.table(_HEAD, cells)
        return
    for run_id, workflow, status, created, nodes, error in cells:
        output.echo(run_id)
        for text in (f"{workflow}: {status}, {nodes} nodes", created, error):
            if text:
                output.echo("  " + output.line(text, max(width - 2, 20)))


def _cells(row: Row) -> tuple[str, ...]:
    nodes: dict[str, int] = row["nodes"]
    done = nodes.get("completed", 0) + nodes.get("skipped", 0)
    total = row["nodes_total"]
    return (
        row["id"],
        row["workflow_name"],
        row["status"],
        display.moment(row["created_at"], zone=False),
        f"{done}/{total}" if total is not None else "-",
        row["error"] or "",
    )
