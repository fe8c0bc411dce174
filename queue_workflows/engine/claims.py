"""A claim's life on the hot path: take, renew, complete. Complete and take share one round trip."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import db, errors
from queue_workflows.engine import claimed_jobs, job_tables
from queue_workflows.types import Row, Unreadable

CLAIM_LOST = "QW001"
"""The SQLSTATE with which a step says that the claim to complete is no longer held."""


class Claimant(NamedTuple):
    """Who claims, where, and for how long."""

    worker_id: str
    host: str
    queue: str
    lease_s: float = 600
    newest: bool = False
    """Overflow hosts take the newest of the best priority band."""
    lane: int | None = None
    model: str | None = None
    """The warm model."""
    models: list[str] | None = None
    """The models this worker can load; None: any."""
    obey: bool = True
    """Whether an OFF row stops the claim."""
    policy: str = "strict"
    """Of gpu claims: `strict` or `balanced`."""
    grace_s: float = 300.0
    bound_s: float = 2400.0


class NodeResult(NamedTuple):
    """What a completed node leaves: JSON texts, seconds, peak RSS in MB."""

    lease: job_tables.Lease
    context_delta: str
    seconds: float
    vm_rss_mb_peak: int | None = None
    resolved_inputs: str | None = None
    """None when the claim has stored them already."""


class Ahead(NamedTuple):
    """What follows from a node that a worker completes, for the transaction that records it."""

    generation: int
    rows: str | None
    """The rows of a plan as JSON text; None: none."""
    complete: bool


class IngestResult(NamedTuple):
    """What a completed ingest job leaves: JSON text and seconds."""

    lease: job_tables.Lease
    result: str
    seconds: float


_NODE_STEP = (
    b"SELECT queue_workflows_node_step(%s::text, %s::text, %s::text, %s::float8,"
    b" %s::boolean AND NOT EXISTS (SELECT FROM queue_settings s WHERE s.queue = %s::text"
    b" AND s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now())),"
    b" %s::boolean, %s::boolean, %s::boolean, %s::text, %s::text[], %s::smallint, %s::text,"
    b" %s::bigint, %s::jsonb, %s::float8, %s::integer, %s::jsonb, %s::integer, %s::jsonb,"
    b" %s::boolean, %s::text, %s::float8, %s::float8) AS job"
)
_INGEST_STEP = (
    b"SELECT * FROM queue_workflows_ingest_step(%s::text, %s::text, %s::text, %s::float8,"
    b" %s::integer, %s::boolean, %s::boolean, %s::jsonb, %s::boolean)"
)


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
) -> Row | None:
    """Complete `done`, then claim the next node job; one transaction when `conn` is autocommit.

    The job as a dict of what a worker needs, with `run` (id, out_dir, workflow_name, generation,
    born) and, if its template has refs, `context`; None when nothing was claimed. `promote` first
    lets jobs in that have become due. If the JSON of a job cannot be loaded as a whole, a second
    statement loads each column by itself. Raises `ClaimLost` with nothing written or claimed.
    """
    finished: tuple[Any, ...] = (None,) * 6
    if done is not None:
        finished = (
            done.lease.job_id,
            done.lease.claim_no,
            done.context_delta,
            done.seconds,
            done.vm_rss_mb_peak,
            done.resolved_inputs,
        )
    try:
        row = conn.execute(
            _NODE_STEP,
            (
                *(who.worker_id, who.host, who.queue, who.lease_s),
                *(claim, who.queue, who.obey, promote, who.newest, who.model, who.models, who.lane),
                *finished,
                *(ahead or (None, None, None)),
                *(who.policy, who.grace_s, who.bound_s),
            ),
            prepare=True,
        ).fetchone()
    except psycopg.Error as error:
        raise _lost(error) or error from None
    job = row["job"] if row else None
    if isinstance(job, Unreadable):
        return claimed_jobs.read(conn, job_tables.NODE_JOBS, claimed_jobs.id_of(job), who.worker_id)
    return job


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
    tell: Callable[[float], None] | None = None,
) -> list[Row]:
    """Complete all of `done`, then claim up to `claim` ingest jobs, in claim order.

    One transaction when `conn` is autocommit. Raises `ClaimLost`, with nothing written or claimed,
    when any of `done` is no longer held. `tell`: where nothing was claimed, called with the seconds
    until a limit of the queue lets the next in, if that is known.
    """
    finished = None
    if done:
        finished = f"[{','.join(_as_json(d) for d in done)}]"
    try:
        rows = conn.execute(
            _INGEST_STEP,
            (
                *(who.worker_id, who.host, who.queue, who.lease_s),
                *(claim, who.obey, promote, finished, tell is not None),
            ),
            prepare=True,
        ).fetchall()
    except psycopg.Error as error:
        raise _lost(error) or error from None
    if rows and rows[0]["id"] is None:
        if tell is not None and rows[0]["wait_s"] is not None:
            tell(max(0.0, rows[0]["wait_s"]))
        return []
    if len(rows) > 1:
        rows.sort(key=lambda row: (row["priority"], row["seq"]))
    return rows


class Renewal(NamedTuple):
    """What a renewal learned about its job."""

    job_id: str
    claim_no: int
    cancel: bool
    """The job or its run was cancelled, or the run is over."""


def _renewing(table: job_tables.JobTable) -> bytes:
    over = (
        "coalesce((SELECT r.status IN ('completed', 'failed', 'cancelled') FROM workflow_runs r"
        " WHERE r.id = j.run_id), false)"
        if table.in_run
        else "false"
    )
    return (
        sql.SQL(
            "UPDATE {jobs} j SET lease_expires_at = now() + %s::float8 * interval '1 second',"
            " heartbeat_at = now(), progress = coalesce(held.progress, j.progress)"
            " FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::text[]::jsonb[])"
            " AS held (id, claim_no, worker_id, progress)"
            " WHERE j.id = held.id AND j.claim_no = held.claim_no"
            " AND j.worker_id = held.worker_id"
            " AND j.status = 'running'"
            " RETURNING j.id, j.claim_no, j.cancel_requested_at IS NOT NULL OR {over} AS cancel"
        )
        .format(jobs=sql.Identifier(table.name), over=sql.SQL(over))
        .as_bytes(None)
    )


_RENEW = {table.name: _renewing(table) for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)}


def renew(
    conn: db.Connection,
    leases: Sequence[job_tables.Lease],
    *,
    lease_s: float,
    progress: Sequence[str | None] = (),
) -> list[Renewal]:
    """Push the leases of one process and table out by `lease_s`, store progress (JSON texts).

    A lease without a `Renewal` is lost.
    """
    if not leases:
        return []
    rows = conn.execute(
        _RENEW[leases[0].table.name],
        (
            lease_s,
            [lease.job_id for lease in leases],
            [lease.claim_no for lease in leases],
            [lease.worker_id for lease in leases],
            list(progress) or [None] * len(leases),
        ),
        prepare=True,
    ).fetchall()
    return [Renewal(row["id"], row["claim_no"], row["cancel"]) for row in rows]


def is_held(conn: db.Connection, lease: job_tables.Lease) -> bool:
    """Return whether this claim still holds its job."""
    row = conn.execute(_IS_HELD[lease.table.name], job_tables.fence(lease)).fetchone()
    return row is not None


_IS_HELD = {
    table.name: sql.SQL("SELECT FROM {} j WHERE " + job_tables.HELD)
    .format(sql.Identifier(table.name))
    .as_bytes(None)
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
}


def has_recorded(conn: db.Connection, lease: job_tables.Lease, events: Sequence[str]) -> bool:
    """Whether this very claim has left one of these events: its write was committed."""
    # Node events are found through their run and node, which are indexed.
    where = (
        "(e.run_id, e.node_id) = (SELECT j.run_id, j.node_id FROM workflow_node_jobs j"
        " WHERE j.id = %(job)s) AND "
        if lease.table.in_run
        else ""
    )
    row = conn.execute(
        sql.SQL(
            "SELECT 1 FROM {} e WHERE {} e.job_id = %(job)s AND e.claim_no = %(claim)s"
            " AND e.worker_id = %(worker)s AND e.event_type = ANY (%(events)s) LIMIT 1"
        ).format(sql.Identifier(lease.table.events), sql.SQL(where)),
        job_tables.fence(lease, events=list(events)),
    ).fetchone()
    return row is not None
