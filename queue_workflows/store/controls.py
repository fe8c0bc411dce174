"""The operator's ON/OFF rows."""

from __future__ import annotations

from typing import Any

from psycopg import errors as pg_errors

from queue_workflows import db
from queue_workflows.types import Row


def put(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Write the row of a host and queue; the row. The trigger wakes the worker."""
    row = conn.execute(
        "INSERT INTO worker_controls (host_label, queue, desired_state, stop_policy, requested_by)"
        " VALUES (%(host)s, %(queue)s, %(desired_state)s, %(stop_policy)s, %(requested_by)s)"
        " ON CONFLICT (host_label, queue) DO UPDATE SET desired_state = EXCLUDED.desired_state,"
        " stop_policy = EXCLUDED.stop_policy, requested_by = EXCLUDED.requested_by,"
        " reason = NULL, until_at = NULL, updated_at = now() RETURNING *",
        values,
    ).fetchone()
    assert row is not None
    return row


def get(conn: db.Connection, host: str, queue: str) -> Row | None:
    """The row, or None; None too in a database that has no such table."""
    try:
        return conn.execute(
            "SELECT * FROM worker_controls WHERE host_label = %s AND queue = %s", (host, queue)
        ).fetchone()
    except pg_errors.UndefinedTable:
        conn.rollback()
        return None


def off_policy(conn: db.Connection, host: str, queue: str) -> str | None:
    """The stop policy of a row that says OFF now; None: ON, no row, or no such table."""
    row = get(conn, host, queue)
    if row is None or row["desired_state"] != "off":
        return None
    if row.get("until_at") is not None:
        now = conn.execute("SELECT now() AS now").fetchone()
        if now is None or row["until_at"] <= now["now"]:
            return None
    return row["stop_policy"]
