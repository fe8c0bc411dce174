"""Append events to the history of jobs, and delete old ones of nodes."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row


def note(
    table: job_tables.JobTable,
    job: Row,
    event_type: str,
    *,
    detail: str,
    elapsed_s: float | None = None,
    error: str | None = None,
) -> db.Script[None]:
    """Append one event of a job of either family; `job` is its row, with the worker to name."""
    values: dict[str, Any] = {
        "job": job["id"],
        "attempt": job["attempts"],
        "event_type": event_type,
        "claim_no": job["claim_no"],
        "worker": job["worker_id"],
        "host": job["claimed_by"],
        "queue": job["queue"],
        "elapsed_s": elapsed_s,
        "error": error,
        "detail": detail,
    }
    if table.in_run:
        of_node = {"run": job["run_id"], "node": job["node_id"], "model": job["required_model"]}
        yield from statements.job_events.add_node.script(**values, **of_node)
    else:
        yield from statements.job_events.add_ingest.script(**values)


def note_logged_error(lease: job_tables.Lease, error: str) -> db.Script[None]:
    """Append the error that a handler logged, while the claim of its ingest job is held."""
    return statements.job_events.note_logged_error.script(
        job=lease.job_id, worker=lease.worker_id, claim_no=lease.claim_no, error=error
    )
