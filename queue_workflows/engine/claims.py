"""Claim jobs, renew their leases, and complete them in the statement that claims the next ones.

Its length: the statements of both families, for one job and for many, share their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg

from queue_workflows import db, errors
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row, Unreadable

CLAIM_LOST = "QW001"
"""The SQLSTATE of a step whose claim to complete is lost."""


class Claimant(NamedTuple):
    """The worker that claims: its id, machine, queue and lease."""

    worker_id: str
    host: str
    queue: str
    lease_s: float = 600
    newest: bool = False
    """Whether to take the newest job of the best priority: for a machine that takes overflow."""
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


class Wait(NamedTuple):
    """When to claim again, if a claim returned fewer jobs than it may. None: unknown."""

    limit_s: float | None = None
    """Seconds until a limit of an ingest queue admits the next job; None too if one was claimed."""
    due_s: float | None = None
    """Seconds until the next delayed job of the queue is due."""


class OnWait(NamedTuple):
    """What to call with a `Wait`, and how many seconds ahead a claim looks for delayed jobs."""

    call: Callable[[Wait], object]
    within_s: float


class NodeResult(NamedTuple):
    """The result of a completed node: JSON texts, seconds, peak RSS in MB."""

    lease: job_tables.Lease
    context_delta: str
    seconds: float
    vm_rss_mb_peak: int | None = None
    resolved_inputs: str | None = None
    """None if the claim has stored them already."""


class Ahead(NamedTuple):
    """What follows in the run from a completed node, for the transaction that records the node."""

    generation: int
    rows: str | None
    """The rows of a plan as JSON text; None: none."""
    complete: bool
    revision: int = 0


class IngestResult(NamedTuple):
    """The result of a completed ingest job: JSON text and seconds."""

    lease: job_tables.Lease
    result: str
    seconds: float


def claim(
    conn: db.Connection,
    table: job_tables.JobTable,
    who: Claimant,
    *,
    count: int = 1,
    promote: bool = False,
    on_wait: OnWait | None = None,
) -> list[Row]:
    """Claim up to `count` jobs of a queue, and return what a worker needs.

    `promote`: first admit jobs that have become due. `on_wait`: called if fewer jobs were claimed
    and it is known when to claim again.
    """
    if not table.in_run:
        return ingest_step(conn, who, claim=count, promote=promote, on_wait=on_wait)
    if count > 1:
        return nodes_step(conn, who, claim=count, promote=promote, on_wait=on_wait)
    job = node_step(conn, who, promote=promote, on_wait=on_wait)
    return [job] if job else []


def claim_job(
    conn: db.Connection, table: job_tables.JobTable, job_id: str, who: Claimant
) -> str | None:
    """Claim this job, wherever it stands in its queue; return its id, None if it cannot be."""
    statement = statements.claims.claim_node if table.in_run else statements.claims.claim_ingest
    return statement(conn, **_claimant(who), job=job_id)


def _lost(error: psycopg.Error) -> errors.ClaimLost | None:
    if error.sqlstate != CLAIM_LOST:
        return None
    return errors.ClaimLost(error.diag.message_primary or "claim lost")


def node_step(
    conn: db.Connection,
    who: Claimant,
    *,
    done: NodeResult | None = None,
    ahead: Ahead | None = None,
    claim: bool = True,
    promote: bool = False,
    on_wait: OnWait | None = None,
) -> Row | None:
    """Complete `done`, then claim the next node job; one transaction when `conn` is autocommit.

    Returns the job as a dict of what a worker needs, with `run` (id, out_dir, workflow_name,
    generation, born) and, if its template has refs, `context`; None when nothing was claimed.
    `promote`: first admit jobs that have become due. If the JSON of a job cannot be loaded as a
    whole, a second statement loads each column by itself. Raises `ClaimLost` with nothing written
    or claimed. `on_wait`: as in `claim`.
    """
    parameters: dict[str, Any] = {
        **_claimant(who),
        "newest": who.newest,
        "model": who.model,
        "models": who.models,
        "lane": who.lane,
        "policy": who.policy,
        "grace_s": who.grace_s,
        "bound_s": who.bound_s,
        "claim": claim,
        "promote": promote,
        "look_ahead_s": on_wait and on_wait.within_s,
        **completed(done, ahead),
    }
    try:
        job = statements.claims.node_step(conn, **parameters)
    except psycopg.Error as error:
        raise _lost(error) or error from None
    if isinstance(job, Unreadable):
        own = _id_of(job)
        return db.run(conn, read(job_tables.NODE_JOBS, own, who.worker_id))
    return None if on_wait is not None and _reports_wait(job, on_wait) else job


def _reports_wait(job: Row | None, on_wait: OnWait) -> bool:
    """Return whether this is no job but the time at which one is due; report that time."""
    if job is None or "due_s" not in job:
        return False
    on_wait.call(Wait(due_s=job["due_s"]))
    return True


def nodes_step(
    conn: db.Connection,
    who: Claimant,
    *,
    done: Sequence[tuple[NodeResult, Ahead | None]] = (),
    claim: int = 1,
    promote: bool = False,
    on_wait: OnWait | None = None,
) -> list[Row]:
    """Complete all of `done`, then claim up to `claim` nodes of a cpu queue, as `node_step` does.

    Returns the jobs. This is one transaction when `conn` is autocommit. Raises `ClaimLost`, with
    nothing written or claimed, when a claim of `done` is lost. `on_wait`: as in `claim`.
    """
    parameters: dict[str, Any] = {
        **_claimant(who),
        "newest": who.newest,
        "claim": claim,
        "promote": promote,
        "look_ahead_s": on_wait and on_wait.within_s,
        "done": f"[{','.join(node_json(*each) for each in done)}]" if done else None,
    }
    try:
        claimed = statements.claims.nodes_step(conn, **parameters)
    except psycopg.Error as error:
        raise _lost(error) or error from None
    jobs: list[Row] = []
    for job in claimed:
        if isinstance(job, Unreadable):
            own = _id_of(job)
            job = db.run(conn, read(job_tables.NODE_JOBS, own, who.worker_id))
        if job is not None and not (on_wait is not None and _reports_wait(job, on_wait)):
            jobs.append(job)
    return jobs


def node_json(done: NodeResult, ahead: Ahead | None) -> str:
    """Return a completed node and what follows from it, as an element of `nodes_step`."""
    # The JSON texts are checked already; encoding them again would cost a second walk.
    given = {
        "id": done.lease.job_id,
        "claim_no": done.lease.claim_no,
        "seconds": done.seconds,
        "rss_mb": done.vm_rss_mb_peak,
        "generation": ahead and ahead.generation,
        "revision": ahead.revision if ahead else 0,
        "complete": ahead and ahead.complete,
    }
    texts = {
        "result": done.context_delta,
        "received": done.resolved_inputs,
        "rows": ahead and ahead.rows,
    }
    more = "".join(f',"{name}":{text}' for name, text in texts.items() if text is not None)
    return f"{json.dumps(given)[:-1]}{more}}}"


def completed(done: NodeResult | None, ahead: Ahead | None) -> dict[str, Any]:
    """Return the parameters of `node_step` about a completed node and what follows from it."""
    lease, result, seconds, rss_mb, received = done or (None,) * 5
    generation, rows, complete, revision = ahead or (None, None, None, 0)
    return {
        "job": lease and lease.job_id,
        "claim_no": lease and lease.claim_no,
        "result": result,
        "seconds": seconds,
        "rss_mb": rss_mb,
        "received": received,
        "generation": generation,
        "revision": revision,
        "rows": rows,
        "complete": complete,
    }


def _claimant(who: Claimant) -> dict[str, Any]:
    return {
        "worker": who.worker_id,
        "host": who.host,
        "queue": who.queue,
        "lease_s": who.lease_s,
        "obey": who.obey,
        "versions": who.versions,
    }


def _as_json(done: IngestResult) -> str:
    # The result is checked JSON text already; encoding it again would cost a second walk.
    return (
        f'{{"id":{json.dumps(done.lease.job_id)},"claim_no":{done.lease.claim_no},'
        f'"seconds":{done.seconds!r},"result":{done.result}}}'
    )


def ingest_step(
    conn: db.Connection,
    who: Claimant,
    *,
    done: Sequence[IngestResult] = (),
    claim: int = 1,
    promote: bool = False,
    on_wait: OnWait | None = None,
) -> list[Row]:
    """Complete all of `done`, then claim up to `claim` ingest jobs; return them in claim order.

    This is one transaction when `conn` is autocommit. Raises `ClaimLost`, with nothing written or
    claimed, when a claim of `done` is lost. `on_wait`: as in `claim`.
    """
    parameters: dict[str, Any] = {
        **_claimant(who),
        "claim": claim,
        "promote": promote,
        "done": f"[{','.join(_as_json(d) for d in done)}]" if done else None,
        "look_ahead_s": on_wait and on_wait.within_s,
    }
    try:
        rows = statements.claims.ingest_step(conn, **parameters)
    except psycopg.Error as error:
        raise _lost(error) or error from None
    if on_wait is not None and rows and rows[-1]["id"] is None:
        last = rows.pop()
        on_wait.call(Wait(last["wait_s"], last["due_s"]))
    if len(rows) > 1:
        rows.sort(key=lambda row: (row["priority"], row["seq"]))
    return rows


class Renewal(NamedTuple):
    """What the renewal of a lease returns about its job."""

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


def read(table: job_tables.JobTable, job_id: str, worker_id: str) -> db.Script[Row | None]:
    """Return what a worker needs of a job that it holds, each column loaded by itself.

    A node's `context` is left out. None: the worker does not hold the job any more.
    """
    statement = statements.claimed_jobs.node if table.in_run else statements.claimed_jobs.ingest
    return statement.script(job=job_id, worker=worker_id)


def _id_of(document: Unreadable) -> str:
    """Return the id that a claimed node's JSON document begins with."""
    text = document.raw.decode(errors="replace")
    return json.JSONDecoder().raw_decode(text, len('{"id":'))[0]


def is_held(conn: db.Connection, lease: job_tables.Lease) -> bool:
    """Return whether this claim still holds its job."""
    is_held = statements.claims.is_held[lease.table.name]
    return is_held(conn, **job_tables.fence(lease)) is not None


def has_recorded(lease: job_tables.Lease, events: Sequence[str]) -> db.Script[bool]:
    """Return whether this very claim has left one of these events: its write was committed."""
    in_run = lease.table.in_run
    recorded = (
        statements.claims.has_recorded_node if in_run else statements.claims.has_recorded_ingest
    )
    row = yield from recorded.script(**job_tables.fence(lease, events=list(events)))
    return row is not None


def held_by(conn: db.Connection, table: job_tables.JobTable, prefix: str) -> list[job_tables.Lease]:
    """Return the claims of workers whose id starts with `prefix`."""
    return [
        job_tables.lease_of(table, row)
        for row in statements.claims.held_by[table.name](conn, prefix=prefix)
    ]
