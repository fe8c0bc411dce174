"""Run one ingest job by calling its task, checking the result and recording the outcome."""

from __future__ import annotations

import contextlib

from queue_workflows import db
from queue_workflows.claim import job_tables, manual_claims, outcomes, record
from queue_workflows.run import running, task_call
from queue_workflows.tasks import control, handlers
from queue_workflows.types import Row


def execute_ingest_job(job: Row) -> str:
    """Run an ingest job and record how it ended, fenced by its claim; claim it if it is queued.

    Return `"completed"`, `"failed"` (queued again while attempts are left), or `"skipped"` if it
    cannot be claimed, has ended or is claimed by another process; then the job is unchanged.
    """
    claimed = manual_claims.take(job_tables.INGEST_JOBS, job)
    if claimed is None:
        return "skipped"
    lease = job_tables.lease_of(job_tables.INGEST_JOBS, claimed)
    outcome = run_task(claimed)
    with db.transaction() as conn:
        return record.record(conn, lease, outcome)


def run_task(job: Row, control_: control.Control | None = None) -> outcomes.Outcome:
    """Run the task of a claimed job and return its outcome, also if it raises; write nothing.

    `control_`, if given, receives progress and may interrupt the task. A job that was cancelled
    meanwhile has no result. A job that was interrupted is `cancelled`, with the reason as its
    error.
    """
    outcome = task_call.refused(job)
    if outcome is not None:
        return outcome
    found = control_ or running.Running()
    ask = manual_claims.asker(job_tables.INGEST_JOBS, job, lambda: found.interrupted is not None)
    with contextlib.closing(handlers.Runner()) as runner:
        return task_call.call(job, found, runner, ask)
