"""Queues as a dashboard shows them."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

LISTED = 50
"""Rows a list (the contract's figure)."""


def nodes(conn: db.Connection) -> dict[str, Any]:
    """Per DAG queue running and queued jobs, at most LISTED each; counts by queue and status."""
    result: dict[str, Any] = {}
    for queue in ("cpu", "gpu"):
        result[queue] = {
            "running": _rows(conn, queue, "running"),
            "queued": _rows(conn, queue, "queued"),
        }
    counts = {
        f"{queue}_{status}": 0 for queue in ("cpu", "gpu") for status in ("queued", "running")
    }
    for row in conn.execute(
        "SELECT queue, status, count(*) AS n FROM workflow_node_jobs"
        " WHERE status IN ('queued', 'running', 'awaiting_input') GROUP BY queue, status"
    ).fetchall():
        counts[f"{row['queue']}_{row['status']}"] = row["n"]
    return result | {"counts": counts}


def _rows(conn: db.Connection, queue: str, status: str) -> list[Row]:
    return conn.execute(
        "SELECT * FROM workflow_node_jobs WHERE queue = %s AND status = %s"
        " ORDER BY priority, seq LIMIT %s",
        (queue, status, LISTED),
    ).fetchall()
