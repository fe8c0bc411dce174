"""Read and write the operator's control rows, which switch workers on and off."""

from __future__ import annotations

from psycopg import errors as pg_errors

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

ALL = "all"
"""The queue of a control row that counts for every queue of its host."""


def get(conn: db.Connection, host: str, queue: str) -> Row | None:
    """Return the control row, or None; None too in a database without such a table."""
    try:
        with conn.transaction():
            return statements.controls.get(conn, host=host, queue=queue)
    except pg_errors.UndefinedTable:
        return None


def off_policy(conn: db.Connection, host: str, queue: str) -> str | None:
    """Return the stop policy of the row that is off now; None: on, no row, or no such table.

    A row of queue `all` counts for every queue of its host; if both are off, `hard` wins. Raises
    psycopg's `UndefinedFunction` for a schema whose functions are missing: not to know is not ON.
    """
    try:
        with conn.transaction():
            return statements.controls.off_policy(conn, host=host, queue=queue)
    except pg_errors.UndefinedTable:
        return None
    except pg_errors.UndefinedFunction:
        if statements.controls.has_table(conn):
            raise
        return None
