"""Answer what handlers ask of their worker: rows of their job, and steps."""

from __future__ import annotations

from typing import Any, TypeAlias

from queue_workflows import db, errors
from queue_workflows.dag import payload, run_folder
from queue_workflows.db import statements
from queue_workflows.engine import job_steps
from queue_workflows.run import job_rows, wire
from queue_workflows.types import JsonDict, Row, Unreadable
from queue_workflows.worker import claimed_job

Found: TypeAlias = "tuple[Any, str | None]"
"""A value, or the text of an error."""


def script(job: claimed_job.ClaimedJob, question: JsonDict) -> db.Script[Found]:
    """Return the answer to a question: `step`, `rows`, `out_dir` or `context`."""
    what = question["what"]
    try:
        if what == "step":
            return (yield from job_steps.answer(job.lease, question["request"])), None
        if what == "out_dir":
            return (yield from _out_dir(job)), None
        if what == "context":
            return (yield from _context(job)), None
        return (yield from rows(job)), None
    except errors.QueueWorkflowsError as error:
        return None, str(error)


def rows(job: claimed_job.ClaimedJob) -> db.Script[JsonDict]:
    """Return the rows of a node and of its run with all columns, as JSON has them."""
    own = yield from db.one(statements.nodes.get, {"job": job.id})
    run = yield from db.one(statements.runs.get, {"run_id": job.run_id})
    return {"job": _tagged(own or job.row), "run": _tagged(run or {})}


def encoded(found: JsonDict) -> bytes:
    """Return rows as an executor takes them."""
    return wire.encoded(found)


def _tagged(row: Row) -> Row:
    return {name: job_rows.tagged(value) for name, value in row.items()}


def _out_dir(job: claimed_job.ClaimedJob) -> db.Script[str]:
    default = run_folder.of_run(job.run_id or "")
    given = {"run_id": job.run_id, "out_dir": default}
    row = yield from db.one(statements.runs.set_out_dir, given)
    return row["out_dir"] if row else default


def _context(job: claimed_job.ClaimedJob) -> db.Script[JsonDict]:
    row = yield from db.one(statements.nodes.context, {"heads": None, "run_id": job.run_id})
    if row is None:
        return {}
    if row["kind"] != "object":
        raise errors.UnreadableRow(f"its context is a JSON {row['kind']}, not an object")
    found: Any = row["context"]
    if isinstance(found, Unreadable):
        raise errors.UnreadableRow(f"its context cannot be read: {found.reason}")
    return payload.stored_object(found, f"context of node {job.node_id!r}")
