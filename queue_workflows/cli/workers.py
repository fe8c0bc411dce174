"""`queue-workflows workers`: list the workers of the last day, and what is switched off."""

from __future__ import annotations

import signal
from typing import Any

from queue_workflows import config, db
from queue_workflows.admin import overview
from queue_workflows.cli import command, options, output
from queue_workflows.engine import queues
from queue_workflows.engine import workers as rows_of
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

_KEYS = (
    "worker_id", "host_label", "queue", "pid", "state", "desired_state", "current_model", "job_ids",
    "started_at", "last_seen", "age_s", "stop_policy", "requested_by", "reason", "until_at",
    "until_s", "switched_at", "last_flagged_dead_at", "death", "throttle",
)  # fmt: skip
_OBEYING = frozenset({"parked", "paused", "draining"})
ABSENT = "absent"
"""The state of a queue that is switched off and has no live worker."""


def workers(
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List worker processes: state, jobs, who switched them off."""

    def body() -> int:
        with command.reading(app):
            rows = listing()
            rows += absent(rows)
        if as_json:
            output.dump(rows)
        else:
            show(rows)
        return 0

    command.execute("workers", body, debug=debug)


def listing() -> list[Row]:
    """Return the workers with the keys that `--json` shows.

    Their jobs are read from the job tables, since their reports are up to a heartbeat old.
    """
    with db.transaction() as conn:
        rows = rows_of.listing(conn, config.STALE_WORKER_AFTER_S.read())
        held = overview.claims_in_flight(conn)
        limited = queues.held_back(conn)
    for row in rows:
        row["job_ids"] = held.get(row["worker_id"], [])
        row["state"] = _state(row)
        row["throttle"] = None
        if row["state"] == "idle" and row["desired_state"] == "on" and row["queue"] in limited:
            row["state"], row["throttle"] = "throttled", limited[row["queue"]]
        row["death"] = _death(row["detail"]) if row["state"] == "dead" else None
    return [{key: row[key] for key in _KEYS} for row in rows]


def absent(rows: list[Row]) -> list[Row]:
    """Return a row, with the same keys, for each OFF switch without a live worker."""
    live = {
        (row["host_label"], queue)
        for row in rows
        if row["state"] != "dead"
        for queue in (row["queue"], "all")
    }
    with db.transaction() as conn:
        switches = rows_of.switched_off(conn)
    return [
        dict.fromkeys(_KEYS) | {"state": ABSENT, "desired_state": "off", "job_ids": []} | switch
        for switch in switches
        if (switch["host_label"], switch["queue"]) not in live
    ]


def _state(row: Row) -> str:
    """Return the state now: a switch works before the worker's next report shows it.

    A report made after the switch decides: a worker that ignores switches reports idle or busy.
    """
    state: str = row["state"]
    if state not in _OBEYING | {"idle", "busy"}:
        return state
    obeys = state in _OBEYING or row["switched_at"] is None or row["last_seen"] < row["switched_at"]
    if row["desired_state"] == "on" or not obeys:
        return "busy" if row["job_ids"] else "idle"
    if row["job_ids"]:
        return "draining"
    return "paused" if row["stop_policy"] == "pause" else "parked"


def _death(detail: Any) -> str:
    """Return how a dead worker died, as far as its parent knows."""
    told = stored_json.mapping(detail)
    number, code = told.get("signal"), told.get("exit_code")
    if number is not None:
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        return f"killed by {name}"
    return "no heartbeat" if code is None else f"ended with exit code {code}"


def show(rows: list[Row]) -> None:
    """Print the workers as a table."""
    output.table(
        ("host", "queue", "pid", "state", "switch", "model", "jobs", "seen", "why"),
        [
            (
                row["host_label"],
                row["queue"],
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
