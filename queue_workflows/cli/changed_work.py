"""Describe the run or job that `cancel` and `retry` have changed."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.cli import output
from queue_workflows.db import statements


def state(conn: db.Connection, any_id: str) -> dict[str, Any]:
    """Return kind, name, run_id and status of a run or job, and run_status if it has a run."""
    found = statements.overview.find(conn, id=any_id, jobs_first=False) or {}
    done: dict[str, Any] = {key: found[key] for key in ("kind", "name", "run_id", "status")}
    if done["run_id"] is not None:
        run = statements.overview.find(conn, id=done["run_id"], jobs_first=False)
        done["run_status"] = run["status"] if run else None
    return done


def named(done: dict[str, Any]) -> str:
    """Return kind, id and name of a run or job as one text."""
    return f"{done['kind']} {done['id']} ({output.line(done['name'])})"
