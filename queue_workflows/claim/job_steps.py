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
"""After a wait, seconds for which only the former host may claim the job, since it has its files
and model. Loading a model elsewhere takes about as long."""
LOST: Final[JsonDict] = {"state": "lost"}
"""The answer to a handler whose claim is lost; nothing was written."""


def answer(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Execute a handler's request about a step of its job as one statement; return the answer.

    `request` has `op` (a name of `_OPERATIONS`) and its parameters. The answer's `state` is `lost`
    if the claim is lost; then nothing was written. Raises the errors of the database.
    """
    return _OPERATIONS[request["op"]](lease, request)


def _begin(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin a step or cursor; return the state `run`, `done` or `changed`.

    `done` has the `output` as JSON text, `changed` the earlier `arguments`. `attempts` is how often
    the step has begun, `position` how many items of a cursor are done.
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

    `position` is how many items of a cursor are done. Returns the output as it is stored.
    """
    names = ("kind", "name", "key", "state", "output", "error", "position")
    given = _given(lease, request, *names)
    row = yield from statements.job_steps.end[lease.table.name].script(**given)
    return LOST if row is None else {"state": request["state"], "output": row["output"]}


def wait(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin or continue a wait of a claimed job; return `done` with `output`, `waiting` or `lost`.

    `request` has `kind` (`event` or `sleep`), `name`, `key`, `after_s` (None for no limit) and
    `default`, the output if the wait has reached that limit, as JSON text.
    """
    given = _given(lease, request, "kind", "name", "key", "after_s", "default")
    row = yield from statements.events.wait[lease.table.name].script(**given)
    state = {None: "lost", "busy": "waiting"}.get(row["state"], row["state"])
    return {"state": state, "output": row["output"]}


def suspend(lease: job_tables.Lease, *, reason: str) -> db.Script[Row | None]:
    """Give up the claim of a job whose handler waits, uncounted; return the row.

    The job can be claimed again when its first wait is over, for RESUME_ON_HOST_S only by workers
    of the same host. Returns None if the claim is lost.
    """
    detail = payload.encode({"reason": reason}, "reason")
    longest_s, keep_s = policy.MAX_WAIT_S, RESUME_ON_HOST_S
    given = job_tables.fence(lease, detail=detail, longest_s=longest_s, keep_s=keep_s)
    return statements.events.suspend[lease.table.name].script(**given)


def _add_parts(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Add parts to a claimed job's stream and notify readers; return `done`, or `lost`.

    `request` has `first`, the number of the first part, `names`, and `parts` as JSON texts. A
    repeated request is harmless, as stored parts never change. Raises `RowRefused` if parts before
    `first` are missing, since readers would miss them.
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
    """Store the positions of claimed jobs' cursors; skip a job whose claim is lost."""
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
