"""The outbox: what nodes became, waiting to be dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from queue_workflows import db
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


def promote_due(conn: db.Connection) -> int:
    """Let jobs and runs in whose time has come, which wakes workers and orchestrators; how many."""
    total = 0
    for statement in _PROMOTE:
        while (count := conn.execute(statement).rowcount) > 0:
            total += count
            if count < PROMOTED_A_STATEMENT:
                break
    return total


PROMOTED_A_STATEMENT = 1000
_PROMOTE = (
    "WITH due AS MATERIALIZED (SELECT id FROM workflow_node_jobs WHERE status = 'queued'"
    " AND blocked_reason = 'not_due' AND available_at <= now() ORDER BY available_at LIMIT 1000"
    " FOR UPDATE SKIP LOCKED) UPDATE workflow_node_jobs j"
    " SET blocked_reason = NULL, available_at = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM due))",
    "WITH due AS MATERIALIZED (SELECT id FROM ingest_jobs WHERE status = 'queued'"
    " AND blocked_reason = 'not_due' AND available_at <= now() ORDER BY available_at LIMIT 1000"
    " FOR UPDATE SKIP LOCKED) UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL"
    " WHERE j.id = ANY (ARRAY(SELECT id FROM due))",
    "WITH due AS MATERIALIZED (SELECT id FROM workflow_runs WHERE status = 'queued'"
    " AND mode = 'node' AND available_at <= now() ORDER BY available_at LIMIT 1000"
    " FOR UPDATE SKIP LOCKED)"
    " UPDATE workflow_runs SET available_at = NULL WHERE id = ANY (ARRAY(SELECT id FROM due))",
)


def runs_with_events(conn: db.Connection, limit: int, *, undefined: bool = True) -> list[str]:
    """Runs with events to dispatch, oldest first; `undefined`: without a definition too."""
    rows = conn.execute(
        "SELECT run_id FROM (SELECT id, run_id FROM workflow_dispatch_events"
        " WHERE processed_at IS NULL AND (available_at IS NULL OR available_at <= now())"
        " AND (%s OR EXISTS (SELECT FROM workflow_runs r WHERE r.id = run_id"
        " AND r.definition IS NOT NULL))"
        " ORDER BY id LIMIT 5000) open GROUP BY run_id ORDER BY min(id) LIMIT %s",
        (undefined, limit),
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
        "UPDATE workflow_dispatch_events SET attempts = attempts + 1, error = %s,"
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
