"""The two tables of jobs, and `Lease`: what identifies one claim."""

from __future__ import annotations

from typing import Any, NamedTuple

from psycopg import sql


class JobTable(NamedTuple):
    """What sets one job family apart; most statements over jobs are written once for both."""

    name: str
    result: str
    """The column that takes the result of a handler."""
    events: str
    in_run: bool
    """Whether jobs are nodes of a run: they have an outbox, and end when their run ends."""


NODE_JOBS = JobTable("workflow_node_jobs", "context_delta", "workflow_node_events", in_run=True)
INGEST_JOBS = JobTable("ingest_jobs", "result", "ingest_job_events", in_run=False)


class Lease(NamedTuple):
    """One claim. Every write about a running job requires all of its fields to match."""

    table: JobTable
    job_id: str
    worker_id: str
    claim_no: int


def lease_of(table: JobTable, job: dict[str, Any]) -> Lease:
    """Return the lease of a row as its claim returned it."""
    return Lease(table, job["id"], job["worker_id"], job["claim_no"])


TERMINAL = ("completed", "failed", "cancelled")
"""Terminal states of runs; those of jobs include `skipped` too."""
LAST_GENERATION = 1_000_000
"""The last generation that the database allows; a retry adds one, or two in a run. Statements have
it as a number."""

# The attempt of a node's event is a smallint, its job's an integer: no counter may keep a job from
# its end.
_STATEMENT = sql.SQL(
    "WITH {chosen}done AS ({change} RETURNING j.*), logged AS ("
    "INSERT INTO {events} ({node_columns} job_id, attempt, event_type, claim_no, worker_id,"
    " host_label, queue, elapsed_s, error, detail{actor_column})"
    " SELECT {node_values} id, {attempt}, {event}, claim_no, %(worker)s::text, {host}, queue,"
    " %(seconds)s::float8, {error}, coalesce(%(detail)s::jsonb, '{{}}'){actor} FROM done){sent}"
    " SELECT * FROM done"
)
_ACTOR = sql.SQL(", CASE WHEN %(worker)s::text IS NULL THEN queue_workflows_actor() END")
_SENT = sql.SQL(
    ", sent AS (INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no,"
    " generation) SELECT run_id, node_id, status, id, claim_no, generation FROM done"
    " WHERE status IN ('completed', 'failed', 'awaiting_input'))"
)
_RECEIVED = sql.SQL("resolved_inputs = coalesce(%(received)s::jsonb, j.resolved_inputs),")
_ASKED_TO_END = sql.SQL("(j.cancel_requested_at IS NOT NULL)")
_OVER = sql.SQL(
    "(j.cancel_requested_at IS NOT NULL OR EXISTS (SELECT FROM workflow_runs r"
    " WHERE r.id = j.run_id AND r.status IN ('completed', 'failed', 'cancelled')))"
)


def transition(
    table: JobTable, change: sql.SQL, *, event: sql.SQL, chosen: sql.SQL = sql.SQL("")
) -> bytes:
    """A statement that makes `change`, with its event and its outbox row; returns the changed rows.

    `change` is an UPDATE of `{jobs} j` without RETURNING; `{result}` is filled in too, and
    `{over}`: its end was asked for, or its run is over; `{received}` sets what a node received.
    `event` is an expression over `done`, the changed rows; `chosen` a CTE, with its comma, that
    `change` selects from. Parameters besides theirs: worker, seconds, error, detail. What becomes
    of an ingest job that does not run a trigger logs: `unlogged`.
    """
    parts = _parts(table)
    return _STATEMENT.format(
        chosen=chosen.format(**parts),
        change=change.format(**parts),
        events=sql.Identifier(table.events),
        node_columns=sql.SQL("run_id, node_id, model," if table.in_run else ""),
        node_values=sql.SQL("run_id, node_id, required_model," if table.in_run else ""),
        event=event,
        # The trigger has cleared it where the job is queued again; the snapshot has the old row.
        host=sql.SQL(
            "coalesce(claimed_by, (SELECT o.claimed_by FROM {} o WHERE o.id = done.id))"
        ).format(sql.Identifier(table.name)),
        # The history of nodes has a smallint, their rows an integer.
        attempt=sql.SQL("greatest(0, least(attempts, 32767))" if table.in_run else "attempts"),
        error=sql.SQL("coalesce(%(error)s::text, error)"),
        actor_column=sql.SQL("" if table.in_run else ", actor"),
        actor=sql.SQL("") if table.in_run else _ACTOR,
        sent=_SENT if table.in_run else sql.SQL(""),
    ).as_bytes(None)


def unlogged(table: JobTable, change: sql.SQL) -> bytes:
    """`change` as in `transition`, whose event a trigger writes; returns the changed rows."""
    return (change.format(**_parts(table)) + sql.SQL(" RETURNING j.*")).as_bytes(None)


def _parts(table: JobTable) -> dict[str, sql.Composable]:
    return {
        "jobs": sql.Identifier(table.name),
        "result": sql.Identifier(table.result),
        "over": _OVER if table.in_run else _ASKED_TO_END,
        "received": _RECEIVED if table.in_run else sql.SQL(""),
    }


def fence(lease: Lease, **parameters: Any) -> dict[str, Any]:
    """Return the parameters of a fenced statement: those that identify the claim, and others."""
    claim = {"job": lease.job_id, "worker": lease.worker_id, "claim": lease.claim_no}
    return claim | parameters
