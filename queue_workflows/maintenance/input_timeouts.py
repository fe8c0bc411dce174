"""End the waits of input nodes that nobody answered in time: by their default, or as failed."""

from __future__ import annotations

import logging
from typing import Any, Final, cast

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.dispatch import input_nodes
from queue_workflows.engine import poison, row_isolation
from queue_workflows.runtime import log_context
from queue_workflows.types import Row, Unreadable

_log = logging.getLogger(__name__)
TIMEOUT: Final = "end of the wait of node job"
ANSWER_GRACE_S: Final = 5.0
"""How long an answer that came in time may still wait to be taken before the next check."""


def expire_inputs(
    conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> None:
    """Complete or fail every input node that is past its `timeout_s`, one transaction each.

    Rows that raise are set aside in `rows`; None: for this call only.
    """
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        while job_id := statements.input_timeouts.next_overdue(own, set_aside=kept.aside(TIMEOUT)):
            kept.attempt(
                TIMEOUT,
                job_id,
                lambda job_id=job_id: _end_wait(own, job_id),
                lambda error, failures, job_id=job_id: _give_up(own, job_id, error, failures),
            )


def lock_overdue(conn: db.Connection, job_id: str) -> Row | None:
    """Lock a wait that is over until the transaction ends, and return its job.

    `answered`: an answer is in flight, or is being submitted; `over`: the job does not wait any
    more, or waits again. Returns None if the wait is not over, or another transaction holds it.
    """
    if statements.input_timeouts.lock_wait(conn, job=job_id) is None:
        return None
    # Before the statement that reads answers: `submit_input` holds the row of the job from the
    # insert of its answer to its commit.
    free = statements.input_timeouts.lock_job_if_free(conn, job=job_id) is not None
    return statements.input_timeouts.overdue(conn, job=job_id, free=free)


def _end_wait(conn: db.Connection, job_id: str) -> None:
    with conn.transaction():
        job = lock_overdue(conn, job_id)
        if job is None:
            return
        if job["answered"] and not job["over"]:
            statements.input_timeouts.extend_wait(conn, job=job_id, more_s=ANSWER_GRACE_S)
            return
        if not job["over"]:
            _expire(conn, job)
        statements.input_timeouts.end_wait(conn, job=job_id)


def _give_up(conn: db.Connection, job_id: str, error: BaseException, failures: int) -> bool:
    """Fail a node whose wait could not be ended in too many tries; return whether it was failed."""
    with conn.transaction():
        if not poison.node_job(conn, job_id, error, failures):
            return False
        statements.input_timeouts.end_wait(conn, job=job_id)
        return True


def _expire(conn: db.Connection, job: Row) -> None:
    found: Any = job["policy"]
    policy = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    error = f"nobody answered within {_seconds_text(policy.get('timeout_s'))} s"
    default = None
    if isinstance(found, Unreadable):
        error = f"its policy cannot be read: {found.reason}"
    elif "default" in policy:
        try:
            default = input_nodes.answer_delta(job, policy["default"])
        except errors.InvalidPayload as refused:
            error = str(refused)
    error = payload.error_text(error)
    if default is not None:
        ended = statements.input_answers.complete_node(
            conn, job=job["id"], result=default, by="timeout"
        )
    else:
        ended = statements.input_timeouts.fail_node(conn, job=job["id"], error=error)
    if ended is not None:  # else the first answer has won
        effect = "takes its default" if default is not None else "fails"
        _log.warning(
            "node %s of run %s: %s; it %s",
            job["node_id"],
            job["run_id"],
            error,
            effect,
            extra=log_context.ids_of_job(job),
        )


def _seconds_text(seconds: object) -> str:
    """Return the text of a `timeout_s`, which a plain SQL writer may have set to anything."""
    if isinstance(seconds, (int, float)) and abs(seconds) < 1e300:
        return f"{seconds:g}"
    return f"{seconds!s:.80}"
