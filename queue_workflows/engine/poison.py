"""Fail a job or a run on which the engine's own statements keep failing, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, manual_changes, row_isolation


def node_job(conn: db.Connection, job_id: str, error: BaseException, failures: int) -> bool:
    """Fail a node job after DISPATCH_MAX_ATTEMPTS failures; return whether it did."""
    return _job(conn, job_tables.NODE_JOBS, job_id, error, failures)


def ingest_job(conn: db.Connection, job_id: str, error: BaseException, failures: int) -> bool:
    """Fail an ingest job after DISPATCH_MAX_ATTEMPTS failures; return whether it did."""
    return _job(conn, job_tables.INGEST_JOBS, job_id, error, failures)


ENDING: Final[Mapping[str, row_isolation.Ending]] = {
    "workflow_node_jobs": node_job,
    "ingest_jobs": ingest_job,
}
"""By table: what ends a job that keeps raising."""


def run(conn: db.Connection, run_id: str, error: BaseException, failures: int) -> bool:
    """Fail a run after DISPATCH_MAX_ATTEMPTS failures; return whether it did."""
    if failures < config.DISPATCH_MAX_ATTEMPTS.read():
        return False
    statements.runs.fail(conn, run_id=run_id, error=_poison(error, failures))
    return True


def _job(
    conn: db.Connection,
    table: job_tables.JobTable,
    job_id: str,
    error: BaseException,
    failures: int,
) -> bool:
    if failures < config.DISPATCH_MAX_ATTEMPTS.read():
        return False
    manual_changes.fail(conn, table, job_id, error=_poison(error, failures))
    return True


def _poison(error: BaseException, failures: int) -> str:
    described = row_isolation.described(error)
    return payload.error_text(f"poison: the engine failed {failures} times on it: {described}")
