"""Store a node's inputs or its question, or cancel a run's queued nodes, without a claim.

Each function is one transaction.
"""

from __future__ import annotations

from typing import Any, cast

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.types import NodeJob


def set_resolved_inputs(job_id: str, inputs: dict[str, Any]) -> NodeJob | None:
    """Store what a node received; return its row, or None. Raises `InvalidPayload`."""
    text = payload.encode(inputs, "resolved_inputs")
    with db.transaction() as conn:
        return cast(
            "NodeJob | None", statements.nodes.set_resolved_inputs(conn, job=job_id, inputs=text)
        )


def set_input_spec(run_id: str, node_id: str, spec: dict[str, Any]) -> NodeJob | None:
    """Store the question of an input node; return its row, or None. Raises `InvalidPayload`."""
    text = payload.encode(spec, "input_spec")
    with db.transaction() as conn:
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        return cast(
            "NodeJob | None",
            statements.nodes.set_input_spec(conn, job=job["id"], spec=text) if job else None,
        )


def cancel_queued_nodes(run_id: str) -> int:
    """Cancel the queued nodes of a run and leave the run as it is; return how many."""
    with db.transaction() as conn:
        return len(statements.cancellation.cancel_queued_nodes(conn, run_id=run_id))
