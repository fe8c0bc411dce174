"""Submit people's answers to input nodes, claim them, and complete the nodes with them.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import nodes
from queue_workflows.types import Row


def submit(conn: db.Connection, run_id: str, node_id: str, value_json: str) -> Row | None:
    """Store an answer and return its row; None if another answer to the node is in flight."""
    parameters = {"run_id": run_id, "node_id": node_id, "value": value_json}
    return conn.execute(statements.input_answers.submit, parameters).fetchone()


def hold_node(conn: db.Connection, run_id: str, node_id: str) -> Row | None:
    """Return the job of a node, or None.

    Until this transaction ends, no other one ends the wait of the node by its time-out.
    """
    parameters = {"run_id": run_id, "node_id": node_id}
    conn.execute(statements.input_answers.hold_node, parameters)
    return nodes.get_by_node(conn, run_id, node_id)


def next_due(conn: db.Connection, reclaim_after_s: float, aside: list[str]) -> str | None:
    """Return the id of the oldest answer that is due and nobody holds, without `aside`; or None.

    An answer that was left `processing` longer than `reclaim_after_s` is due again.
    """
    parameters = {"after_s": reclaim_after_s, "set_aside": aside}
    row = conn.execute(statements.input_answers.next_due, parameters).fetchone()
    return row["id"] if row else None


def claim(conn: db.Connection, submission_id: str, reclaim_after_s: float) -> Row | None:
    """Claim a due answer and return its row, locked until the transaction ends.

    Returns None if another transaction has it.
    """
    parameters = {"id": submission_id, "after_s": reclaim_after_s}
    return conn.execute(statements.input_answers.claim, parameters).fetchone()


def complete_node(
    conn: db.Connection, job_id: str, context_delta: str, *, by: str = "input"
) -> Row | None:
    """Complete a node that waits for its answer; return its row, or None if it does not wait.

    `context_delta`: JSON text. `by`: what the event records as the value's origin, `input` for an
    answer, `timeout` for the default.
    """
    parameters = {"job": job_id, "result": context_delta, "by": by}
    return conn.execute(statements.input_answers.complete_node, parameters).fetchone()


def finish(conn: db.Connection, submission_id: str) -> None:
    """Record that the answer's node was completed with it."""
    conn.execute(statements.input_answers.finish, {"id": submission_id})


def refuse(conn: db.Connection, submission_id: str, error: str) -> None:
    """Record that the answer cannot be taken, and why."""
    conn.execute(statements.input_answers.refuse, {"id": submission_id, "error": error})


def postpone(conn: db.Connection, submission_id: str, *, after_s: float, error: str | None) -> None:
    """Make a claimed answer due again later; its claim does not count as an attempt."""
    parameters = {"id": submission_id, "after_s": after_s, "error": error}
    conn.execute(statements.input_answers.postpone, parameters)


def count_failure(conn: db.Connection, submission_id: str, *, error: str, after_s: float) -> int:
    """Count a failed attempt and make the answer due again later.

    Returns how many attempts have failed, 0 if the answer is over.
    """
    parameters = {"id": submission_id, "error": error, "after_s": after_s}
    row = conn.execute(statements.input_answers.count_failure, parameters).fetchone()
    return row["attempts"] if row else 0
