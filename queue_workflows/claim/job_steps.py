"""Record the steps, waits and streams of handlers under the claims of their jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from queue_workflows import db, errors
from queue_workflows.claim import job_tables, outcomes
from queue_workflows.dag import payload, policy
from queue_workflows.db import statements
from queue_workflows.types import JsonDict, Row

RESUME_ON_HOST_S = 30.0
"""Seconds for which a job whose handler has waited is kept for its host, which has its files and
its model, about as long as a model loads elsewhere."""
LOST: Final[JsonDict] = {"state": "lost"}
"""The answer to a handler whose job was given to another worker; nothing was written."""


def answer(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Carry out a request of a handler about a step of its job by one statement; return the answer.

    `request` has `op` (a name of `_OPERATIONS`) and its parameters. The answer's `state` is `lost`
    if the claim is lost; then nothing was written. Raises the errors of the database.
    """
    return _OPERATIONS[request["op"]](lease, request)


def _begin(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin a step or cursor: `run`, `done` with the `output` as JSON text, or `changed`.

    `attempts` counts how often it has begun, `position` how far a cursor was. `changed` has the
    `arguments` that it had.
    """
    given = _given(lease, request, "kind", "name", "key", "arguments_hash", "arguments")
    row = yield from statements.job_steps.begin[lease.table.name].script(**given)
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
    names = ("kind", "name", "key", "state", "output", "error", "position")
    given = _given(lease, request, *names)
    row = yield from statements.job_steps.end[lease.table.name].script(**given)
    return LOST if row is None else {"state": request["state"], "output": row["output"]}


def wait(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin or continue a wait of a claimed job: `done` with the `output`, `waiting`, `lost`.

    `request`: `kind` (`event` or `sleep`), `name`, `key`, `after_s` (None: without an end) and
    `default`, the output of a wait that has lasted so long, as JSON text.
    """
    given = _given(lease, request, "kind", "name", "key", "after_s", "default")
    row = yield from statements.events.wait[lease.table.name].script(**given)
    state = {None: "lost", "busy": "waiting"}.get(row["state"], row["state"])
    return {"state": state, "output": row["output"]}


def suspend(lease: job_tables.Lease, *, reason: str) -> db.Script[Row | None]:
    """Give up the claim of a job whose handler waits, uncounted; return the row.

    The job is claimable again when the first of its waits is over, for RESUME_ON_HOST_S only by
    workers of the host that ran it. None: the claim is lost.
    """
    detail = payload.encode({"reason": reason}, "reason")
    longest_s, keep_s = policy.MAX_WAIT_S, RESUME_ON_HOST_S
    given = job_tables.fence(lease, detail=detail, longest_s=longest_s, keep_s=keep_s)
    return statements.events.suspend[lease.table.name].script(**given)


def _add_parts(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Add parts of a claimed job, and wake its readers: `done`, or `lost` if the claim is lost.

    `request`: `first`, the number of the first part, `names`, and `parts` as JSON texts. Parts that
    are stored already stay as they are, so the same request may come again. Raises `RowRefused` if
    parts before `first` are missing: a reader would miss them.
    """
    given = {name: request[name] for name in ("first", "names", "parts")}
    parts = statements.job_parts.add[lease.table.name]
    row = yield from parts.script(**job_tables.fence(lease, **given))
    if not row["held"]:
        return {"state": "lost"}
    if not row["follows"]:
        raise errors.RowRefused(
            f"job {lease.job_id!r}: an earlier batch of its stream was refused, so the parts from "
            f"{request['first']} on are not stored"
        )
    return {"state": "done"}


def _given(lease: job_tables.Lease, request: JsonDict, *names: str) -> JsonDict:
    return job_tables.fence(lease, **{name: request.get(name) for name in names})


_Operation = Callable[[job_tables.Lease, JsonDict], "db.Script[JsonDict]"]
_OPERATIONS: Final[dict[str, _Operation]] = {
    "begin": _begin,
    "end": _end,
    "wait": wait,
    "stream": _add_parts,
}


def store_cursors(
    cursors: Mapping[job_tables.Lease, Iterable[outcomes.Cursor]],
) -> db.Script[None]:
    """Store how far the cursors of claimed jobs are; skip a job whose claim is lost."""
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        rows = [
            (lease, *each) for lease in cursors if lease.table == table for each in cursors[lease]
        ]
        if not rows:
            continue
        given = job_tables.fence_all(
            [lease for lease, *_ in rows],
            names=[name for _, name, _, _ in rows],
            keys=[key for _, _, key, _ in rows],
            positions=[position for *_, position in rows],
        )
        yield from statements.job_steps.store_cursors[table.name].script(**given)
