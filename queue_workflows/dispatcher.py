"""Keep the 0.3.0 functions of the dispatcher: start a run, and dispatch after a node's event."""

from __future__ import annotations

from typing import Any

from queue_workflows.dispatch import callbacks, job_inputs, starts
from queue_workflows.types import Row


def start_run(run_id: str) -> int:
    """Start a queued run; return the number of new rows, 0 if it was started before."""
    return starts.start_run(run_id)


def on_node_completed(run_id: str, node_id: str) -> int:
    """Queue the nodes that a node made ready, or complete the run; return the new rows' number."""
    return callbacks.on_node_completed(run_id, node_id)


def on_node_failed(run_id: str, node_id: str) -> int:
    """Fail the run of a failed node, which cancels its waiting nodes; return 0."""
    return callbacks.on_node_failed(run_id, node_id)


def on_node_awaiting_input(run_id: str, node_id: str) -> int:
    """Store the question of a parked node as its `input_spec`; return 0."""
    return callbacks.on_node_awaiting_input(run_id, node_id)


def resume_after_input(run_id: str, node_id: str, value: Any = None) -> int:
    """Complete a waiting input node with `{target: value}` and dispatch; return the new rows.

    Raises `UnknownJob` (a KeyError) for no such node; returns 0 if it no longer waits.
    """
    return callbacks.resume_after_input(run_id, node_id, value)


def resolve_inputs_for_job(job_id: str, *, job: Row | None = None) -> dict[str, Any]:
    """Return a job's inputs, resolved once against the run's context as it is now."""
    return job_inputs.resolve_inputs_for_job(job_id, job=job)
