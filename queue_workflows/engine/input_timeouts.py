"""End the waits of input nodes that nobody answered in time.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import input_answers
from queue_workflows.types import Row


def next_overdue(conn: db.Connection, aside: list[str]) -> str | None:
    """Return the job of the oldest wait that is over and nobody holds, without `aside`; or None."""
    parameters = {"set_aside": aside}
    row = conn.execute(statements.input_timeouts.next_overdue, parameters, prepare=True).fetchone()
    return row["job_id"] if row else None


def lock_overdue(conn: db.Connection, job_id: str) -> Row | None:
    """Lock a wait that is over until the transaction ends, and return its job.

    `answered`: an answer is in flight, or is being submitted; `over`: the job does not wait any
    more, or waits again. Returns None if the wait is not over, or another transaction holds it.
    """
    parameters = {"job": job_id}
    wait = conn.execute(statements.input_timeouts.lock_wait, parameters, prepare=True)
    if wait.fetchone() is None:
        return None
    # Before the statement that reads answers: `submit_input` holds the row of the job from the
    # insert of its answer to its commit.
    locked = conn.execute(statements.input_timeouts.lock_job_if_free, parameters, prepare=True)
    free = {"free": locked.fetchone() is not None}
    return conn.execute(
        statements.input_timeouts.overdue, parameters | free, prepare=True
    ).fetchone()


def extend_wait(conn: db.Connection, job_id: str, more_s: float) -> None:
    """Let a job's wait end `more_s` seconds from now."""
    conn.execute(statements.input_timeouts.extend_wait, {"job": job_id, "more_s": more_s})


def end_wait(conn: db.Connection, job_id: str) -> None:
    """Forget a job's wait."""
    conn.execute(statements.input_timeouts.end_wait, {"job": job_id})


def time_out(conn: db.Connection, job_id: str, *, default: str | None, error: str) -> Row | None:
    """Complete a job with `default` (a `context_delta` as JSON text), or fail it with `error`.

    Returns its row, or None if it does not wait any more: the first answer has won.
    """
    if default is not None:
        return input_answers.complete_node(conn, job_id, default, by="timeout")
    parameters = {"job": job_id, "error": error}
    return conn.execute(statements.input_timeouts.fail_node, parameters).fetchone()
