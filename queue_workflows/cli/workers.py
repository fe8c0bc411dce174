"""Define `queue-workflows workers`: list the workers of the last day, and switches that are off."""

from __future__ import annotations

from queue_workflows import workers as api
from queue_workflows.cli import define, output
from queue_workflows.types import Row


@define.command("workers")
def workers() -> define.Shown:
    """List worker processes: state, jobs, who switched them off."""
    rows = api.list()
    return define.Shown(rows, lambda: show(rows))


def show(rows: list[Row]) -> None:
    """Print the workers as a table."""
    output.table(
        ("host", "queue", "pid", "state", "switch", "model", "jobs", "seen", "why"),
        [
            (
                row["host_label"],
                row["queue"] if row["card"] is None else f"{row['queue']} {row['card']}",
                row["pid"] or "-",
                row["state"],
                row["desired_state"],
                row["current_model"] or "",
                ", ".join(row["job_ids"]),
                "-" if row["age_s"] is None else f"{output.seconds(row['age_s'])} ago",
                _why(row),
            )
            for row in rows
        ],
    )


def _why(row: Row) -> str:
    """Return `killed by SIGKILL, flagged; drain by ops, on again in 29 min 10 s: new disk`."""
    parts: list[str] = []
    if row["death"]:
        parts.append(row["death"] + (", flagged" if row["last_flagged_dead_at"] else ""))
    if row["throttle"]:
        parts.append(row["throttle"])
    if row["desired_state"] == "off":
        by = f" by {row['requested_by']}" if row["requested_by"] else ""
        reason = f": {row['reason']}" if row["reason"] else ""
        ends = "" if row["until_s"] is None else f", on again in {output.seconds(row['until_s'])}"
        parts.append(f"{row['stop_policy']}{by}{ends}{reason}")
    return "; ".join(parts)
