"""Let the handlers of claimed jobs wait for events."""

from __future__ import annotations

from queue_workflows import config, db
from queue_workflows.dag import payload, policy
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import JsonDict, Row


def wait(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Begin or continue a wait of a claimed job: `done` with the `output`, `waiting`, `lost`.

    `request`: `kind` (`event` or `sleep`), `name`, `key`, `after_s` (None: without an end) and
    `default`, the output of a wait that has lasted so long, as JSON text.
    """
    names = ("kind", "name", "key", "after_s", "default")
    given = job_tables.fence(lease, **{name: request[name] for name in names})
    row = yield from statements.events.wait[lease.table.name].script(**given)
    state = {None: "lost", "busy": "waiting"}.get(row["state"], row["state"])
    return {"state": state, "output": row["output"]}


def suspend(lease: job_tables.Lease, *, reason: str) -> db.Script[Row | None]:
    """Give up the claim of a job whose handler waits, uncounted; return the row.

    The job is claimable again when the first of its waits is over, for RESUME_ON_HOST_S only by
    workers of the host that ran it. None: the claim is lost.
    """
    detail = payload.encode({"reason": reason}, "reason")
    keep_s = config.RESUME_ON_HOST_S.read()
    given = job_tables.fence(lease, detail=detail, longest_s=policy.MAX_WAIT_S, keep_s=keep_s)
    return statements.events.suspend[lease.table.name].script(**given)
