"""The DAG walk: start a run, drain its outbox, park and resume input nodes, cancel and retry.

Every decision is one transaction under the run's row lock: effects, and the events that caused them
closed. Host hooks (providers, a host's ref resolver, widget builders) run between transactions.
"""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag.answers import meant as meant_answer
from queue_workflows.dag.answers import options as answer_options
from queue_workflows.dispatch import advance, inputs
from queue_workflows.dispatch.drain import RUNS_A_ROUND, drain_outbox, drain_run
from queue_workflows.dispatch.fast_path import note as note_completed
from queue_workflows.dispatch.fast_path import plan_from_result as look_ahead
from queue_workflows.dispatch.hooks import HookFailed, NoProvider
from queue_workflows.dispatch.inputs import (
    answer_delta,
    resolve_inputs_for_job,
    submit_input,
    submit_input_async,
)
from queue_workflows.dispatch.operations import (
    cancel_job,
    cancel_run,
    cancel_run_async,
    retry_job,
    retry_run,
    retry_run_async,
)
from queue_workflows.dispatch.run_cache import Begin, forget, on_connection, reading
from queue_workflows.dispatch.starts import start_queued, start_run
from queue_workflows.engine import input_answers, nodes, runs

__all__ = [
    "RUNS_A_ROUND",
    "Begin",
    "HookFailed",
    "NoProvider",
    "answer_delta",
    "answer_options",
    "cancel_job",
    "cancel_run",
    "cancel_run_async",
    "drain_outbox",
    "drain_run",
    "forget",
    "look_ahead",
    "meant_answer",
    "note_completed",
    "on_connection",
    "on_node_awaiting_input",
    "on_node_completed",
    "on_node_failed",
    "reading",
    "resolve_inputs_for_job",
    "resume_after_input",
    "retry_job",
    "retry_run",
    "retry_run_async",
    "start_queued",
    "start_run",
    "submit_input",
    "submit_input_async",
]

_log = logging.getLogger(__name__)


def on_node_completed(run_id: str, node_id: str) -> int:
    """Queue what became ready by this node, and complete the run if it was the last; new rows.

    The node's row is the truth: 0 when it is not completed or skipped, or the run is not live.
    """
    with db.transaction() as conn:
        if not nodes.done_among(conn, run_id, [node_id]):
            return 0
    return advance.advance(db.transaction, run_id, [node_id], expected=advance.is_live) or 0


def on_node_failed(run_id: str, node_id: str) -> int:
    """Fail the run, which cancels its waiting nodes; 0, since a failure makes no rows."""
    with db.transaction() as conn:
        runs.lock(conn, run_id)
        job = nodes.get_by_node(conn, run_id, node_id)
        if job is not None and job["status"] == "failed":
            runs.fail(conn, run_id, advance.node_failure(node_id, job["error"]))
    return 0


def on_node_awaiting_input(run_id: str, node_id: str) -> int:
    """Store what the parked node asks for as its `input_spec`; 0, since parking makes no rows."""
    inputs.ask(db.transaction, run_id, node_id)
    return 0


def resume_after_input(run_id: str, node_id: str, value: Any = None) -> int:
    """Complete a waiting input node with `{target: value}` and go on; how many new rows.

    0 when it no longer waits, and when the outbox has to bring the run on later. Raises
    `UnknownJob` (a KeyError) for no such node, and `InvalidPayload` before any write.
    """
    with db.transaction() as conn:
        job = nodes.get_by_node(conn, run_id, node_id)
        if job is None:
            raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}")
        if input_answers.complete_node(conn, job["id"], answer_delta(job, value)) is None:
            return 0
    try:
        return drain_run(run_id)
    except errors.QueueWorkflowsError as error:
        _log.warning("run %s goes on by its outbox: %s", run_id, error)
        return 0
