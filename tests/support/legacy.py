"""What the existing engine, 0.3.0, does to its tables by plain SQL."""

from __future__ import annotations

from typing import Any

from queue_workflows import db, migrations
from queue_workflows.types import Row

CLAIM = """
UPDATE workflow_node_jobs SET status = 'running', claimed_by = %(host)s, host_label = %(host)s,
       worker_lane = 0, started_at = now(), lease_expires_at = now() + interval '600 seconds'
 WHERE id = (SELECT j.id FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id
              WHERE j.status = 'queued' AND j.queue = 'cpu'
                AND r.status NOT IN ('completed', 'failed', 'cancelled')
              ORDER BY j.priority, j.created_at LIMIT 1 FOR UPDATE OF j SKIP LOCKED)
RETURNING *
"""
CLAIM_INGEST = """
UPDATE ingest_jobs SET status = 'running', claimed_by = %(host)s, started_at = now(),
       lease_expires_at = now() + interval '600 seconds'
 WHERE id = (SELECT id FROM ingest_jobs WHERE status = 'queued' AND queue = 'fetch'
              ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING *
"""
RENEW = """
UPDATE workflow_node_jobs SET lease_expires_at = now() + interval '600 seconds'
 WHERE id = %(job)s AND status = 'running' AND claimed_by = %(host)s RETURNING *
"""
COMPLETE = """
WITH done AS (
    UPDATE workflow_node_jobs SET status = 'completed', context_delta = '{"by": "legacy"}',
           error = NULL, seconds = 1, finished_at = now()
     WHERE id = %(job)s AND status NOT IN ('completed', 'failed', 'cancelled') RETURNING *),
sent AS (
    INSERT INTO workflow_dispatch_events (run_id, node_id, kind)
    SELECT run_id, node_id, 'completed' FROM done)
SELECT * FROM done
"""
COMPLETE_INGEST = """
UPDATE ingest_jobs SET status = 'completed', result = '{}', finished_at = now()
 WHERE id = %(job)s AND status NOT IN ('completed', 'failed', 'cancelled') RETURNING *
"""
RECLAIM = """
UPDATE workflow_node_jobs SET status = 'queued', claimed_by = NULL, lease_expires_at = NULL,
       priority = least(priority, 10)
 WHERE status = 'running' AND lease_expires_at < now() RETURNING *
"""


def make_schema(conn: db.Connection) -> None:
    """The tables as that engine leaves them, with its ledger of two columns."""
    conn.execute(
        "CREATE TABLE queue_schema_version"
        " (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    for path in sorted(migrations.dir().glob("*.sql")):
        version = int(path.name[:4])
        if version <= 12 and not path.name.endswith(".down.sql"):
            conn.execute(path.read_text().encode())
            conn.execute("INSERT INTO queue_schema_version (version) VALUES (%s)", (version,))


def do(conn: db.Connection, statement: str, **values: Any) -> Row | None:
    """One of its statements; the row it gives back, or None."""
    return conn.execute(statement.encode(), values).fetchone()
