"""Record the steps of handlers under the claims of their jobs, read them, and forget them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import events, job_parts, job_tables, outcomes
from queue_workflows.types import JsonDict, Row

LOST: Final[JsonDict] = {"state": "lost"}
"""The answer to a handler whose job was given to another worker: nothing was written."""


def answer(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Carry out what a handler asks about a step of its job, in one statement; return the answer.

    `request` has `op` (a name of `_OPERATIONS`) and what that takes. The answer's `state` is `lost`
    if the claim is lost; then nothing was written. Raises the errors of the database.
    """
    return _OPERATIONS[request["op"]](lease, request)


def _begin(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin a step or cursor: `run`, `done` with the `output` as JSON text, or `changed`.

    `attempts` counts how often it has begun, `position` how far a cursor was. `changed` has the
    `arguments` that it had.
    """
    given = _given(request, "kind", "name", "key", "arguments_hash", "arguments")
    row = yield from _row(statements.job_steps.begin[lease.table.name], lease, given)
    assert row is not None
    is_recorded = row["state"] == "done" or (request["kind"] == "cursor" and row["state"])
    if is_recorded and row["arguments_hash"] != request["arguments_hash"]:
        return {"state": "changed", "arguments": row["arguments"]}
    if not row["held"]:
        return LOST
    if row["state"] == "done":
        return {"state": "done", "output": row["output"]}
    return {"state": "run", "attempts": row["attempts"], "position": row["position"] or 0}


def _end(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Record that a step is `done`, with its `output` as JSON text, or `failed`, with its `error`.

    `position`: how far a cursor is. Return the output as it is stored.
    """
    given = _given(request, "kind", "name", "key", "state", "output", "error", "position")
    row = yield from _row(statements.job_steps.end[lease.table.name], lease, given)
    return LOST if row is None else {"state": request["state"], "output": row["output"]}


def _given(request: JsonDict, *names: str) -> JsonDict:
    return {name: request.get(name) for name in names}


def _row(statement: bytes, lease: job_tables.Lease, given: Any) -> db.Script[Row | None]:
    return db.one(statement, job_tables.fence(lease, **given))


_Operation = Callable[[job_tables.Lease, JsonDict], "db.Script[JsonDict]"]
_OPERATIONS: Final[dict[str, _Operation]] = {
    "begin": _begin,
    "end": _end,
    "wait": events.wait,
    "stream": job_parts.add,
}


def store_cursors(
    cursors: Mapping[job_tables.Lease, Iterable[outcomes.Cursor]],
) -> db.Script[None]:
    """Store how far the cursors of claimed jobs are; leave out those whose claim is lost."""
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        rows = [
            (lease, *each) for lease in cursors if lease.table == table for each in cursors[lease]
        ]
        if not rows:
            continue
        parameters = {
            "jobs": [lease.job_id for lease, *_ in rows],
            "claims": [lease.claim_no for lease, *_ in rows],
            "workers": [lease.worker_id for lease, *_ in rows],
            "names": [name for _, name, _, _ in rows],
            "keys": [key for _, _, key, _ in rows],
            "positions": [position for *_, position in rows],
        }
        yield db.Statement(statements.job_steps.store_cursors[table.name], parameters)


def of_job(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> list[Row]:
    """Return the steps of a job in the order in which they began first; `output` is JSON text."""
    if not payload.is_storable(job_id):
        return []
    parameters = {"table": table.name, "job": job_id}
    return conn.execute(statements.job_steps.of_job, parameters).fetchall()


def forget_from(conn: db.Connection, table: job_tables.JobTable, job_id: str, name: str) -> int:
    """Delete the first step of this name of a job and those that began after it; return how many.

    Raises `InvalidConfig` (a ValueError), which lists the steps, if the job has none of this name.
    """
    known = dict.fromkeys(row["name"] for row in of_job(conn, table, job_id))
    if name not in known:
        has = ", ".join([*known][:20]) or "none"
        raise errors.InvalidConfig(
            f"job {job_id!r} has no step {name!r:.120}; its steps: {has}{errors.hint(name, known)}"
        )
    parameters = {"table": table.name, "job": job_id, "name": name}
    row = conn.execute(statements.job_steps.forget_from, parameters).fetchone()
    assert row is not None
    return row["n"]
