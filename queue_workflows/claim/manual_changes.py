"""Reopen runs for an operator, in the transaction of the connection."""

from __future__ import annotations

from queue_workflows import db, errors
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row


def lock_over(conn: db.Connection, run_id: str) -> Row:
    """Lock a run that will run again in a new generation; return its row.

    Raises `UnknownJob` if it does not exist, and `InvalidConfig` if it has not ended or is in its
    last generation.
    """
    run = statements.runs.lock(conn, run_id=run_id)
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    if run["status"] not in TERMINAL_RUN_STATUSES:
        raise errors.InvalidConfig(
            f"run {run_id!r} is {run['status']}: only a finished one is retried"
        )
    if run["generation"] > job_tables.LAST_GENERATION - 2:
        raise errors.InvalidConfig(
            f"run {run_id!r} is in generation {run['generation']}, the last one that can be "
            "stored: submit it again as a new run"
        )
    return run


def reopen_run(conn: db.Connection, run_id: str) -> Row:
    """Queue a failed or cancelled run in a new generation; return its row.

    Completed nodes keep their outputs. Raises as `lock_over` does, and `InvalidConfig` for a
    completed run.
    """
    if lock_over(conn, run_id)["status"] == "completed":
        raise errors.InvalidConfig(f"run {run_id!r} is completed: name the node to retry from")
    reopened = statements.runs.reopen(conn, run_id=run_id)
    assert reopened is not None
    return reopened
