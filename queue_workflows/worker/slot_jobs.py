"""Build the request that sends a job to an executor, and compute answers for its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from queue_workflows import db, errors, ingest_executor, node_executor, refs
from queue_workflows.dag import payload, run_folder
from queue_workflows.engine import (
    claim_isolation,
    claimed_jobs,
    job_steps,
    job_tables,
    nodes,
    outcomes,
    runs,
)
from queue_workflows.executor import loaded_app
from queue_workflows.handlers import node_call
from queue_workflows.types import JsonDict, Row


class Request(NamedTuple):
    """A job as it is sent to an executor; see `protocol.Run`."""

    family: str
    job: Row
    run: Row | None


def request(
    connection: Callable[[], db.Connection],
    table: job_tables.JobTable,
    job: Row,
    known: loaded_app.Registered,
) -> Request | outcomes.Outcome:
    """Return what to send for a claimed job, or the outcome of one whose handler cannot run."""
    if not table.in_run:
        return ingest_executor.refused(job) or Request("ingest", job, None)
    try:
        claimed_jobs.check_node(job)
        if job["node_module"].startswith(node_executor.INPUT_PREFIX):
            return outcomes.Outcome("parked", 0.0)
        if known.needs_rows:
            full, run = rows(connection(), job)
            return Request("node", full | job, run)
        if job.get("context") is None and not known.resolves_refs:
            job = _with_context(connection(), job)
    except errors.QueueWorkflowsError as error:
        return node_call.failed(job, error, 0.0)
    return Request("node", job, None)


def _with_context(conn: db.Connection, job: Row) -> Row:
    """Return a job that was claimed row by row with the outputs that its template names."""
    template = job["inputs"] if job["input_template"] is None else job["input_template"]
    if not refs.has_refs(template):
        return job
    return job | {"context": nodes.context(conn, job["run_id"], refs.heads(template))}


def answer_step(conn: db.Connection, lease: job_tables.Lease, request: JsonDict) -> JsonDict:
    """Return the answer to a request about a step. Raises `RowRefused` for what cannot be stored.

    Raises the errors of a database that cannot answer now.
    """
    try:
        return job_steps.answer(conn, lease, request)
    except db.Error as error:
        if conn.closed or not claim_isolation.is_about_rows(error):
            raise
        raise errors.RowRefused(f"the database refuses a step: {str(error).strip()}") from error


def answer(conn: db.Connection, job: Row, what: str) -> Any:
    """Return what the handler of a node asks for: `rows`, `out_dir` or `context`."""
    run_id = job["run_id"]
    if what == "out_dir":
        default = run_folder.of_run(run_id)
        return runs.set_out_dir(conn, run_id, default) or default
    if what == "context":
        found = nodes.context(conn, run_id, None)
        return payload.stored_object(found, f"context of node {job['node_id']!r}")
    full, run = rows(conn, job)
    return {"job": full, "run": run}


def rows(conn: db.Connection, job: Row) -> tuple[Row, Row]:
    """Return the rows of a node and of its run with all columns."""
    return nodes.get(conn, job["id"]) or job, runs.get(conn, job["run_id"]) or {}
