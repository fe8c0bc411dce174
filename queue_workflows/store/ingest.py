"""Ingest jobs as rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

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


def enqueue(conn: db.Connection, values: dict[str, Any]) -> str:
    """Insert one queued job; its id."""
    row = conn.execute(_ENQUEUE, values, prepare=True).fetchone()
    assert row is not None
    return row["id"]


def enqueue_many(conn: db.Connection, values: dict[str, Any], args: Sequence[str]) -> list[str]:
    """Insert one queued job per member of `args` (JSON texts), one statement; the ids in order.

    The ids are UUIDs of version 8 (RFC 9562): 74 random bits of the call, then the row's place.
    Ids that follow one another meet the same pages of their index, which random ones do not.
    """
    drawn = os.urandom(10).hex()
    variant = "89ab"[int(drawn[15], 16) & 3]
    prefix = f"{drawn[:8]}-{drawn[8:12]}-8{drawn[12:15]}-{variant}{drawn[16:19]}-"
    rows = f"[{','.join(args)}]"
    conn.execute(_ENQUEUE_MANY, {**values, "prefix": prefix, "args": rows}, prepare=True)
    return [f"{prefix}{place:012x}" for place in range(1, len(args) + 1)]


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
