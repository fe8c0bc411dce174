"""People's answers to input nodes, on their way in."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.types import Row

_CLAIM = (
    "WITH next AS MATERIALIZED (SELECT id FROM workflow_input_submissions"
    " WHERE (status = 'pending' OR (status = 'processing'"
    " AND coalesce(claimed_at, created_at) < now() - %s * interval '1 second'))"
    " AND (available_at IS NULL OR available_at <= now())"
    " ORDER BY created_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)"
    " UPDATE workflow_input_submissions s SET status = 'processing', claimed_at = now(),"
    " attempts = s.attempts + 1 WHERE s.id = (SELECT id FROM next) RETURNING s.*"
)


def insert(conn: db.Connection, run_id: str, node_id: str, value_json: str) -> Row | None:
    """A pending answer; None when the node has one in flight already."""
    return conn.execute(
        "INSERT INTO workflow_input_submissions (run_id, node_id, value) VALUES (%s, %s, %s::jsonb)"
        " ON CONFLICT (run_id, node_id) WHERE status IN ('pending', 'processing') DO NOTHING"
        " RETURNING *",
        (run_id, node_id, value_json),
    ).fetchone()


def claim(conn: db.Connection, reclaim_after_s: float) -> Row | None:
    """The oldest answer to process, its row locked until the transaction ends, or None.

    One that was left `processing` longer than `reclaim_after_s` is taken back.
    """
    return conn.execute(_CLAIM, (reclaim_after_s,)).fetchone()


def processed(conn: db.Connection, submission_id: str) -> None:
    """The answer is in the node."""
    conn.execute(
        "UPDATE workflow_input_submissions SET status = 'processed', processed_at = now(),"
        " error = NULL WHERE id = %s",
        (submission_id,),
    )


def refuse(conn: db.Connection, submission_id: str, error: str) -> None:
    """The answer cannot be taken; `error` says why."""
    conn.execute(
        "UPDATE workflow_input_submissions SET status = 'failed', processed_at = now(), error = %s"
        " WHERE id = %s",
        (error, submission_id),
    )


def postpone(conn: db.Connection, submission_id: str, *, after_s: float, error: str | None) -> None:
    """Try again later."""
    conn.execute(
        "UPDATE workflow_input_submissions SET status = 'pending', error = %s,"
        " available_at = now() + %s * interval '1 second' WHERE id = %s",
        (error, after_s, submission_id),
    )
