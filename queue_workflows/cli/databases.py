"""Define `queue-workflows databases`: list the embedded server's databases, one per project."""

from __future__ import annotations

from typing import Any

from queue_workflows import embedded
from queue_workflows.cli import command, define, output
from queue_workflows.db import databases as stored
from queue_workflows.embedded import running_apps

PATH_MAX = 60


@define.command("databases", "as_json debug", reads=False)
def databases() -> define.Shown:
    """List the embedded server's databases, one per project."""
    with embedded.ensure(create=False) as server:
        found = _collect(server)
        words = f"embedded PostgreSQL in {server.data_dir}"
    return define.Shown(found, lambda: _show(words, found))


def _collect(server: embedded.Server) -> list[dict[str, Any]]:
    running = running_apps.live(server.data_dir)
    return [
        {
            "database": each.name,
            "folder": each.folder,
            "size_bytes": each.size_bytes,
            "unfinished_runs": each.unfinished,
            "up": [
                {"pid": up.pid, "app": up.app, "since": up.since}
                for up in running
                if up.database == each.name
            ],
        }
        for each in stored.listing(server)
    ]


def _show(words: str, found: list[dict[str, Any]]) -> None:
    output.echo(words)
    if not found:
        output.echo(f"no database yet: `{command.PROG} up --app MODULE[:CALLABLE]` makes one")
        return
    output.echo()
    output.table(
        ("database", "project", "MB", "unfinished runs", "up"),
        [
            (
                row["database"],
                _ending(row["folder"] or "(shared)"),
                round(row["size_bytes"] / 1e6),
                row["unfinished_runs"],
                ", ".join(f"{up['app']} (pid {up['pid']})" for up in row["up"]) or "-",
            )
            for row in found
        ],
    )


def _ending(folder: str) -> str:
    """Return the last part of a long path, which distinguishes projects."""
    return folder if len(folder) <= PATH_MAX else "..." + folder[3 - PATH_MAX :]
