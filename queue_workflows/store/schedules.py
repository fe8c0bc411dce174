"""Schedule fires: one row per entry and instant, whoever claims it first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from queue_workflows import db
from queue_workflows.store import payload

# The claim of the instant and its job are one statement: neither exists without the other.
_FIRE = b"""
WITH fired AS (
    INSERT INTO schedule_fires (name, fire_at, job_id)
    VALUES (%(name)s, %(fire_at)s, gen_random_uuid()::text)
    ON CONFLICT (name, fire_at) DO NOTHING
    RETURNING job_id)
INSERT INTO ingest_jobs (id, task_name, queue, reason, args, priority, lock_key)
SELECT job_id, %(task_name)s, %(queue)s, %(reason)s, %(args)s::jsonb,
       coalesce(%(priority)s::smallint, 100), %(lock_key)s FROM fired
RETURNING id
"""

_LAST_FIRES = b"""
SELECT entry.name, last.fire_at
  FROM unnest(%(names)s::text[]) AS entry (name)
 CROSS JOIN LATERAL (
       SELECT fire_at FROM schedule_fires WHERE name = entry.name AND fire_at <= %(until)s
        ORDER BY fire_at DESC LIMIT 1) AS last
"""

_PRUNE = b"""
DELETE FROM schedule_fires WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM schedule_fires WHERE created_at < now() - make_interval(days => %(days)s)
     LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
"""


def database_now(conn: db.Connection) -> datetime:
    """The database's clock, aware: the start of the transaction that `conn` is in."""
    row = conn.execute(b"SELECT now() AS now").fetchone()
    assert row is not None
    return row["now"]


def fire(
    conn: db.Connection,
    *,
    name: str,
    fire_at: datetime,
    task_name: str,
    queue: str,
    reason: str,
    args: Mapping[str, Any] | None = None,
    priority: int | None = None,
    lock_key: str | None = None,
) -> str | None:
    """Claim the instant and queue its job; the job's id, or None when it was claimed before.

    Joins the caller's transaction; waits for another one that is claiming the same instant, so
    several must be fired in one order. Raises `InvalidPayload` for args that JSON cannot carry.
    """
    row = conn.execute(
        _FIRE,
        {
            "name": name,
            "fire_at": fire_at,
            "task_name": task_name,
            "queue": queue,
            "reason": reason,
            "args": payload.encode(dict(args or {}), f"args of {task_name}"),
            "priority": priority,
            "lock_key": lock_key,
        },
    ).fetchone()
    return row["id"] if row else None


def last_fires(
    conn: db.Connection, names: Iterable[str], *, until: datetime
) -> dict[str, datetime]:
    """The latest instant <= `until` fired under each name; names without one are left out."""
    wanted = {"names": sorted(set(names)), "until": until}
    rows = conn.execute(_LAST_FIRES, wanted).fetchall()
    return {row["name"]: row["fire_at"] for row in rows}


def prune(conn: db.Connection, *, older_than_days: int = 30, limit: int = 1000) -> int:
    """Delete at most `limit` fires claimed more than that many days ago; how many went."""
    return conn.execute(_PRUNE, {"days": older_than_days, "limit": limit}).rowcount
