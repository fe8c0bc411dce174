"""The history of node and ingest jobs."""

from __future__ import annotations

from typing import Any

from queue_workflows import db

_NODE_EVENT = (
    "INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, host_label,"
    " queue, model, elapsed_s, error, detail) VALUES (%(run_id)s, %(node_id)s, %(job_id)s,"
    " %(attempt)s, %(event_type)s, %(host_label)s, %(queue)s, %(model)s, %(elapsed_s)s, %(error)s,"
    " %(detail)s::jsonb)"
)
_PRUNE = (
    "WITH old AS MATERIALIZED (SELECT id FROM workflow_node_events"
    " WHERE created_at < now() - %s * interval '1 day' ORDER BY id LIMIT %s)"
    " DELETE FROM workflow_node_events e USING old WHERE e.id = old.id"
)


def record_node(conn: db.Connection, values: dict[str, Any]) -> None:
    """Append one event of a node."""
    conn.execute(_NODE_EVENT, values)


def prune_nodes(conn: db.Connection, *, older_than_days: float, batch: int) -> int:
    """Delete up to `batch` node events past their age; how many."""
    return conn.execute(_PRUNE, (older_than_days, batch)).rowcount
