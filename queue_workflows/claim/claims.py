"""Claim jobs and renew their leases; the statement that claims also records completed jobs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from queue_workflows import db
from queue_workflows.claim import job_tables, outcomes
from queue_workflows.db import statements
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
CLAIM_LOST = "QW001"
"""The SQLSTATE of a claim whose completed job is held no longer; nothing was written or claimed."""
_quoted: Final = json.encoder.encode_basestring_ascii


class Claimant(NamedTuple):
    """The worker that claims, with its machine, queue and lease."""

    worker_id: str
    host: str
    queue: str
    lease_s: float = 600
    newest: bool = False
    """Whether to take the newest job of the best priority, for a machine that takes overflow."""
    lane: int | None = None
    model: str | None = None
    """The loaded model."""
    models: list[str] | None = None
    """The models this worker can load; None: any."""
    obey: bool = True
    """Whether OFF for this host and queue stops the claim."""
    policy: str = "strict"
    """How gpu jobs are chosen: `strict` or `balanced`."""
    grace_s: float = 300.0
    bound_s: float = 2400.0
    versions: list[str] | None = None
    """The versions of nodes that the worker has, `<module>@<version>`; None: of none."""


class Ahead(NamedTuple):
    """The plan that follows from a completed node, for the transaction that records the node."""

    generation: int
    rows: str | None
    """The rows of a plan as JSON text; None: none."""
    complete: bool
    revision: int = 0


class Done(NamedTuple):
    """One job whose handler has ended."""

    lease: job_tables.Lease
    outcome: outcomes.Outcome
    ahead: Ahead | None = None
    """The plan after a completed node. Without one, the orchestrator plans."""


class Wait(NamedTuple):
    """When to claim again, if a claim returned fewer jobs than it may. None: unknown."""

    limit_s: float | None = None
    """Seconds until a limit of an ingest queue admits the next job; None too if one was claimed."""
    due_s: float | None = None
    """Seconds until the next delayed job of the queue is due."""


def claim(
    table: job_tables.JobTable,
    who: Claimant,
    *,
    count: int = 1,
    done: Sequence[Done] = (),
    promote: bool = False,
    ahead_s: float | None = None,
) -> db.Script[list[Any]]:
    """Record completed jobs of this table, and claim up to `count` jobs of the worker's queue.

    Returns the rows that `claims:ingest_rows` and `claims:node_rows` describe, one for each job,
    and perhaps one without an id, which has the seconds of a `Wait`. A link returns raw rows.
    `promote`: first admit jobs that have become due. `ahead_s`: how far ahead it looks for delayed
    ones; None: not at all. One transaction, after the errors that handlers of ingest jobs logged.
    Raises CLAIM_LOST if one of the claims to record is lost. A worker of a gpu queue claims and
    records one job at a time.
    """
    given: dict[str, Any] = {
        "worker": who.worker_id,
        "host": who.host,
        "queue": who.queue,
        "lease_s": who.lease_s,
        "obey": who.obey,
        "promote": promote,
        "look_ahead_s": ahead_s if count else None,
    }
    if not table.in_run:
        for lease, outcome, _ in done:
            if outcome.error:
                yield from statements.job_events.note_logged_error.script(
                    job=lease.job_id,
                    worker=lease.worker_id,
                    claim_no=lease.claim_no,
                    error=outcome.error,
                )
        given |= {"claim": count, "done": _ingest_array(done) if done else None}
        return (yield db.Statement(statements.claims.ingest_rows.text, given, is_raw=True))
    given |= {"newest": who.newest, "versions": who.versions}
    single = len(done) <= 1 and count <= 1
    if who.queue == "gpu" or (single and not (done and _queues_many(done[0].ahead))):
        names = ("model", "models", "lane", "policy", "grace_s", "bound_s")
        given |= {name: getattr(who, name) for name in names}
        given |= (_columns(done[0]) if done else _NOTHING) | {"claim": count > 0}
        return (yield db.Statement(statements.claims.node_rows.text, given, is_raw=True))
    texts = f"[{','.join(map(_node_json, done))}]" if done else None
    given |= {"claim": count, "done": texts}
    return (yield db.Statement(statements.claims.nodes_rows.text, given, is_raw=True))


def _queues_many(ahead: Ahead | None) -> bool:
    """Return whether a plan queues more than one node, for which other workers are to be woken."""
    return ahead is not None and ahead.rows is not None and len(json.loads(ahead.rows)) > 1


def _columns(done: Done) -> dict[str, Any]:
    """Return the parameters about one completed node and the plan after it."""
    lease, outcome, ahead = done
    generation, rows, complete, revision = ahead or (None, None, None, 0)
    return {
        "job": lease.job_id,
        "claim_no": lease.claim_no,
        "result": outcome.result,
        "seconds": outcome.seconds,
        "rss_mb": outcome.vm_rss_mb_peak,
        "received": outcome.resolved_inputs,
        "generation": generation,
        "revision": revision,
        "rows": rows,
        "complete": complete,
    }


_NOTHING: Final[dict[str, Any]] = {
    "job": None, "claim_no": None, "result": None, "seconds": None, "rss_mb": None,
    "received": None, "generation": None, "revision": 0, "rows": None, "complete": None,
}  # fmt: skip
"""The parameters without a completed node."""


def _node_json(done: Done) -> str:
    """Return a completed node and the plan after it as an element of a JSON array."""
    # The JSON texts are checked already; encoding them again would cost a second walk.
    given = _columns(done)
    texts = {name: given.pop(name) for name in ("result", "received", "rows")}
    given["id"] = given.pop("job")
    more = "".join(f',"{name}":{text}' for name, text in texts.items() if text is not None)
    return f"{json.dumps(given)[:-1]}{more}}}"


def _ingest_array(done: Sequence[Done]) -> str:
    texts = [
        f'{{"id":{_quoted(lease.job_id)},"claim_no":{lease.claim_no},'
        f'"seconds":{outcome.seconds!r},"result":{outcome.result}}}'
        for lease, outcome, _ in done
    ]
    return f"[{','.join(texts)}]"


# --- One row at a time.


def claim_apart(table: job_tables.JobTable, who: Claimant) -> db.Script[list[Any]]:
    """Claim one job after a row has made the ordinary claim raise; return its row, as `claim` does.

    First admits jobs that have become due. Sets aside the rows that raise, and logs a warning for
    each, with the command that removes it. One statement tries at most 100 rows, and a second one
    reads the job that it has claimed.
    """
    row = yield from statements.claim_isolation.claim_apart[table.name].script(
        worker=who.worker_id,
        host=who.host,
        queue=who.queue,
        lease_s=who.lease_s,
        obey=who.obey,
        models=who.models,
        lane=who.lane,
        versions=who.versions,
    )
    for each in row["aside"]:
        _log.warning("%s", _describe(table, each))
    if row["job_id"] is None:
        return []
    claimed = statements.claim_isolation.claimed_ingest
    if table.in_run:
        claimed = statements.claim_isolation.claimed_node
    given = {"job": row["job_id"], "worker": who.worker_id}
    return (yield db.Statement(claimed.text, given, is_raw=True))


_BECAME = {
    "failed": "it has failed",
    "set_aside": "it is blocked as set_aside, since it cannot be failed either",
    "postponed": "it is tried again in a minute",
    "skipped": "no change of it is accepted, so that every claim skips it",
}


def _describe(table: job_tables.JobTable, aside: Row) -> str:
    remove = (
        f"queue-workflows cancel {aside['run_id']!r}"
        if table.in_run
        else f"queue-workflows jobs delete {aside['id']!r}"
    )
    return (
        f"job {aside['id']!r} cannot be claimed: {_BECAME[aside['became']]}."
        f" The error of the database: {aside['error']!r:.1000}. To remove it: {remove}"
    )


# --- Renewals.


class Renewal(NamedTuple):
    """The reply to the renewal of a lease."""

    job_id: str
    claim_no: int
    cancel: bool
    """The job or its run was cancelled, or the run is over."""
    renewed: bool = True
    """False: somebody else has locked the row, so that its lease stays as it is."""


def renew(
    leases: Sequence[job_tables.Lease],
    *,
    lease_s: float,
    progress: Sequence[str | None] = (),
) -> db.Script[list[Renewal]]:
    """Extend the leases of one worker by `lease_s` and store progress (JSON texts).

    A lease without a `Renewal` is lost.
    """
    if not leases:
        return []
    rows = yield from statements.claims.renew[leases[0].table.name].script(
        worker=leases[0].worker_id,
        lease_s=lease_s,
        jobs=[lease.job_id for lease in leases],
        claims=[lease.claim_no for lease in leases],
        progress=[*progress] if progress else list[str | None]([None] * len(leases)),
    )
    return [Renewal(row["id"], row["claim_no"], row["cancel"], row["renewed"]) for row in rows]
