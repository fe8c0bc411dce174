"""Keep the 0.3.0 functions of the dispatcher: start a run, and dispatch after a node's event."""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import db, errors, node_executor
from queue_workflows.dag import plan
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, drain, input_nodes

_log = logging.getLogger(__name__)
resolve_inputs_for_job = node_executor.resolve_inputs_for_job


def start_run(run_id: str) -> int:
    """Start a queued run; return the number of new rows, 0 if it was started before."""
    return advance.start_run(run_id)


def on_node_completed(run_id: str, node_id: str) -> int:
    """Queue the nodes that a node made ready, or complete the run; return the new rows' number.

    Returns 0 if the node's row is not completed or skipped, or if the run is not running.
    """
    with db.transaction() as conn:
        done = [*plan.DONE]
        if not statements.nodes.among(conn, run_id=run_id, nodes=[node_id], statuses=done):
            return 0
    return advance.plan_and_write(db.transaction, run_id, [node_id], expected=advance.is_live) or 0


def on_node_failed(run_id: str, node_id: str) -> int:
    """Fail the run of a failed node, which cancels its waiting nodes; return 0."""
    with db.transaction() as conn:
        statements.runs.lock(conn, run_id=run_id)
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        if job is not None and job["status"] == "failed":
            reason = advance.node_failure(node_id, job["error"])
            statements.runs.fail(conn, run_id=run_id, error=reason)
    return 0


def on_node_awaiting_input(run_id: str, node_id: str) -> int:
    """Store the question of a parked node as its `input_spec`; return 0."""
    input_nodes.store_question(db.transaction, run_id, node_id)
    return 0


def resume_after_input(run_id: str, node_id: str, value: Any = None) -> int:
    """Complete a waiting input node with `{target: value}` and dispatch; return the new rows.

    Returns 0 if the node no longer waits, and if the outbox has to dispatch later. Raises
    `UnknownJob` (a KeyError) for no such node, and `InvalidPayload` before any write.
    """
    with db.transaction() as conn:
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        if job is None:
            raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}")
        delta = input_nodes.answer_delta(job, value)
        complete_node = statements.input_answers.complete_node
        if complete_node(conn, job=job["id"], result=delta, by="input") is None:
            return 0
    try:
        return drain.drain_run(run_id)
    except errors.QueueWorkflowsError as error:
        _log.warning(
            "run %s is dispatched later, from the outbox: %s",
            run_id,
            error,
            extra={"run_id": run_id},
        )
        return 0
