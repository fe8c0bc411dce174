"""Record the outcome of a job for a caller that does not hold its claim.

Each function is one transaction. A node's change writes its outbox event in it.
"""

from __future__ import annotations

from typing import Any, cast

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, manual_changes
from queue_workflows.types import IngestJob, NodeJob, Row


def complete_node(
    job_id: str,
    *,
    context_delta: dict[str, Any] | None,
    seconds: float | None,
    rss_mb: int | None,
) -> NodeJob | None:
    """Complete a node job; return its row, or None if it was over. Raises `InvalidPayload`."""
    text = payload.encode(context_delta or {}, "context_delta")
    with db.transaction() as conn:
        return cast(
            "NodeJob | None",
            manual_changes.complete(
                conn, job_tables.NODE_JOBS, job_id, result=text, seconds=seconds, rss_mb=rss_mb
            ),
        )


def complete_ingest_job(job_id: str, *, result: Any, seconds: float | None) -> IngestJob | None:
    """Complete an ingest job; return its row, or None if it was over. Raises `InvalidPayload`."""
    text = payload.encode(result, "result")
    with db.transaction() as conn:
        return cast(
            "IngestJob | None",
            manual_changes.complete(
                conn, job_tables.INGEST_JOBS, job_id, result=text, seconds=seconds
            ),
        )


def fail_node(job_id: str, *, error: str, seconds: float | None) -> NodeJob | None:
    """Fail a node job; return its row, or None if it was over."""
    return cast("NodeJob | None", _fail(job_tables.NODE_JOBS, job_id, error, seconds))


def fail_ingest_job(job_id: str, *, error: str, seconds: float | None) -> IngestJob | None:
    """Fail an ingest job; return its row, or None if it was over."""
    return cast("IngestJob | None", _fail(job_tables.INGEST_JOBS, job_id, error, seconds))


def _fail(table: job_tables.JobTable, job_id: str, error: str, seconds: float | None) -> Row | None:
    text = payload.error_text(error)
    with db.transaction() as conn:
        return manual_changes.fail(conn, table, job_id, error=text, seconds=seconds)


def park_node(job_id: str) -> NodeJob | None:
    """Let a node job wait for an answer; return its row, or None if it is over."""
    with db.transaction() as conn:
        row = statements.manual_changes.park_node(conn, job=job_id)
        if (
            row is None
            and (job := statements.nodes.get(conn, job=job_id))
            and job["status"] == "awaiting_input"
        ):
            return cast("NodeJob", job)
        return cast("NodeJob | None", row)
