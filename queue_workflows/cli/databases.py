"""Define `queue-workflows databases`: list the embedded server's databases, one per project."""

from __future__ import annotations

from typing import Any

from queue_workflows import embedded
from queue_workflows.cli import command, options, output
from queue_workflows.db import databases as stored
from queue_workflows.embedded import running_apps

PATH_MAX = 60


def databases(as_json: options.AsJson = False, debug: options.Debug = False) -> None:
    """List the embedded server's databases, one per project."""

    def run_command() -> int:
        with embedded.ensure(create=False) as server:
            found = _collect(server)
            words = f"embedded PostgreSQL in {server.data_dir}"
        if as_json:
            output.dump(found)
        else:
            _show(words, found)
        return 0

    command.execute("databases", run_command, debug=debug)


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
