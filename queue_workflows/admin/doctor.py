"""Collect the facts that `doctor` and `connect` check: the server, the schema, waiting work."""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from psycopg import errors, pq

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

RENEWED = {
    "workflow_node_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "ingest_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "workers": ["last_seen", "state", "job_ids", "detail"],
}
"""The columns that each renewal writes, by table."""
HOT_TABLES = [*RENEWED, "workflow_runs", "workflow_dispatch_events", "worker_heartbeats"]
"""The tables whose rows are updated often."""
_COUNTED = 10_000


def driver() -> tuple[str, str, int]:
    """Return psycopg's version, its implementation (`c`, `binary`, `python`), libpq's version."""
    return psycopg.__version__, pq.__impl__, pq.version()


def python_version() -> str:
    """Return the version of this interpreter, such as `3.11.7`."""
    return ".".join(map(str, sys.version_info[:3]))


def reason(error: db.Error) -> str:
    """Return the server's sentence with the reason why it refused a statement."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__


def is_undefined(error: db.Error) -> bool:
    """Return whether a statement named a function, table or column that the database lacks."""
    undefined = errors.UndefinedFunction, errors.UndefinedTable, errors.UndefinedColumn
    return isinstance(error, undefined)


def _one(conn: db.Connection, query: bytes, values: dict[str, Any] | None = None) -> Row:
    row = conn.execute(query, values).fetchone()
    assert row is not None
    return row


# --- the server --------------------------------------------------------------------------------


def server(conn: db.Connection) -> Row:
    """Return version_num, version, standby (it replays another server's log), read_only, role."""
    return _one(conn, statements.doctor.server)


def clock(conn: db.Connection) -> Any:
    """Return the server's clock, with a time zone."""
    return _one(conn, statements.doctor.clock)["now"]


def is_pooled(conn: db.Connection) -> bool:
    """Return whether a pooler answers: another process than the announced one executes."""
    return _one(conn, statements.doctor.backend_pid)["pid"] != conn.info.backend_pid


def settings(conn: db.Connection, names: list[str]) -> dict[str, str]:
    """Return settings as they are in force for this role and database."""
    rows = conn.execute(statements.doctor.settings, {"names": names}).fetchall()
    return {row["name"]: row["setting"] for row in rows}


def notify(conn: db.Connection, channel: str) -> float:
    """Notify a channel; return how full the server's queue of notifications is, 0 to 1."""
    conn.execute(statements.doctor.notify, {"channel": channel})
    return float(_one(conn, statements.doctor.notification_queue_usage)["used"])


def transactions(conn: db.Connection) -> list[Row]:
    """Return the oldest five transactions of this database except this one: what, age_s, idle_s.

    `what` names the backend or the prepared transaction; `idle_s` is None unless it is idle inside
    the transaction.
    """
    return conn.execute(statements.doctor.transactions).fetchall()


def connections(conn: db.Connection) -> Row:
    """Return how many connections are `used` and `allowed`."""
    return _one(conn, statements.doctor.connections)


# --- the schema --------------------------------------------------------------------------------


def schema_seen(conn: db.Connection) -> Row:
    """Return how this role sees the schema: found, readable, elsewhere, role, schema, may_create.

    `found`: its ledger is on the search path. `elsewhere`: schemas with a ledger that the path or
    a missing USAGE hides. `role` and `schema` are quoted as SQL needs them.
    """
    return _one(conn, statements.doctor.schema_seen)


def schema_version(conn: db.Connection) -> tuple[int, int]:
    """Return the schema's version, and the oldest version of the code that may work on it."""
    row = _one(conn, statements.doctor.schema_version)
    return row["version"], row["needs"]


# --- work that waits ---------------------------------------------------------------------------


def machines(conn: db.Connection) -> list[str]:
    """Return the hosts that had a worker of nodes within the last day."""
    return [row["host_label"] for row in conn.execute(statements.doctor.machines).fetchall()]


def outbox(conn: db.Connection) -> Row:
    """Return lag_s of the oldest event that is due and open, its run_id and error; or all None."""
    row = conn.execute(statements.doctor.outbox).fetchone()
    return row or {"lag_s": None, "run_id": None, "error": None}


def waiting_runs(conn: db.Connection) -> Row:
    """Return the longest wait_s of a run that is due and not started (or None), and its run_id.

    `others`: whether a run that runs now was started within the last minute.
    """
    row = conn.execute(statements.doctor.waiting_runs).fetchone()
    return row or {"wait_s": None, "run_id": None, "others": False}


def stalled_runs(conn: db.Connection, quiet_s: float) -> Row:
    """Return how many running runs nothing has moved forward for `quiet_s` (n), and one run_id."""
    return _one(conn, statements.doctor.stalled_runs, {"quiet_s": quiet_s})


def lapsed(conn: db.Connection) -> Row:
    """Return how many running jobs have a lapsed lease (n), and the longest lapse (since_s)."""
    return _one(conn, statements.doctor.lapsed)


def unserved(conn: db.Connection, stale_s: float) -> list[Row]:
    """Return the queues with due jobs that no live worker takes: queue, n, wait_s, alive.

    `n` counts up to 10,000 jobs. `wait_s` is the age of the first in line. `alive` is how many
    workers are there and take no jobs (parked, draining, paused).
    """
    given = {"stale_s": stale_s, "counted": _COUNTED}
    return conn.execute(statements.doctor.unserved, given).fetchall()


def missing_versions(conn: db.Connection, stale_s: float, *, listed: int) -> list[Row]:
    """Return versions of nodes that due jobs need and no live worker has.

    Rows: queue, version, up to three of the jobs, wait_s of the first.
    """
    given = {"stale_s": stale_s, "listed": listed}
    return conn.execute(statements.doctor.missing_versions, given).fetchall()


def dead_workers(conn: db.Connection, stale_s: float) -> list[str]:
    """Return `host queue` of heartbeats flagged dead, and of silent workers with running jobs."""
    rows = conn.execute(statements.doctor.dead_workers, {"stale_s": stale_s}).fetchall()
    return [row["who"] for row in rows]


def alerts(conn: db.Connection) -> Row:
    """Return how many failures wait to be sent (n), the longest wait_s, and a sender's seen_s.

    Times in seconds; None: nothing waits, and no sender was ever there.
    """
    return _one(conn, statements.doctor.alerts)


# --- tables that get slow ----------------------------------------------------------------------


def table_statistics(conn: db.Connection) -> list[Row]:
    """Return for each of HOT_TABLES: name, dead, live, updates, hot, inserts, vacuum_off."""
    return conn.execute(statements.doctor.table_statistics, {"tables": HOT_TABLES}).fetchall()


def indexes_on_renewed(conn: db.Connection) -> list[str]:
    """Return the indexes over a RENEWED column; they keep renewals from being HOT updates."""
    pairs = [(table, column) for table, columns in RENEWED.items() for column in columns]
    given = {"tables": [table for table, _ in pairs], "columns": [column for _, column in pairs]}
    rows = conn.execute(statements.doctor.indexes_on_renewed, given).fetchall()
    return [row["name"] for row in rows]
