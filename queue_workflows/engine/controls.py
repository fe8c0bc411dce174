"""Read and write the operator's control rows, which switch workers on and off."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg import errors as pg_errors

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

ALL = "all"
"""The queue of a control row that counts for every queue of its host."""


def put(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Write the control row of a host and queue and return it. A trigger wakes the workers."""
    row = conn.execute(statements.controls.put, values).fetchone()
    assert row is not None
    return row


def is_over(conn: db.Connection, instant: datetime) -> bool:
    """Return whether an instant has come, by the database's clock."""
    row = conn.execute(statements.controls.is_over, {"instant": instant}).fetchone()
    assert row is not None
    return row["over"]


def known_queues(conn: db.Connection) -> list[str]:
    """Return the queues, sorted, that a worker has served or a control row names."""
    return [row["queue"] for row in conn.execute(statements.controls.known_queues).fetchall()]


def known_hosts(conn: db.Connection) -> list[str]:
    """Return the hosts, sorted, that have had a worker or that a control row names."""
    return [row["host_label"] for row in conn.execute(statements.controls.known_hosts).fetchall()]


def get(conn: db.Connection, host: str, queue: str) -> Row | None:
    """Return the control row, or None; None too in a database without such a table."""
    try:
        with conn.transaction():
            return conn.execute(statements.controls.get, {"host": host, "queue": queue}).fetchone()
    except pg_errors.UndefinedTable:
        return None


def off_policy(conn: db.Connection, host: str, queue: str) -> str | None:
    """Return the stop policy of the row that is off now; None: on, no row, or no such table.

    A row of queue `all` counts for every queue of its host; if both are off, `hard` wins. Raises
    psycopg's `UndefinedFunction` for a schema whose functions are missing: not to know is not ON.
    """
    try:
        with conn.transaction():
            row = conn.execute(
                statements.controls.off_policy, {"host": host, "queue": queue}
            ).fetchone()
    except pg_errors.UndefinedTable:
        return None
    except pg_errors.UndefinedFunction:
        found = conn.execute(statements.controls.has_table).fetchone()
        if found is None or found["found"]:
            raise
        return None
    return row["policy"] if row else None
