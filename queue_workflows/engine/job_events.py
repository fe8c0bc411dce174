"""The history of node and ingest jobs."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from queue_workflows import db
from queue_workflows.engine import job_tables
from queue_workflows.types import Row

_NODE_EVENT = (
    "INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, host_label,"
    " queue, model, elapsed_s, error, detail) VALUES (%(run_id)s, %(node_id)s, %(job_id)s,"
    " least(greatest(%(attempt)s::bigint, 0), 32767), %(event_type)s, %(host_label)s, %(queue)s,"
    " %(model)s, %(elapsed_s)s, %(error)s, %(detail)s::jsonb) RETURNING id"
)
_PRUNE = (
    "DELETE FROM workflow_node_events WHERE ctid = ANY (ARRAY(SELECT ctid FROM workflow_node_events"
    " WHERE created_at < now() - %s * interval '1 day' ORDER BY id LIMIT %s))"
)


_NOTE = {
    table.name: sql.SQL(
        "INSERT INTO {events} ({node_columns} job_id, attempt, event_type, claim_no, worker_id,"
        " host_label, queue, elapsed_s, error, detail) VALUES ({node_values} %(id)s,"
        " least(greatest(%(attempts)s::bigint, 0), {most_attempts}),"
        " %(event_type)s, %(claim_no)s, %(worker_id)s, %(claimed_by)s, %(queue)s, %(elapsed_s)s,"
        " %(error)s, %(detail)s::jsonb)"
    )
    .format(
        # The older family's column is a smallint. No counter may keep a job from its end.
        most_attempts=sql.SQL("32767" if table.in_run else "2147483647"),
        events=sql.Identifier(table.events),
        node_columns=sql.SQL("run_id, node_id, model," if table.in_run else ""),
        node_values=sql.SQL("%(run_id)s, %(node_id)s, %(required_model)s," if table.in_run else ""),
    )
    .as_bytes(None)
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
}


def note(
    conn: db.Connection,
    table: job_tables.JobTable,
    job: Row,
    event_type: str,
    *,
    detail: str,
    elapsed_s: float | None = None,
    error: str | None = None,
) -> None:
    """Append one event of a job of either family; `job` is its row, `worker_id` that to name."""
    more = {"event_type": event_type, "detail": detail, "elapsed_s": elapsed_s, "error": error}
    conn.execute(_NOTE[table.name], job | more)


def record_node(conn: db.Connection, values: dict[str, Any]) -> int:
    """Append one event of a node; return its id."""
    row = conn.execute(_NODE_EVENT, values).fetchone()
    assert row is not None
    return row["id"]


def prune_nodes(conn: db.Connection, *, older_than_days: float, batch: int) -> int:
    """Delete up to `batch` node events past their age; how many."""
    return conn.execute(_PRUNE, (older_than_days, batch)).rowcount
