"""People's answers to input nodes, on their way in."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.types import Row

# A `claimed_at` in the future was never written by a claim: the row would be kept for ever.
_DUE = (
    "(status = 'pending' OR (status = 'processing' AND coalesce(claimed_at, created_at)"
    " NOT BETWEEN now() - %(after)s * interval '1 second' AND now() + interval '1 day'))"
    " AND (available_at IS NULL OR available_at <= now())"
)
_NEXT = (
    "SELECT id FROM workflow_input_submissions WHERE " + _DUE + " AND id <> ALL (%(aside)s)"
    " ORDER BY created_at, id LIMIT 1 FOR UPDATE SKIP LOCKED"
)
_CLAIM = (
    "WITH next AS MATERIALIZED (SELECT id FROM workflow_input_submissions"
    " WHERE id = %(id)s AND " + _DUE + " FOR UPDATE SKIP LOCKED)"
    " UPDATE workflow_input_submissions s SET status = 'processing', claimed_at = now(),"
    " attempts = least(greatest(s.attempts, 0), 999999) + 1"
    " WHERE s.id = (SELECT id FROM next) RETURNING s.*"
)


def insert(conn: db.Connection, run_id: str, node_id: str, value_json: str) -> Row | None:
    """A pending answer; None when the node has one in flight already."""
    return conn.execute(
        "INSERT INTO workflow_input_submissions (run_id, node_id, value) VALUES (%s, %s, %s::jsonb)"
        " ON CONFLICT (run_id, node_id) WHERE status IN ('pending', 'processing') DO NOTHING"
        " RETURNING *",
        (run_id, node_id, value_json),
    ).fetchone()


def next_due(conn: db.Connection, reclaim_after_s: float, aside: list[str]) -> str | None:
    """Return the id of the oldest answer that is due and nobody holds, without `aside`; or None.

    One that was left `processing` longer than `reclaim_after_s` is due again.
    """
    row = conn.execute(_NEXT, {"after": reclaim_after_s, "aside": aside}).fetchone()
    return row["id"] if row else None


def claim(conn: db.Connection, submission_id: str, reclaim_after_s: float) -> Row | None:
    """Take a due answer, its row locked until the transaction ends; None: another has it."""
    return conn.execute(_CLAIM, {"id": submission_id, "after": reclaim_after_s}).fetchone()


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
    """Try a claimed answer again later; its claim does not count as an attempt."""
    conn.execute(
        "UPDATE workflow_input_submissions SET status = 'pending', error = %s,"
        " attempts = greatest(attempts, 1) - 1,"
        " available_at = now() + %s * interval '1 second' WHERE id = %s",
        (error, after_s, submission_id),
    )


def count_failure(conn: db.Connection, submission_id: str, *, error: str, after_s: float) -> int:
    """Count a failed attempt and let the answer rest; how many have failed, 0 if it is over."""
    row = conn.execute(
        "UPDATE workflow_input_submissions SET status = 'pending', error = %s,"
        " attempts = least(greatest(attempts, 0), 999999) + 1,"
        " available_at = now() + %s * interval '1 second'"
        " WHERE id = %s AND status IN ('pending', 'processing') RETURNING attempts",
        (error, after_s, submission_id),
    ).fetchone()
    return row["attempts"] if row else 0
