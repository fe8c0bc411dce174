"""A claimed job as the worker reads it: column by column where need be, and checked for its use."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from queue_workflows import db, errors
from queue_workflows.engine import job_tables
from queue_workflows.types import Row, Unreadable

_NODE: Final = (
    "SELECT j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status,"
    " j.pipeline_name, j.priority, j.seq, j.claim_no, j.worker_id, j.claimed_by, j.generation,"
    " j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries, j.timeout_s, j.inputs,"
    " j.input_template, j.ref_heads, (SELECT json_build_object("
    "'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,"
    " 'generation', r.generation, 'born', least(9223372036854775807, greatest("
    "-9223372036854775808, extract(epoch FROM r.created_at) * 1000000))::bigint)"
    " FROM workflow_runs r WHERE r.id = j.run_id) AS run FROM workflow_node_jobs j"
    " WHERE j.id = %s AND j.worker_id = %s AND j.status = 'running'"
)
_INGEST: Final = (
    "SELECT id, task_name, queue::text, reason, priority, seq, args, claim_no, worker_id,"
    " claimed_by, attempts, max_attempts, crash_count, timeout_s, headers, partition_key, lock_key"
    " FROM ingest_jobs WHERE id = %s AND worker_id = %s AND status = 'running'"
)


def read(
    conn: db.Connection, table: job_tables.JobTable, job_id: str, worker_id: str
) -> Row | None:
    """Return what a worker needs of a job that it holds, each column loaded by itself.

    A node's `context` is left out. None: the worker does not hold the job any more.
    """
    statement = _NODE if table.in_run else _INGEST
    return conn.execute(statement, (job_id, worker_id)).fetchone()


def id_of(document: Unreadable) -> str:
    """Return the id that a claimed node's JSON document begins with."""
    text = document.raw.decode(errors="replace")
    return json.JSONDecoder().raw_decode(text, len('{"id":'))[0]


def check_node(job: Row) -> None:
    """Raise `UnreadableRow` if a node cannot run with what its row holds."""
    if not isinstance(job["node_module"], str):
        raise errors.UnreadableRow(f"node_module is {_kind(job['node_module'])}, not a text")
    for column in ("inputs", "input_template", "context"):
        if (value := job.get(column)) is not None and not isinstance(value, dict):
            _refuse(column, value)
    if "run" in job and not isinstance(job["run"], dict):
        _refuse("run", job["run"])


def check_ingest(job: Row) -> None:
    """Raise `UnreadableRow` if a task cannot run with what its job's row holds."""
    if not isinstance(job["args"], dict):
        _refuse("args", job["args"])
    if (headers := job.get("headers")) is not None and not isinstance(headers, dict):
        _refuse("headers", headers)


def _refuse(column: str, value: Any) -> NoReturn:
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{column} cannot be loaded: {value.reason}")
    raise errors.UnreadableRow(f"{column} is {_kind(value)}, not an object")


_KINDS: Final = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "list": "an array",
}


def _kind(value: Any) -> str:
    name = type(value).__name__  # pyright: ignore[reportUnknownArgumentType]
    return _KINDS.get(name, f"a {name}")
