"""Answer what handlers ask of their worker: rows of their job, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from queue_workflows import db, errors
from queue_workflows.dag import confinement
from queue_workflows.db import statements
from queue_workflows.engine import job_steps, nodes
from queue_workflows.run import wire
from queue_workflows.types import JsonDict
from queue_workflows.worker import claimed_job


class Found(NamedTuple):
    """A value, or the text of an error; `is_final`: another attempt would not help."""

    value: Any
    error: str | None = None
    is_final: bool = False


def script(job: claimed_job.ClaimedJob, question: JsonDict) -> db.Script[Found]:
    """Return the answer to a question: `step`, `rows`, `out_dir` or `context`."""
    what = question["what"]
    try:
        if what == "step":
            return Found((yield from job_steps.answer(job.lease, question["request"])))
        if what == "out_dir":
            return Found((yield from _out_dir(job)))
        if what == "context":
            return Found((yield from _context(job, question["request"])))
        return Found((yield from rows(job)))
    except errors.QueueWorkflowsError as error:
        return Found(None, str(error), isinstance(error, errors.UnreadableRow))


def rows(job: claimed_job.ClaimedJob) -> db.Script[JsonDict]:
    """Return the rows of a node and of its run with all columns, as JSON has them."""
    own = yield from statements.nodes.get.script(job=job.id)
    run = yield from statements.runs.get.script(run_id=job.run_id)
    return {"job": wire.tagged(own or job.row), "run": wire.tagged(run or {})}


def _out_dir(job: claimed_job.ClaimedJob) -> db.Script[str]:
    default = confinement.of_run(job.run_id or "")
    found = yield from statements.runs.set_out_dir.script(run_id=job.run_id, out_dir=default)
    return found or default


def _context(job: claimed_job.ClaimedJob, heads: Sequence[str] | None) -> db.Script[JsonDict]:
    run_id = job.run_id or ""
    try:
        return (yield from nodes.context(run_id, heads))
    except errors.UnreadableRow as error:
        raise errors.UnreadableRow(f"run {run_id}: {error}") from None
