"""The outbox: what nodes became, waiting to be dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psycopg import sql

from queue_workflows import db
from queue_workflows.engine import poison, row_isolation
from queue_workflows.types import Row


class Pending(NamedTuple):
    """What there is to do, seen in one look."""

    runs: bool
    events: bool
    submissions: bool
    due: bool
    """Something delayed has become due."""


def look(conn: db.Connection) -> Pending:
    """Whether there is anything to start, dispatch, answer or promote; one cheap statement."""
    row = conn.execute(
        "SELECT EXISTS (SELECT FROM workflow_runs WHERE status = 'queued' AND mode = 'node'"
        " AND available_at IS NULL) AS runs,"
        " EXISTS (SELECT FROM workflow_dispatch_events WHERE processed_at IS NULL"
        " AND (available_at IS NULL OR available_at <= now())) AS events,"
        " EXISTS (SELECT FROM workflow_input_submissions WHERE status IN ('pending', 'processing')"
        " AND (available_at IS NULL OR available_at <= now())) AS submissions,"
        " EXISTS (SELECT FROM workflow_node_jobs WHERE status = 'queued'"
        " AND blocked_reason IS NOT NULL AND available_at <= now())"
        " OR EXISTS (SELECT FROM ingest_jobs WHERE status = 'queued' AND blocked_reason IS NOT NULL"
        " AND available_at <= now())"
        " OR EXISTS (SELECT FROM workflow_runs WHERE status = 'queued' AND mode = 'node'"
        " AND available_at <= now()) AS due",
        prepare=True,
    ).fetchone()
    assert row is not None
    return Pending(row["runs"], row["events"], row["submissions"], row["due"])


def promote_due(conn: db.Connection, rows: row_isolation.Isolation | None = None) -> int:
    """Let jobs and runs in whose time has come, which wakes workers and orchestrators; how many.

    A row that raises is set aside in `rows` (None: for this call), and the others go on.
    """
    kept = rows or row_isolation.Isolation()
    total = 0
    for duty in PROMOTIONS:
        while done := kept.batch(conn, duty):
            total += len(done)
            if len(done) < row_isolation.PICKED:
                break
    return total


_JOBS_DUE = sql.SQL("status = 'queued' AND blocked_reason = 'not_due' AND available_at <= now()")
_RUNS_DUE = sql.SQL("status = 'queued' AND mode = 'node' AND available_at <= now()")
_LET_JOBS_IN = sql.SQL("blocked_reason = NULL, available_at = NULL")
_LET_RUNS_IN = sql.SQL("available_at = NULL")
_CHANGE = (
    " UPDATE {table} j SET {change} WHERE j.id = ANY (ARRAY(SELECT id FROM due)) RETURNING j.id"
)
_PROMOTE = (
    sql.SQL(
        "WITH due AS MATERIALIZED (SELECT id FROM {table} WHERE {due} ORDER BY available_at"
        " LIMIT 1000 FOR UPDATE SKIP LOCKED)" + _CHANGE
    ),
    sql.SQL(
        "SELECT id FROM {table} WHERE {due} AND id <> ALL (%(aside)s::text[])"
        " ORDER BY available_at LIMIT 1000"
    ),
    sql.SQL(
        "WITH due AS MATERIALIZED (SELECT id FROM {table} WHERE id = ANY (%(ids)s::text[])"
        " AND ({due}) IS TRUE"
        " FOR UPDATE SKIP LOCKED)" + _CHANGE
    ),
)


def _promotion(
    table: str, due: sql.SQL, change: sql.SQL, rest: row_isolation.Ending
) -> row_isolation.Duty:
    many, picked, some = (
        text.format(table=sql.Identifier(table), due=due, change=change).as_bytes(None)
        for text in _PROMOTE
    )
    return row_isolation.Duty(f"promotion of {table}", many, picked, some, rest)


PROMOTIONS = (
    _promotion("workflow_node_jobs", _JOBS_DUE, _LET_JOBS_IN, poison.node_job),
    _promotion("ingest_jobs", _JOBS_DUE, _LET_JOBS_IN, poison.ingest_job),
    _promotion("workflow_runs", _RUNS_DUE, _LET_RUNS_IN, poison.run),
)


def runs_with_events(
    conn: db.Connection, limit: int, *, undefined: bool = True, aside: Sequence[str] = ()
) -> list[str]:
    """Runs with events to dispatch, oldest first; `undefined`: without a definition too.

    `aside`: ids of runs to leave out.
    """
    rows = conn.execute(
        "SELECT run_id FROM (SELECT id, run_id FROM workflow_dispatch_events"
        " WHERE processed_at IS NULL AND (available_at IS NULL OR available_at <= now())"
        " AND (%s OR EXISTS (SELECT FROM workflow_runs r WHERE r.id = run_id"
        " AND r.definition IS NOT NULL)) AND run_id <> ALL (%s)"
        " ORDER BY id LIMIT 5000) open GROUP BY run_id ORDER BY min(id) LIMIT %s",
        (undefined, list(aside), limit),
        prepare=True,
    ).fetchall()
    return [row["run_id"] for row in rows]


def open_events(conn: db.Connection, run_id: str, limit: int, only: int | None = None) -> list[Row]:
    """A run's open events (`only`: that one), oldest first.

    Each with `node_status` and `node_error`, its node's.
    """
    return conn.execute(
        "SELECT e.id, e.node_id, e.kind, e.attempts, j.status AS node_status, j.error AS node_error"
        " FROM workflow_dispatch_events e"
        # LIMIT 1 keeps it a look-up per event: a join may read every version of the run's rows.
        " LEFT JOIN LATERAL (SELECT status, error FROM workflow_node_jobs"
        " WHERE run_id = e.run_id AND node_id = e.node_id LIMIT 1) j ON true"
        " WHERE e.run_id = %s AND e.processed_at IS NULL AND (%s::bigint IS NULL OR e.id = %s)"
        " AND (e.available_at IS NULL OR e.available_at <= now()) ORDER BY e.id LIMIT %s",
        (run_id, only, only, limit),
        prepare=True,
    ).fetchall()


def processed(conn: db.Connection, event_ids: Sequence[int], error: str | None = None) -> None:
    """Close events; with `error` they are poison."""
    conn.execute(
        "UPDATE workflow_dispatch_events SET processed_at = now(), error = coalesce(%s, error)"
        " WHERE id = ANY (%s)",
        (error, list(event_ids)),
        prepare=True,
    )


def postpone(conn: db.Connection, event_id: int, *, error: str, after_s: float) -> int:
    """Count a failed dispatch and let the event rest; how many have failed."""
    row = conn.execute(
        "UPDATE workflow_dispatch_events SET error = %s,"
        " attempts = least(greatest(attempts, 0), 32000) + 1,"
        " available_at = now() + %s * interval '1 second' WHERE id = %s AND processed_at IS NULL"
        " RETURNING attempts",
        (error, after_s, event_id),
    ).fetchone()
    return row["attempts"] if row else 0


def unprocessed(conn: db.Connection, limit: int) -> list[Row]:
    """Open events, oldest first."""
    return conn.execute(
        "SELECT * FROM workflow_dispatch_events WHERE processed_at IS NULL ORDER BY id LIMIT %s",
        (limit,),
    ).fetchall()


def count_unprocessed(conn: db.Connection) -> int:
    """How many events are open."""
    row = conn.execute(
        "SELECT count(*) AS n FROM workflow_dispatch_events WHERE processed_at IS NULL"
    ).fetchone()
    return row["n"] if row else 0
