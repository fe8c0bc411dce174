"""Find the rows that the engine cannot work on: failing, blocked, unreadable or out of range."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from psycopg import sql

from queue_workflows import db
from queue_workflows.store import tables

LATE_S = 60
"""A row that is due for so long was tried several times: sweeps come every few seconds."""
LOOKED_AT = 20_000
"""Live rows of a table whose payloads and times are read; more would make it a slow command."""


class BadRow(NamedTuple):
    """A row, what is wrong with it in a sentence, and the command that ends or removes it."""

    kind: str
    id: str
    text: str
    command: str


# Times are compared only: nothing here is computed from a value that could be infinite.
_STUCK = (
    ("run", "cancel", sql.SQL("SELECT id, 'it could not start ' || start_attempts || ' times: '"
     " || coalesce(left(error, 300), '?') AS text FROM workflow_runs WHERE status = 'queued'"
     " AND mode = 'node' AND start_attempts <> 0")),
    ("run", "cancel", sql.SQL("SELECT id, 'its start is due and was not delayed' AS text"
     " FROM workflow_runs WHERE status = 'queued' AND mode = 'node' AND available_at <= {late}")),
    ("run", "cancel", sql.SQL("SELECT run_id AS id, 'the dispatch of ' || kind || ' of node '"
     " || node_id || ' failed ' || attempts || ' times: '"
     " || coalesce(left(error, 300), '?') AS text"
     " FROM workflow_dispatch_events WHERE processed_at IS NULL AND attempts <> 0")),
    ("run", "cancel", sql.SQL("SELECT run_id AS id, 'the answer ' || id || ' to node ' || node_id"
     " || ' was not taken in ' || attempts || ' tries: ' || coalesce(left(error, 300), '?')"
     " AS text FROM workflow_input_submissions WHERE status = 'pending' AND attempts <> 0"
     " AND error IS NOT NULL")),
    ("run", "cancel", sql.SQL("SELECT coalesce(j.run_id, t.job_id) AS id, 'the wait of node '"
     " || coalesce(j.node_id, '?') || ' is over and could not be ended' AS text"
     " FROM workflow_input_timeouts t LEFT JOIN workflow_node_jobs j ON j.id = t.job_id"
     " WHERE t.due_at <= {late}")),
    ("run", "cancel", sql.SQL("SELECT run_id AS id, 'node ' || node_id || ' is due and could not be"
     " promoted' AS text FROM workflow_node_jobs WHERE status = 'queued'"
     " AND blocked_reason = 'not_due' AND available_at <= {late}")),
    ("job", "jobs delete", sql.SQL("SELECT id, 'it is due and could not be promoted' AS text"
     " FROM ingest_jobs WHERE status = 'queued' AND blocked_reason = 'not_due'"
     " AND available_at <= {late}")),
    ("run", "cancel", sql.SQL("SELECT run_id AS id, 'node ' || node_id || ' is blocked as"
     " set_aside: the database refuses to run it and to fail it' AS text"
     " FROM workflow_node_jobs WHERE status = 'queued' AND blocked_reason = 'set_aside'")),
    ("job", "jobs delete", sql.SQL("SELECT id, 'it is blocked as set_aside: the database refuses"
     " to run it and to fail it' AS text FROM ingest_jobs"
     " WHERE status = 'queued' AND blocked_reason = 'set_aside'")),
    ("run", "cancel", sql.SQL("SELECT run_id AS id, 'the lapsed lease of node ' || node_id"
     " || ' could not be taken back' AS text FROM workflow_node_jobs WHERE status = 'running'"
     " AND lease_expires_at <= {late}")),
    ("job", "jobs cancel", sql.SQL("SELECT id, 'its lapsed lease could not be taken back' AS text"
     " FROM ingest_jobs WHERE status = 'running' AND lease_expires_at <= {late}")),
)  # fmt: skip
_TIMES = {
    "workflow_runs": ("created_at", "queued_at", "available_at", "started_at"),
    "workflow_node_jobs": ("created_at", "available_at", "started_at", "lease_expires_at"),
    "ingest_jobs": ("created_at", "available_at", "started_at", "lease_expires_at"),
    "workflow_input_submissions": ("created_at", "available_at", "claimed_at"),
}
_COUNTERS = {
    "workflow_runs": ("generation", "start_attempts"),
    "workflow_node_jobs": ("claim_no", "attempts", "crash_count", "generation"),
    "ingest_jobs": ("claim_no", "attempts", "crash_count", "generation"),
    "workflow_input_submissions": ("attempts",),
}
_PAYLOADS = {
    "workflow_runs": ("context", "definition"),
    "workflow_node_jobs": ("inputs", "input_template", "policy"),
    "ingest_jobs": ("args", "headers", "policy"),
    "workflow_input_submissions": ("value",),
}
_LIVE = {
    "workflow_runs": ("cancel", "id", sql.SQL("mode = 'node' AND status NOT IN"
                      " ('completed', 'failed', 'cancelled')")),
    "workflow_node_jobs": ("cancel", "run_id", sql.SQL("status IN"
                           " ('queued', 'running', 'awaiting_input')")),
    "ingest_jobs": ("jobs delete", "id", sql.SQL("status IN ('queued', 'running')")),
    "workflow_input_submissions": ("cancel", "run_id", sql.SQL("status IN"
                                   " ('pending', 'processing')")),
}  # fmt: skip
_BAD_TIME = sql.SQL(
    "WHEN t.{0} NOT BETWEEN '2000-01-01Z' AND '9999-12-31Z' THEN {1} || t.{0}::text"
)
_BAD_COUNTER = sql.SQL("WHEN t.{0} NOT BETWEEN 0 AND 1000000000 THEN {1} || t.{0}::text")
# A text this short holds neither 200 levels nor a number of 4,300 digits.
_BAD_PAYLOAD = sql.SQL(
    "WHEN octet_length(t.{0}::text) > 400 AND (jsonb_path_exists(t.{0}, 'strict $.**{{201}}')"
    " OR jsonb_path_exists(t.{0}, 'strict $.** ? (@ > 1e4299 || @ < -1e4299)')) THEN {1}"
)


def _range_query(table: str) -> sql.Composed:
    _, run, live = _LIVE[table]
    cases = [
        text.format(sql.Identifier(name), sql.Literal(f"{name}{what}"))
        for text, columns, what in (
            (_BAD_TIME, _TIMES, " is out of range: "),
            (_BAD_COUNTER, _COUNTERS, " is out of range: "),
            (_BAD_PAYLOAD, _PAYLOADS, " is nested too deep, or has a number of too many digits"),
        )
        for name in columns[table]
    ]
    return sql.SQL(
        "SELECT b.owner AS id, b.text FROM (SELECT t.{run} AS owner, CASE {cases} END AS text"
        " FROM (SELECT * FROM {table} WHERE {live} LIMIT {looked}) t) b WHERE b.text IS NOT NULL"
    ).format(
        run=sql.Identifier(run),
        cases=sql.SQL(" ").join(cases),
        table=sql.Identifier(table),
        live=live,
        looked=sql.Literal(LOOKED_AT),
    )


def stuck(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return rows that keep failing or are blocked as `set_aside`, at most `limit` of a kind."""
    late = sql.SQL("now() - interval '{} seconds'").format(sql.Literal(LATE_S))
    found: list[BadRow] = []
    for kind, command, text in _STUCK:
        query = sql.SQL("{} LIMIT {}").format(text.format(late=late), sql.Literal(limit))
        found += _rows(conn, kind, command, query)
    return found


def out_of_range(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return live rows with times, counters or payloads that cannot be used, at most `limit` each.

    Looks at LOOKED_AT live rows of a table.
    """
    found: list[BadRow] = []
    for table, (command, _, _) in _LIVE.items():
        query = sql.SQL("{} LIMIT {}").format(_range_query(table), sql.Literal(limit))
        found += _rows(conn, "job" if table == tables.INGEST_JOBS.name else "run", command, query)
    return found


def _rows(conn: db.Connection, kind: str, command: str, query: sql.Composed) -> list[BadRow]:
    return [
        BadRow(kind, row["id"], row["text"], f"queue-workflows {command} {_word(row['id'])}")
        for row in conn.execute(query).fetchall()
    ]


def _word(row_id: str) -> str:
    """Return an id as one word of a shell command; its control characters stay for the display."""
    return shlex.quote(row_id)
