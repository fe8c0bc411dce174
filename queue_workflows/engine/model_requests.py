"""What gpu workers hold, and what they are asked to load or unload."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

_PUT = (
    "INSERT INTO model_controls (host_label, worker_id, action, model, requested_by)"
    " VALUES (%(host)s, %(worker)s, %(action)s, %(model)s, %(requested_by)s)"
    " ON CONFLICT (host_label, worker_id) DO UPDATE SET action = EXCLUDED.action,"
    " model = EXCLUDED.model, requested_by = EXCLUDED.requested_by RETURNING *"
)
# What was asked before the worker started was meant for another process.
_NEWEST = (
    "SELECT c.* FROM model_controls c JOIN workers w ON w.worker_id = %(worker)s"
    " WHERE c.host_label = %(host)s AND c.worker_id IN ('', %(worker)s)"
    " AND c.request_no > %(after)s AND c.requested_at >= w.started_at"
    " ORDER BY c.request_no DESC LIMIT 1"
)
_HELD = (
    "SELECT w.worker_id, w.host_label, w.pid, CASE"
    " WHEN w.last_seen < now() - %(stale)s * interval '1 second' THEN 'dead' ELSE w.state END"
    " AS state, w.job_ids, w.detail->'model' AS model, w.detail->'request' AS request,"
    " w.last_seen, extract(epoch FROM now())::float8"
    " - extract(epoch FROM w.last_seen)::float8 AS age_s,"
    " coalesce(h.known_models, '{}') AS known_models, card.sample->'gpus' AS gpus"
    " FROM workers w LEFT JOIN worker_heartbeats h"
    " ON h.host_label = w.host_label AND h.queue = w.queue"
    " LEFT JOIN LATERAL (SELECT s.sample FROM hw_samples s WHERE s.host_label = w.host_label"
    " AND s.sampled_at > now() - interval '1 minute' ORDER BY s.sampled_at DESC LIMIT 1) card"
    " ON true"
    " WHERE w.queue = 'gpu' AND w.state <> 'stopped' AND w.last_seen > now() - interval '1 day'"
    " AND (%(host)s::text IS NULL OR w.host_label = %(host)s)"
    " ORDER BY w.host_label, w.started_at, w.worker_id"
)


def put(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Write the request for a host (worker "") or one worker; its row. The trigger wakes them."""
    row = conn.execute(_PUT, values).fetchone()
    assert row is not None
    return row


def newest(conn: db.Connection, *, host: str, worker_id: str, after: int) -> Row | None:
    """The newest request for this worker past number `after`, if made since it started; or None."""
    values = {"host": host, "worker": worker_id, "after": after}
    return conn.execute(_NEWEST, values, prepare=True).fetchone()


def held(conn: db.Connection, stale_after_s: float, host: str | None = None) -> list[Row]:
    """The gpu workers seen within a day, of one host or of all, with what they hold.

    `model` and `request` as the worker reported them, or None; `known_models` of its host; `gpus`
    of its host's latest sample within a minute, or None.
    """
    return conn.execute(_HELD, {"stale": stale_after_s, "host": host}).fetchall()
