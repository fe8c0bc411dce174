"""`queue-workflows runs`: the newest runs."""

from __future__ import annotations

from typing import Annotated

import typer

from queue_workflows import run_store
from queue_workflows.cli import command, options, output
from queue_workflows.types import Row

_KEYS = (
    "id", "workflow_name", "status", "priority", "mode", "generation", "created_at", "started_at",
    "finished_at", "out_dir", "error", "nodes_total", "nodes",
)  # fmt: skip


def runs(
    status: Annotated[str | None, typer.Option(help="Only runs of this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10000, metavar="N")] = 20,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List the newest runs with their nodes by state."""

    def body() -> int:
        with command.reading(app):
            rows = run_store.list_runs(limit=limit, status=status)
        if as_json:
            output.dump([{key: row[key] for key in _KEYS} for row in rows])
        else:
            output.table(
                ("run", "workflow", "status", "created (UTC)", "nodes", "error"), map(_cells, rows)
            )
        return 0

    command.execute("runs", body, debug=debug)


def _cells(row: Row) -> tuple[str, ...]:
    nodes: dict[str, int] = row["nodes"]
    done = nodes.get("completed", 0) + nodes.get("skipped", 0)
    total = row["nodes_total"]
    return (
        row["id"],
        row["workflow_name"],
        row["status"],
        row["created_at"].strftime("%Y-%m-%d %H:%M:%S"),
        f"{done}/{total}" if total is not None else "-",
        row["error"] or "",
    )
