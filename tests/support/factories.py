"""Insert runs and jobs as an app does, and read rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from queue_workflows import db
from queue_workflows.types import Row


def insert(conn: db.Connection, table: str, **columns: Any) -> Row:
    """Insert these columns, dicts and lists of dicts as jsonb; return the row."""
    values = {name: _adapted(value) for name, value in columns.items()}
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING *").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(map(sql.Placeholder, values)),
    )
    row = conn.execute(statement, values).fetchone()
    assert row is not None
    return row


def _adapted(value: Any) -> Any:
    return Jsonb(value) if isinstance(value, dict) else value


def run(conn: db.Connection, **columns: Any) -> str:
    """Insert a run and return its id; it is running, so that nothing starts it."""
    return insert(conn, "workflow_runs", **{"workflow_name": "w", "status": "running"} | columns)[
        "id"
    ]


def node(conn: db.Connection, run_id: str | None = None, node_id: str = "n", **columns: Any) -> Row:
    """Insert a node job, by default queued on cpu, of this run or of a new one."""
    given = {"node_module": "m", "queue": "cpu"} | columns
    return insert(conn, "workflow_node_jobs", run_id=run_id or run(conn), node_id=node_id, **given)


def ingest(conn: db.Connection, **columns: Any) -> Row:
    """Insert an ingest job, by default queued on fetch."""
    return insert(conn, "ingest_jobs", **{"task_name": "t", "queue": "fetch"} | columns)


def of(conn: db.Connection, kind: str, **columns: Any) -> Row:
    """Insert a job of a kind, `node` or `ingest`."""
    return (node if kind == "node" else ingest)(conn, **columns)


def alert_sender(conn: db.Connection) -> None:
    """Note that a scheduler sends alerts, so that failures are noted for ten minutes."""
    conn.execute(
        "INSERT INTO failure_alert_state (wanted_until) VALUES (now() + interval '10 minutes')"
    )


def empty(conn: db.Connection, *names: str) -> None:
    """Delete all rows of these tables, as by their age; cheaper than TRUNCATE for a few."""
    with conn.transaction():
        conn.execute("SELECT set_config('queue_workflows.retention', 'on', true)")
        for name in names:
            conn.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name)))


@contextmanager
def unguarded(conn: db.Connection, table: str) -> Generator[None]:
    """Open a transaction without triggers, for changes that only a test may make."""
    name = sql.Identifier(table)
    with conn.transaction():
        conn.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(name))
        yield
        conn.execute(sql.SQL("ALTER TABLE {} ENABLE TRIGGER USER").format(name))


def reread(conn: db.Connection, job: Row) -> Row:
    """Return the job's row as it is now."""
    table = "workflow_node_jobs" if "node_id" in job else "ingest_jobs"
    query = sql.SQL("SELECT * FROM {} WHERE id = %s").format(sql.Identifier(table))
    row = conn.execute(query, (job["id"],)).fetchone()
    assert row is not None
    return row


def job(conn: db.Connection) -> Row:
    """Return the row of the ingest job, of which the test has one."""
    row = conn.execute("SELECT * FROM ingest_jobs").fetchone()
    assert row is not None
    return row


def ingest_jobs() -> list[Row]:
    """Return the rows of all ingest jobs, in the order in which they were queued."""
    return execute("SELECT * FROM ingest_jobs ORDER BY seq")


def events(conn: db.Connection, job_id: str) -> list[str]:
    """Return the types of an ingest job's events, the first one first."""
    return column(
        conn, "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id", job_id
    )


def changing(what: str) -> Callable[[db.Connection, Row], None]:
    """Return what changes a job's row as `change` does."""
    return lambda conn, given: change(conn, given, what)


def change(conn: db.Connection, job: Row, what: str) -> None:
    """Change a job's row by a plain UPDATE; `what` is its SET clause."""
    table = "workflow_node_jobs" if "node_id" in job else "ingest_jobs"
    conn.execute(f"UPDATE {table} SET {what} WHERE id = %s".encode(), (job["id"],))


def one(conn: db.Connection, query: str, *values: Any) -> Any:
    """Return the first column of the single row of a test's query."""
    (row,) = conn.execute(query.encode(), values).fetchall()
    return next(iter(row.values()))


def column(conn: db.Connection, query: str, *values: Any) -> list[Any]:
    """Return the first column of each row of a test's query."""
    return [next(iter(row.values())) for row in conn.execute(query.encode(), values).fetchall()]


def execute(query: str, *values: Any) -> list[Row]:
    """Execute a statement on a connection of its own; return its rows."""
    with db.connect() as conn:
        cursor = conn.execute(query.encode(), values)
        return [] if cursor.description is None else cursor.fetchall()
