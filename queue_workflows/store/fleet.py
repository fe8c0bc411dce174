"""What the gpu fleet knows of its models, and what it cannot serve."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.engine import claims
from queue_workflows.types import Row

_SIZES = (
    "INSERT INTO gpu_models AS g (model, host_label, est_vram_gb)"
    " SELECT s.model, %(host)s, s.gb FROM unnest(%(models)s::text[], %(sizes)s::float8[])"
    " AS s (model, gb) ORDER BY s.model"
    " ON CONFLICT (model, host_label) DO UPDATE SET est_vram_gb = EXCLUDED.est_vram_gb"
    " WHERE g.est_vram_gb IS DISTINCT FROM EXCLUDED.est_vram_gb"
)


def publish_sizes(conn: db.Connection, host: str, sizes: dict[str, float]) -> None:
    """Say what each model needs on a card, in GB, as this host registers it; 0: unknown."""
    names = list(sizes)
    values: dict[str, Any] = {"host": host, "models": names}
    conn.execute(_SIZES, values | {"sizes": [sizes[name] or None for name in names]})


def learn_load(conn: db.Connection, host: str | None, model: str | None, seconds: float) -> None:
    """Let the moving average of a host's loads of a model follow this one."""
    conn.execute(
        "SELECT queue_workflows_learn(%s, %s, %s::float8, NULL)",
        (host, model, seconds),
        prepare=True,
    )


def prune(conn: db.Connection) -> int:
    """Delete what was learned on hosts that have no worker and taught nothing for 30 days."""
    return conn.execute(
        "DELETE FROM gpu_models g WHERE g.updated_at < now() - interval '30 days'"
        " AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = g.host_label)"
    ).rowcount


def claim_detail(who: claims.Claimant) -> dict[str, Any]:
    """How a worker chooses, for its row of `workers`."""
    chosen: dict[str, Any] = {"newest": who.newest, "obey": who.obey}
    if who.queue == "gpu":
        chosen |= {"policy": who.policy, "grace_s": who.grace_s, "bound_s": who.bound_s}
    return chosen


def unserved(conn: db.Connection) -> list[Row]:
    """The models (`''`: none) whose waiting gpu jobs no live worker takes, or that are flagged so.

    model, reason (no_worker, off, vram, model; None: it can be served), detail, flagged (the reason
    it has been given, or None).
    """
    return conn.execute(
        "SELECT coalesce(u.model, f.model) AS model, u.reason, u.detail, f.reason AS flagged"
        " FROM queue_workflows_gpu_unserved() u FULL JOIN gpu_unassignable f ON f.model = u.model"
        " ORDER BY 1",
        prepare=True,
    ).fetchall()


_FLAG = (
    "INSERT INTO gpu_unassignable AS f (model, reason, detail)"
    " VALUES (%(model)s, %(reason)s, %(detail)s) ON CONFLICT (model) DO UPDATE"
    " SET reason = EXCLUDED.reason, detail = EXCLUDED.detail, since = now()"
    " WHERE (f.reason, f.detail) IS DISTINCT FROM (EXCLUDED.reason, EXCLUDED.detail)"
)
_NOTED = (
    "INSERT INTO workflow_node_events"
    " (run_id, node_id, job_id, attempt, event_type, queue, model, error, detail)"
    " SELECT j.run_id, j.node_id, j.id, greatest(0, least(j.attempts, 32767)), %(event)s, j.queue,"
    " j.required_model, %(detail)s,"
    " jsonb_strip_nulls(jsonb_build_object('reason', %(reason)s::text))"
    " FROM workflow_node_jobs j WHERE j.queue = 'gpu' AND j.status = 'queued'"
    " AND j.blocked_reason IS NULL AND {of} ORDER BY j.required_model, j.seq LIMIT 100"
)
_NOTE = {
    True: _NOTED.replace("{of}", "j.required_model BETWEEN %(model)s AND %(model)s"),
    False: _NOTED.replace("{of}", "j.required_model IS NULL"),
}


def flag(conn: db.Connection, row: Row) -> bool:
    """Flag a model of `unserved`, with an event for the first 100 of its jobs; False: it was."""
    if conn.execute(_FLAG, row).rowcount == 0:
        return False
    conn.execute(_NOTE[row["model"] != ""].encode(), row | {"event": "unassignable"})
    return True


def unflag(conn: db.Connection, model: str) -> bool:
    """Take the flag of a model away, with an event for the first 100 of its jobs that wait still.

    False: it had none.
    """
    if conn.execute("DELETE FROM gpu_unassignable WHERE model = %s", (model,)).rowcount == 0:
        return False
    values = {"model": model, "event": "assignable", "reason": None, "detail": None}
    conn.execute(_NOTE[model != ""].encode(), values)
    return True


def flagged(conn: db.Connection) -> list[Row]:
    """What is flagged: model (None: jobs without one), reason, detail, since, jobs (<= 10,000)."""
    return conn.execute(
        "SELECT nullif(f.model, '') AS model, f.reason, f.detail, f.since, (SELECT count(*) FROM"
        " (SELECT FROM workflow_node_jobs j WHERE j.queue = 'gpu' AND j.status = 'queued'"
        " AND j.blocked_reason IS NULL AND coalesce(j.required_model, '') = f.model LIMIT 10000) c)"
        " AS jobs FROM gpu_unassignable f ORDER BY f.model"
    ).fetchall()
