"""Ingest jobs as rows."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

_ENQUEUE = (
    "INSERT INTO ingest_jobs (task_name, queue, reason, priority, args)"
    " VALUES (%(task_name)s, %(queue)s, %(reason)s, %(priority)s, %(args)s::jsonb) RETURNING id"
)
_ENQUEUE_MANY = (
    "INSERT INTO ingest_jobs (task_name, queue, reason, priority, args)"
    " SELECT %(task_name)s, %(queue)s, %(reason)s, %(priority)s::smallint, args::jsonb"
    " FROM unnest(%(args)s::text[]) WITH ORDINALITY AS a (args, line) RETURNING id"
)


def enqueue(conn: db.Connection, values: dict[str, Any]) -> str:
    """Insert one queued job; its id."""
    row = conn.execute(_ENQUEUE, values, prepare=True).fetchone()
    assert row is not None
    return row["id"]


def enqueue_many(conn: db.Connection, values: dict[str, Any]) -> list[str]:
    """Insert one queued job per member of `values["args"]` (JSON texts), one statement; the ids."""
    return [row["id"] for row in conn.execute(_ENQUEUE_MANY, values, prepare=True).fetchall()]


def get(conn: db.Connection, job_id: str) -> Row | None:
    """The job, or None."""
    return conn.execute("SELECT * FROM ingest_jobs WHERE id = %s", (job_id,)).fetchone()


def snapshot(conn: db.Connection, live_s: float) -> dict[str, dict[str, int]]:
    """Counts per queue and status, and the heartbeats per queue that are younger than `live_s`."""
    counts: dict[str, dict[str, int]] = {}
    for row in conn.execute(
        "SELECT queue, status, count(*) AS n FROM ingest_jobs GROUP BY queue, status"
    ).fetchall():
        counts.setdefault(row["queue"], {})[row["status"]] = row["n"]
    for row in conn.execute(
        "SELECT queue, count(*) AS n FROM worker_heartbeats"
        " WHERE last_seen > now() - %s * interval '1 second' GROUP BY queue",
        (live_s,),
    ).fetchall():
        counts.setdefault(row["queue"], {})["workers"] = row["n"]
    return counts
