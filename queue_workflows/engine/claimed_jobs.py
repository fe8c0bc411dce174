"""Read a claimed job column by column, and refuse it if one is unreadable or of a wrong type."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from queue_workflows import db, errors
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row, Unreadable


def read(
    conn: db.Connection, table: job_tables.JobTable, job_id: str, worker_id: str
) -> Row | None:
    """Return what a worker needs of a job that it holds, each column loaded by itself.

    A node's `context` is left out. None: the worker does not hold the job any more.
    """
    statement = statements.claimed_jobs.node if table.in_run else statements.claimed_jobs.ingest
    return conn.execute(statement, {"job": job_id, "worker": worker_id}).fetchone()


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
    if isinstance(job["args"], Unreadable):
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
