"""`queue-workflows workers`: the worker processes seen within a day."""

from __future__ import annotations

from queue_workflows import config, db
from queue_workflows.cli import command, options, output
from queue_workflows.store import overview
from queue_workflows.store import workers as rows_of
from queue_workflows.types import Row

_KEYS = (
    "worker_id", "host_label", "queue", "pid", "state", "desired_state", "current_model", "job_ids",
    "started_at", "last_seen", "age_s",
)  # fmt: skip


def workers(
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List the worker processes, their state and what they are doing."""

    def body() -> int:
        with command.reading(app):
            rows = listing()
        if as_json:
            output.dump(rows)
        else:
            show(rows)
        return 0

    command.execute("workers", body, debug=debug)


def listing() -> list[Row]:
    """The workers with the keys that `--json` shows.

    What they hold is read from the jobs: their own reports are up to a heartbeat old.
    """
    with db.transaction() as conn:
        rows = rows_of.listing(conn, config.STALE_WORKER_AFTER_S.read())
        held = overview.held_jobs(conn)
    for row in rows:
        row["job_ids"] = held.get(row["worker_id"], [])
        if row["state"] in ("idle", "busy"):
            row["state"] = "busy" if row["job_ids"] else "idle"
    return [{key: row[key] for key in _KEYS} for row in rows]


def show(rows: list[Row]) -> None:
    """Print them as a table."""
    output.table(
        ("host", "queue", "pid", "state", "switch", "model", "jobs", "seen"),
        [
            (
                row["host_label"],
                row["queue"],
                row["pid"],
                row["state"],
                row["desired_state"],
                row["current_model"] or "",
                ", ".join(row["job_ids"]),
                f"{output.seconds(row['age_s'])} ago",
            )
            for row in rows
        ],
    )
