"""The operator's ON/OFF rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg import errors as pg_errors

from queue_workflows import db
from queue_workflows.types import Row


def put(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Write the row of a host and queue; the row. The trigger wakes the worker."""
    row = conn.execute(
        "INSERT INTO worker_controls"
        " (host_label, queue, desired_state, stop_policy, requested_by, reason, until_at)"
        " VALUES (%(host)s, %(queue)s, %(desired_state)s, %(stop_policy)s, %(requested_by)s,"
        " %(reason)s, coalesce(%(until)s::timestamptz, now() + %(lasts)s::interval))"
        " ON CONFLICT (host_label, queue) DO UPDATE SET desired_state = EXCLUDED.desired_state,"
        " stop_policy = EXCLUDED.stop_policy, requested_by = EXCLUDED.requested_by,"
        " reason = EXCLUDED.reason, until_at = EXCLUDED.until_at, updated_at = now() RETURNING *",
        values,
    ).fetchone()
    assert row is not None
    return row


def is_over(conn: db.Connection, instant: datetime) -> bool:
    """Whether an instant has come, by the database's clock."""
    row = conn.execute("SELECT %s::timestamptz <= clock_timestamp() AS over", (instant,)).fetchone()
    assert row is not None
    return row["over"]


def known_queues(conn: db.Connection) -> list[str]:
    """The queues, sorted, that a worker of any host has served or a row has switched."""
    rows = conn.execute(
        "SELECT queue FROM workers UNION SELECT queue FROM worker_heartbeats"
        " UNION SELECT queue FROM worker_controls ORDER BY queue"
    ).fetchall()
    return [row["queue"] for row in rows]


def get(conn: db.Connection, host: str, queue: str) -> Row | None:
    """The row, or None; None too in a database that has no such table."""
    try:
        with conn.transaction():
            return conn.execute(
                "SELECT * FROM worker_controls WHERE host_label = %s AND queue = %s", (host, queue)
            ).fetchone()
    except pg_errors.UndefinedTable:
        return None


def off_policy(conn: db.Connection, host: str, queue: str) -> str | None:
    """The stop policy of what says OFF now; None: ON, no row, or no such table.

    The row of queue `all` counts for every queue of its host; where both say OFF, `hard` wins.
    """
    try:
        with conn.transaction():
            row = conn.execute(
                "SELECT stop_policy FROM worker_controls"
                " WHERE host_label = %s AND queue IN (%s, 'all') AND desired_state = 'off'"
                " AND (until_at IS NULL OR until_at > now())"
                " ORDER BY stop_policy <> 'hard', queue = 'all' LIMIT 1",
                (host, queue),
            ).fetchone()
    except pg_errors.UndefinedTable:
        return None
    return row["stop_policy"] if row else None
