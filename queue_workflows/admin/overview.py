"""Read what commands display: one run and its nodes, and the system in counts."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

LISTED = 50
"""Rows of each list in `queue_lists`; apps rely on the number."""


def nodes_of_round(conn: db.Connection, run_id: str, number: int) -> list[str] | None:
    """Return the ids of the nodes of this round, in all loops of a run's graph; None: no node."""
    definition = statements.runs.definition(conn, run_id=run_id)
    entries = stored_json.graph_nodes(definition).items()
    return [name for name, entry in entries if entry.get("round") == number] or None


def queues(conn: db.Connection) -> list[Row]:
    """Return the queues with work, `queued` or `running`: queue, state, n, blocked, oldest_s.

    `blocked` counts jobs that may not start yet; `n` and `oldest_s` leave them out.
    """
    both = (statements.overview.queues[table] for table in reversed(statements.JOB_TABLES))
    return [row for query in both for row in query(conn)]


def queue_lists(conn: db.Connection) -> dict[str, Any]:
    """Return running and queued nodes of each DAG queue, at most LISTED each, and `counts`."""
    result: dict[str, Any] = {
        queue: {
            status: statements.overview.listed_nodes(conn, queue=queue, status=status, limit=LISTED)
            for status in ("running", "queued")
        }
        for queue in ("cpu", "gpu")
    }
    counts = {
        f"{queue}_{status}": 0 for queue in ("cpu", "gpu") for status in ("queued", "running")
    }
    for row in statements.overview.live_nodes(conn):
        counts[f"{row['queue']}_{row['status']}"] = row["n"]
    return result | {"counts": counts}


def orchestration(conn: db.Connection, *, patience_s: float) -> dict[str, Any]:
    """Return what orchestrators have not done yet.

    `open_events`, `lag_s` (age of the oldest that is due, 0.0 for none), `answers` not taken yet,
    `awaiting_input` nodes, and `not_started`: ids (at most 50) of startable runs older than
    `patience_s`.
    """
    events = statements.overview.open_events(conn)
    late = statements.overview.late_runs(conn, patience_s=patience_s)
    return {
        "open_events": events["n"],
        "lag_s": events["lag_s"],
        "answers": statements.overview.open_answers(conn),
        "awaiting_input": statements.overview.nodes_awaiting_input(conn),
        "not_started": [row["id"] for row in late],
    }
