"""Ingest jobs as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.rows import tuple_row

from queue_workflows import db
from queue_workflows.tasks import job_validation
from queue_workflows.types import JobId, Row

_ENQUEUE = (
    "INSERT INTO ingest_jobs (task_name, queue, reason, priority, args)"
    " VALUES (%(task_name)s, %(queue)s, %(reason)s, %(priority)s, %(args)s::jsonb) RETURNING id"
)
_ENQUEUE_MANY = (
    "INSERT INTO ingest_jobs (id, task_name, queue, reason, priority, args)"
    " SELECT %(prefix)s || lpad(to_hex(a.place), 12, '0'), %(task_name)s, %(queue)s, %(reason)s,"
    " %(priority)s::smallint, a.args"
    " FROM jsonb_array_elements(%(args)s::jsonb) WITH ORDINALITY AS a (args, place)"
)
PUT = (
    "SELECT place, id, same FROM queue_workflows_enqueue("
    "CAST(%(prefix)s AS text), CAST(%(jobs)s AS jsonb))"
)
"""Rows as `job_validation.Call.ids` takes them."""


def enqueue(conn: db.Connection, values: dict[str, Any]) -> JobId:
    """Insert one queued job without options; its id."""
    row = conn.execute(_ENQUEUE, values, prepare=True).fetchone()
    assert row is not None
    return JobId(row["id"])


def enqueue_many(conn: db.Connection, values: dict[str, Any], args: Sequence[str]) -> list[JobId]:
    """Insert one queued job per member of `args` (JSON texts), one statement; the ids in order."""
    prefix = job_validation.drawn_prefix()
    rows = f"[{','.join(args)}]"
    conn.execute(_ENQUEUE_MANY, {**values, "prefix": prefix, "args": rows}, prepare=True)
    return [JobId(f"{prefix}{place:012x}") for place in range(1, len(args) + 1)]


def put(conn: db.Connection, call: job_validation.Call) -> list[JobId]:
    """Insert the jobs of a call, all or none; their ids in order.

    Raises `IdempotencyClash` with nothing written. Waits for another transaction that has inserted
    one of the keys and not ended yet.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(PUT, {"prefix": call.prefix, "jobs": call.jobs}, prepare=True)
        return call.ids(cursor.fetchall())


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
