"""Collect the facts that `doctor` and `connect` check: the server, the schema, waiting work."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple, cast

import psycopg
from psycopg import errors, pq

from queue_workflows import db
from queue_workflows.claim import job_tables
from queue_workflows.db import statements

RENEWED = {
    "workflow_node_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "ingest_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "workers": ["last_seen", "state", "job_ids", "detail"],
}
"""The columns that each renewal writes, by table."""
HOT_TABLES = [*RENEWED, "workflow_runs", "workflow_dispatch_events", "worker_heartbeats"]
"""The tables whose rows are updated often."""
LATE_S = 60
"""A row that is due for so long was tried several times: sweeps come every few seconds."""
EXAMINED = 20_000
"""Live rows of a table whose payloads and times are read; more would make it a slow command."""


def driver() -> tuple[str, str, int]:
    """Return psycopg's version, its implementation (`c`, `binary`, `python`), libpq's version."""
    return psycopg.__version__, pq.__impl__, pq.version()


def reason(error: db.Error) -> str:
    """Return the server's sentence with the reason why it refused a statement."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__


def is_undefined(error: db.Error) -> bool:
    """Return whether a statement named a function, table or column that the database lacks."""
    undefined = errors.UndefinedFunction, errors.UndefinedTable, errors.UndefinedColumn
    return isinstance(error, undefined)


def settings(conn: db.Connection, names: list[str]) -> dict[str, str]:
    """Return settings as they are in force for this role and database."""
    return {row["name"]: row["setting"] for row in statements.doctor.settings(conn, names=names)}


def notify(conn: db.Connection, channel: str) -> float:
    """Notify a channel; return how full the server's queue of notifications is, 0 to 1."""
    statements.doctor.notify(conn, channel=channel)
    return float(statements.doctor.notification_queue_usage(conn))


def indexes_on_renewed(conn: db.Connection) -> list[str]:
    """Return the indexes over a RENEWED column; they keep renewals from being HOT updates."""
    pairs = [(table, column) for table, columns in RENEWED.items() for column in columns]
    return [
        row["name"]
        for row in statements.doctor.indexes_on_renewed(
            conn, tables=[table for table, _ in pairs], columns=[column for _, column in pairs]
        )
    ]


# --- bad rows ----------------------------------------------------------------------------------


class BadRow(NamedTuple):
    """A row, its fault in a sentence, and the command that ends or removes it."""

    kind: str
    id: str
    text: str
    command: str


def stuck_rows(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return rows that keep failing or are blocked as `set_aside`, at most `limit` of a kind."""
    return _found(conn, "stuck_", limit)


def rows_out_of_range(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return live rows with unusable times, counters or payloads, of EXAMINED of each table."""
    return _found(conn, "out_of_range_", limit)


def _found(conn: db.Connection, prefix: str, limit: int) -> list[BadRow]:
    """Return the rows that the statements of this prefix find: ingest jobs, or rows of a run."""
    found: list[BadRow] = []
    for name, query in vars(statements.bad_rows).items():
        if not name.startswith(prefix):
            continue
        of_tables = cast("dict[str, Any]", query) if isinstance(query, dict) else {"": query}
        for table, of_table in reversed(of_tables.items()):
            kind, command = "run", "cancel"
            if table == job_tables.INGEST_JOBS.name:
                kind, command = "job", "jobs cancel" if "lapsed" in name else "jobs delete"
            for row in of_table(conn, limit=limit, late_s=LATE_S, examined=EXAMINED):
                # The id is one word of a shell command; the display escapes control characters.
                words = f"queue-workflows {command} {shlex.quote(row['id'])}"
                found.append(BadRow(kind, row["id"], row["text"], words))
    return found
