"""Every other transition of a job, once for both families, each with its event and outbox row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql

from queue_workflows import config, db, errors
from queue_workflows.dag import policy
from queue_workflows.store import endings, events, isolation, payload, quarantine, tables
from queue_workflows.store.tables import HELD
from queue_workflows.types import Row

FRONT_PRIORITY = 10
"""The priority that work taken back from a worker gets at most (the contract's figure)."""

# A row may hold counters that no engine counted: below 0 counts as 0, and a sum never overflows.
_MADE: Final = "least(greatest(j.attempts, 0), 999999) + 1"
_CRASHES: Final = "least(greatest(j.crash_count, 0), 999999) + 1"
_TRIPS: Final = "least(greatest(j.watchdog_retries, 0), 999999) + 1"
_MOST: Final = "least(greatest(j.max_attempts, %(most)s::integer), 1000000)"
_AGAIN: Final = _MADE + " < " + _MOST + " AND %(retry)s::boolean"
_FAIL = sql.SQL(
    "UPDATE {jobs} j SET {received} status = CASE WHEN {over} THEN 'cancelled' WHEN "
    + _AGAIN
    + " THEN 'queued' ELSE 'failed' END, attempts = "
    + _MADE
    + ", max_attempts = "
    + _MOST
    + ", error = %(error)s, seconds = %(seconds)s::float8,"
    " finished_at = CASE WHEN {over} OR NOT ("
    + _AGAIN
    + ") THEN now() END, available_at = CASE WHEN "
    + _AGAIN
    + " AND NOT {over} AND coalesce(%(after)s::float8, 1) > 0 THEN now() + interval '1 second'"
    " * coalesce(%(after)s::float8, least(("
    + _MADE
    + ") * %(backoff)s::float8, %(longest)s::float8)) END,"
    " worker_id = NULL, lease_expires_at = NULL WHERE " + HELD
)
_FAIL_EVENT = sql.SQL("CASE status WHEN 'queued' THEN 'retried' ELSE status END")
_PARK = sql.SQL(
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'awaiting_input' END,"
    " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL"
    " WHERE " + HELD
)
_PARK_EVENT = sql.SQL("CASE status WHEN 'awaiting_input' THEN 'parked' ELSE status END")
_HAND_BACK = sql.SQL(
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'queued' END,"
    " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL,"
    " available_at = CASE WHEN NOT {over} AND %(after)s::float8 > 0"
    " THEN now() + %(after)s::float8 * interval '1 second' END,"
    " priority = CASE WHEN %(front)s::boolean THEN least(j.priority, %(band)s::smallint)"
    " ELSE j.priority END WHERE " + HELD
)
_TRIP = sql.SQL(
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled'"
    " WHEN " + _TRIPS + " <= %(cap)s::integer THEN 'queued' ELSE 'failed' END,"
    " watchdog_retries = " + _TRIPS + ", error = %(error)s, seconds = %(seconds)s::float8,"
    " finished_at = CASE WHEN {over} OR " + _TRIPS + " > %(cap)s::integer THEN now() END,"
    " priority = CASE WHEN " + _TRIPS + " <= %(cap)s::integer"
    " THEN least(j.priority, %(band)s::smallint) ELSE j.priority END,"
    " worker_id = NULL, lease_expires_at = NULL WHERE " + HELD
)
_HAND_BACK_ALL = sql.SQL(
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'queued' END,"
    " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL"
    " FROM unnest(%(held)s::text[], %(claims)s::bigint[]) AS held (id, claim_no)"
    " WHERE j.id = held.id AND j.claim_no = held.claim_no AND j.worker_id = %(worker)s"
    " AND j.status = 'running'"
)
_BACK_EVENT = sql.SQL("CASE status WHEN 'queued' THEN 'requeued' ELSE status END")

_CRASHED = sql.SQL(
    "UPDATE {jobs} j SET crash_count = " + _CRASHES + ", worker_id = NULL,"
    " lease_expires_at = NULL, status = CASE WHEN {over} THEN 'cancelled'"
    " WHEN " + _CRASHES + " >= %(cap)s::integer THEN 'failed' ELSE 'queued' END,"
    " finished_at = CASE WHEN {over} OR " + _CRASHES + " >= %(cap)s::integer THEN now() END,"
    " error = CASE WHEN NOT {over} AND " + _CRASHES + " >= %(cap)s::integer THEN"
    " 'poison: took down ' || (" + _CRASHES + ") || ' workers, the last one '"
    " || coalesce(j.worker_id, j.claimed_by, '?') || coalesce('; ' || %(error)s::text, '')"
    " || coalesce('; last beat ' || to_char(j.heartbeat_at AT TIME ZONE 'UTC',"
    " 'YYYY-MM-DD HH24:MI:SS') || ' UTC', '') END,"
    " priority = CASE WHEN j.crash_count <= 0 THEN least(j.priority, %(band)s::smallint)"
    " ELSE j.priority END,"
    " available_at = CASE WHEN j.crash_count > 0 AND " + _CRASHES + " < %(cap)s::integer AND"
    " NOT {over} THEN now() + (" + _CRASHES + ") * %(backoff)s::float8 * interval '1 second' END"
    " WHERE j.id = ANY (ARRAY(SELECT id FROM chosen))"
)
_CRASH_EVENT = sql.SQL("CASE status WHEN 'queued' THEN 'reclaimed' ELSE status END")
_IS_LAPSED = "status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at < now())"
_WATCHED = (
    "(%(had)s::float8 IS NULL OR heartbeat_at IS NULL"
    " OR heartbeat_at >= now() - %(had)s::float8 * interval '1 second')"
)
_UNWATCHED = "heartbeat_at < now() - %(had)s::float8 * interval '1 second'"
_LAPSED = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE " + _IS_LAPSED + " AND " + _WATCHED + ""
    " ORDER BY lease_expires_at LIMIT 100 FOR UPDATE SKIP LOCKED), "
)
_LAPSED_AMONG = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE id = ANY (%(ids)s::text[])"
    " AND (" + _IS_LAPSED + " AND " + _WATCHED + ") IS TRUE FOR UPDATE SKIP LOCKED), "
)
_UNWATCHED_LAPSED = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE " + _IS_LAPSED + " AND " + _UNWATCHED + ""
    " ORDER BY lease_expires_at LIMIT 100 FOR UPDATE SKIP LOCKED), "
)
_UNWATCHED_AMONG = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE id = ANY (%(ids)s::text[])"
    " AND (" + _IS_LAPSED + " AND " + _UNWATCHED + ") IS TRUE FOR UPDATE SKIP LOCKED), "
)
_EXCUSED = sql.SQL(
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'queued' END,"
    " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL,"
    " priority = least(j.priority, %(band)s::smallint)"
    " WHERE j.id = ANY (ARRAY(SELECT id FROM chosen))"
)
LIFE_LOCK = "queue_workflows.worker."
"""With a worker id behind it: the name of the advisory lock that the worker's session holds."""
# `detail` is what a worker wrote: a cast of its text to boolean would raise for any other word.
_IS_GONE = (
    " FROM {jobs} q JOIN workers w USING (worker_id)"
    " WHERE q.status = 'running' AND w.detail -> 'lock' = 'true'::jsonb"
    " AND q.heartbeat_at < now() - %(silent)s::float8 * interval '1 second'"
    " AND w.last_seen < now() - %(silent)s::float8 * interval '1 second'"
    " AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND ((l.classid::bigint << 32) | l.objid::bigint)"
    " = hashtextextended(%(lock)s::text || q.worker_id, 0))"
)
_GONE = sql.SQL(
    "chosen AS MATERIALIZED (SELECT q.id" + _IS_GONE + " LIMIT 100 FOR UPDATE OF q SKIP LOCKED), "
)
_GONE_AMONG = sql.SQL(
    "chosen AS MATERIALIZED (SELECT q.id" + _IS_GONE + " AND q.id = ANY (%(ids)s::text[])"
    " FOR UPDATE OF q SKIP LOCKED), "
)
_OF_DEAD = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE status = 'running'"
    " AND starts_with(worker_id, %(prefix)s::text) FOR UPDATE), "
)
_OF_CLAIM = sql.SQL(
    "chosen AS MATERIALIZED (SELECT id FROM {jobs} WHERE id = %(job)s AND status = 'running'"
    " AND worker_id = %(worker)s AND claim_no = %(claim)s FOR UPDATE), "
)


def _both(change: sql.SQL, event: sql.SQL, chosen: sql.SQL = sql.SQL("")) -> dict[str, bytes]:
    return {
        table.name: tables.transition(table, change, event=event, chosen=chosen)
        for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
    }


_FAIL_SQL = _both(_FAIL, _FAIL_EVENT)
_PARK_SQL = tables.transition(tables.NODE_JOBS, _PARK, event=_PARK_EVENT)
_HAND_BACK_SQL = _both(_HAND_BACK, _BACK_EVENT)
_HAND_BACK_ALL_SQL = _both(_HAND_BACK_ALL, _BACK_EVENT)
_TRIP_SQL = _both(_TRIP, _BACK_EVENT)
_RECLAIM_SQL = _both(_CRASHED, _CRASH_EVENT, _LAPSED)
_GONE_SQL = _both(_CRASHED, _CRASH_EVENT, _GONE)
_RECLAIM_AMONG_SQL = _both(_CRASHED, _CRASH_EVENT, _LAPSED_AMONG)
_GONE_AMONG_SQL = _both(_CRASHED, _CRASH_EVENT, _GONE_AMONG)


def _lapsed_ids(table: tables.JobTable, also: sql.SQL) -> bytes:
    return (
        sql.SQL(
            "SELECT id FROM {jobs} WHERE " + _IS_LAPSED + " AND {also}"
            " AND id <> ALL (%(aside)s::text[]) ORDER BY lease_expires_at LIMIT 100"
        )
        .format(jobs=sql.Identifier(table.name), also=also)
        .as_bytes(None)
    )


_FAMILIES = (tables.NODE_JOBS, tables.INGEST_JOBS)
_LAPSED_IDS = {table.name: _lapsed_ids(table, sql.SQL(_WATCHED)) for table in _FAMILIES}
_UNWATCHED_IDS = {table.name: _lapsed_ids(table, sql.SQL(_UNWATCHED)) for table in _FAMILIES}
_GONE_IDS = {
    table.name: sql.SQL("SELECT q.id" + _IS_GONE + " AND q.id <> ALL (%(aside)s::text[]) LIMIT 100")
    .format(jobs=sql.Identifier(table.name))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}
_ENDS = {"workflow_node_jobs": endings.node_job, "ingest_jobs": endings.ingest_job}
_DEAD_SQL = _both(_CRASHED, _CRASH_EVENT, _OF_DEAD)
_EXCUSE_LAPSED_SQL = _both(_EXCUSED, _BACK_EVENT, _UNWATCHED_LAPSED)
_EXCUSE_AMONG_SQL = _both(_EXCUSED, _BACK_EVENT, _UNWATCHED_AMONG)
_CHARGE_SQL = _both(_CRASHED, _CRASH_EVENT, _OF_CLAIM)


def fail(
    conn: db.Connection,
    lease: tables.Lease,
    *,
    error: str,
    seconds: float | None = None,
    detail: str | None = None,
    resolved_inputs: str | None = None,
    retry: bool = True,
    after_s: float | None = None,
    most: int = 1,
) -> Row | None:
    """An ordinary failure: queued again while attempts are left, else failed.

    `retry` false: failed whatever is left. `after_s` None: the default wait. `most`: what
    `max_attempts` becomes if it is less. None: the claim is lost.
    """
    parameters = tables.fence(
        lease,
        error=error,
        seconds=seconds,
        detail=detail,
        received=resolved_inputs,
        retry=retry,
        after=after_s,
        most=most,
        backoff=policy.BASE_S,
        longest=policy.MAX_WAIT_S,
    )
    return conn.execute(_FAIL_SQL[lease.table.name], parameters).fetchone()


def policy_of(conn: db.Connection, lease: tables.Lease) -> Row | None:
    """`policy`, `attempts` and `max_attempts` of a job; None: there is no such job."""
    return conn.execute(_POLICY[lease.table.name], (lease.job_id,)).fetchone()


_POLICY = {
    table.name: sql.SQL(
        "SELECT policy, greatest(attempts, 0) AS attempts, max_attempts FROM {} WHERE id = %s"
    )
    .format(sql.Identifier(table.name))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}


def park(conn: db.Connection, lease: tables.Lease) -> Row | None:
    """An input node waits for its answer; None: the claim is lost."""
    return conn.execute(_PARK_SQL, tables.fence(lease)).fetchone()


def hand_back(
    conn: db.Connection,
    lease: tables.Lease,
    *,
    reason: str,
    front: bool = False,
    after_s: float = 0.0,
) -> Row | None:
    """Give the job up without counting anything: queued, or cancelled if it or its run was.

    `front` raises its priority to FRONT_PRIORITY; `after_s` lets it wait first. None: the claim
    is lost.
    """
    detail = payload.encode({"reason": reason}, "reason")
    parameters = tables.fence(lease, detail=detail, front=front, band=FRONT_PRIORITY, after=after_s)
    return conn.execute(_HAND_BACK_SQL[lease.table.name], parameters).fetchone()


def hand_back_all(conn: db.Connection, leases: Sequence[tables.Lease], *, reason: str) -> list[Row]:
    """Give up these claims of one worker and table as `hand_back` does; the changed rows.

    Each keeps its place in the queue. A claim that is lost is left alone, as is one whose change
    the database refuses: see `quarantine.each`.
    """
    if not leases:
        return []
    parameters = {
        "held": [lease.job_id for lease in leases],
        "claims": [lease.claim_no for lease in leases],
        "worker": leases[0].worker_id,
        "seconds": None,
        "error": None,
        "detail": payload.encode({"reason": reason}, "reason"),
    }
    statement = _HAND_BACK_ALL_SQL[leases[0].table.name]
    return quarantine.together(
        conn,
        lambda: conn.execute(statement, parameters).fetchall(),
        lambda: leases,
        lambda lease: hand_back(conn, lease, reason=reason),
    )


def trip(
    conn: db.Connection,
    lease: tables.Lease,
    *,
    error: str,
    seconds: float,
    detail: str | None = None,
) -> Row | None:
    """Record a watchdog's verdict: a node is queued again up to WATCHDOG_MAX_RETRIES, with at most
    FRONT_PRIORITY; an ingest job fails.

    None: the claim is lost.
    """
    cap = config.WATCHDOG_MAX_RETRIES.read() if lease.table.in_run else 0
    parameters = tables.fence(
        lease, error=error, seconds=seconds, detail=detail, cap=cap, band=FRONT_PRIORITY
    )
    return conn.execute(_TRIP_SQL[lease.table.name], parameters).fetchone()


def _crash_parameters(error: str | None, **more: Any) -> dict[str, Any]:
    return {
        "worker": None,
        "seconds": None,
        "error": error,
        "detail": None,
        "had": None,
        "cap": config.MAX_CRASHES.read(),
        "band": FRONT_PRIORITY,
        "backoff": config.CRASH_BACKOFF_S.read(),
    } | more


def reclaim_lapsed(
    conn: db.Connection, table: tables.JobTable, *, had_s: float | None = None
) -> list[Row]:
    """Take back up to 100 jobs whose lease has lapsed, counting a crash each; the changed rows.

    Queued again at the front the first time, later after CRASH_BACKOFF_S times the crashes; failed
    as poison at MAX_CRASHES; cancelled when the run is over. Skips rows that are locked. `had_s`:
    leaves those to `excuse_lapsed`, called with the same, that it takes back.
    """
    parameters = _crash_parameters(None, had=had_s)
    return conn.execute(_RECLAIM_SQL[table.name], parameters).fetchall()


def excuse_lapsed(conn: db.Connection, table: tables.JobTable, *, had_s: float) -> list[Row]:
    """Take back up to 100 jobs with a lapsed lease that were renewed last over `had_s` ago.

    Counts nothing: the caller has had the database for `had_s` seconds only, and a worker whose
    renewals failed before is no dead one. Queued at the front, or cancelled; the changed rows.
    """
    detail = payload.encode({"reason": "its lease lapsed while the database was away"}, "reason")
    parameters = _crash_parameters(None, had=had_s, detail=detail)
    return conn.execute(_EXCUSE_LAPSED_SQL[table.name], parameters).fetchall()


def excused_duty(table: tables.JobTable, had_s: float) -> isolation.Duty:
    """Return `excuse_lapsed` as a duty that leaves out rows which raise."""
    detail = payload.encode({"reason": "its lease lapsed while the database was away"}, "reason")
    return isolation.Duty(
        f"hand-back in {table.name}",
        _EXCUSE_LAPSED_SQL[table.name],
        _UNWATCHED_IDS[table.name],
        _EXCUSE_AMONG_SQL[table.name],
        _ENDS[table.name],
        lambda: _crash_parameters(None, had=had_s, detail=detail),
    )


def excuse(conn: db.Connection, lease: tables.Lease, *, ended: bool = True) -> bool:
    """Undo what the end of this claim has cost its job, as the database kept it from its worker.

    A claim that is still held goes back uncounted, unless its process may still run (`ended`
    false); a crash that was counted for it is taken back, once, with a `death` event, also after
    the job has ended. Returns whether anything was changed. A job that has failed as poison
    meanwhile keeps its status and its count.
    """
    with conn.transaction():
        if ended and hand_back(conn, lease, reason=_NO_DATABASE) is not None:
            return True
        row = conn.execute(_REFUND_SQL[lease.table.name], tables.fence(lease)).fetchone()
        if row is None:
            return False
        detail = payload.encode({"charged": False, "reason": _NO_DATABASE}, "reason")
        job = row | {"worker_id": lease.worker_id, "claim_no": lease.claim_no}
        events.note(conn, lease.table, job, "death", detail=detail, error=_NO_DATABASE)
        return True


_NO_DATABASE = "its worker could not reach the database"


def _refunding(table: tables.JobTable) -> bytes:
    of_claim = sql.SQL(
        "SELECT FROM {events} e WHERE {found} e.job_id = j.id AND e.claim_no = %(claim)s"
    ).format(
        events=sql.Identifier(table.events),
        # Node events are found through their run and node, which are indexed.
        found=sql.SQL("e.run_id = j.run_id AND e.node_id = j.node_id AND" if table.in_run else ""),
    )
    return (
        sql.SQL(
            "UPDATE {jobs} j SET crash_count = j.crash_count - 1 WHERE j.id = %(job)s"
            " AND j.crash_count > 0"
            # The error of a poisoned job names its count; both stay as they are.
            " AND (j.status = 'failed' AND starts_with(j.error, 'poison: ')) IS NOT TRUE"
            " AND EXISTS ({of_claim} AND e.event_type = 'claimed' AND e.worker_id = %(worker)s)"
            " AND EXISTS ({of_claim} AND e.event_type = 'reclaimed')"
            " AND NOT EXISTS ({of_claim} AND e.event_type = 'death') RETURNING j.*"
        )
        .format(jobs=sql.Identifier(table.name), of_claim=of_claim)
        .as_bytes(None)
    )


_REFUND_SQL = {table.name: _refunding(table) for table in (tables.NODE_JOBS, tables.INGEST_JOBS)}


def lapsed_duty(table: tables.JobTable, had_s: float | None = None) -> isolation.Duty:
    """Return `reclaim_lapsed` as a duty that leaves out rows which raise."""
    return isolation.Duty(
        f"reclaim in {table.name}",
        _RECLAIM_SQL[table.name],
        _LAPSED_IDS[table.name],
        _RECLAIM_AMONG_SQL[table.name],
        _ENDS[table.name],
        lambda: _crash_parameters(None, had=had_s),
    )


def gone_duty(table: tables.JobTable, silent_s: float) -> isolation.Duty:
    """Return `reclaim_gone` as a duty that leaves out rows which raise."""
    return isolation.Duty(
        f"reclaim of gone workers in {table.name}",
        _GONE_SQL[table.name],
        _GONE_IDS[table.name],
        _GONE_AMONG_SQL[table.name],
        _ENDS[table.name],
        lambda: _gone_parameters(silent_s),
    )


def reclaim_dead(
    conn: db.Connection, table: tables.JobTable, *, prefix: str, evidence: str
) -> list[Row]:
    """Take back at once what a process held that is known to be dead (`worker_id` starts so).

    A job whose change the database refuses is left to its lease: see `quarantine.each`.
    """
    parameters = _crash_parameters(evidence, prefix=prefix)
    return quarantine.together(
        conn,
        lambda: conn.execute(_DEAD_SQL[table.name], parameters).fetchall(),
        lambda: held_by(conn, table, prefix),
        lambda lease: charge(conn, lease, evidence=evidence),
    )


def charge(conn: db.Connection, lease: tables.Lease, *, evidence: str) -> Row | None:
    """Give the job up and count a crash, as `reclaim_lapsed` does; None: the claim is lost."""
    parameters = _crash_parameters(evidence) | tables.fence(lease, error=evidence)
    return conn.execute(_CHARGE_SQL[lease.table.name], parameters).fetchone()


def reclaim_gone(conn: db.Connection, table: tables.JobTable, silent_s: float) -> list[Row]:
    """Take back what a worker held whose session is gone and that has not renewed for `silent_s`.

    Its session held an advisory lock for as long as it lived; a worker that never had one is left
    to its lease. A crash is counted, as by `reclaim_lapsed`. The changed rows.
    """
    return conn.execute(_GONE_SQL[table.name], _gone_parameters(silent_s), prepare=True).fetchall()


def _gone_parameters(silent_s: float) -> dict[str, Any]:
    evidence = f"its session is gone, and it has not renewed for {silent_s:g} s"
    return _crash_parameters(evidence, silent=silent_s, lock=LIFE_LOCK)


def held_by(
    conn: db.Connection, table: tables.JobTable, prefix: str, *, but: Collection[int] = ()
) -> list[tables.Lease]:
    """The claims of workers whose id starts with `prefix`, but for the jobs of these `seq`."""
    parameters = {"prefix": prefix, "seqs": [*but]}
    rows = conn.execute(_HELD_BY[table.name], parameters).fetchall()
    return [tables.lease_of(table, row) for row in rows]


def cancelled_since(
    conn: db.Connection, table: tables.JobTable, prefix: str, *, seqs: Collection[int] | None = None
) -> list[float | None]:
    """Of each job that such workers hold: for how many seconds it has been cancelled, or None.

    By the request, or by the end of its run. `seqs`: of these jobs alone.
    """
    parameters = {"prefix": prefix, "seqs": None if seqs is None else [*seqs]}
    rows = conn.execute(_CANCELLED_SINCE[table.name], parameters).fetchall()
    return [row["since_s"] for row in rows]


_HELD_BY = {
    table.name: sql.SQL(
        "SELECT id, worker_id, claim_no FROM {}"
        " WHERE status = 'running' AND starts_with(worker_id, %(prefix)s)"
        # As the shared status has them, which is exact up to 2^53.
        " AND seq::float8 <> ALL (%(seqs)s::float8[]) ORDER BY seq"
    )
    .format(sql.Identifier(table.name))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}
_RUN_ENDED = sql.SQL(
    "(SELECT coalesce(r.finished_at, r.updated_at) FROM workflow_runs r"
    " WHERE r.id = j.run_id AND r.status IN ('completed', 'failed', 'cancelled'))"
)
_CANCELLED_SINCE = {
    table.name: sql.SQL(
        "SELECT extract(epoch FROM now() - coalesce(j.cancel_requested_at, {ended}))::float8"
        " AS since_s FROM {jobs} j WHERE j.status = 'running'"
        " AND starts_with(j.worker_id, %(prefix)s)"
        " AND (%(seqs)s::float8[] IS NULL OR j.seq::float8 = ANY (%(seqs)s::float8[]))"
    )
    .format(jobs=sql.Identifier(table.name), ended=_RUN_ENDED if table.in_run else sql.SQL("NULL"))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}


_ANEW: Final = (
    "UPDATE {jobs} j SET status = 'queued', generation = j.generation + 1, error = NULL,"
    " finished_at = NULL, started_at = NULL, attempts = 0, crash_count = 0,"
    " watchdog_retries = 0, cancel_requested_at = NULL, blocked_reason = NULL,"
    " available_at = NULL, progress = NULL,"
    " {result} = NULL WHERE j.status IN ('failed', 'cancelled')"
    " AND j.generation < 1000000"
)
_REOPEN = tables.unlogged(tables.INGEST_JOBS, sql.SQL(_ANEW + " AND j.id = %(job)s"))
_REOPEN_ALL = tables.unlogged(tables.INGEST_JOBS, sql.SQL(_ANEW + " AND j.id = ANY (%(jobs)s)"))


def reopen_ingest(conn: db.Connection, job_id: str) -> Row | None:
    """A failed or cancelled ingest job → queued in a new generation, counters at zero; or None.

    Raises `IdempotencyClash`, with nothing written, when its idempotency key is another job's now.
    """
    try:
        with conn.transaction():
            return conn.execute(_REOPEN, {"job": job_id}).fetchone()
    except psycopg.errors.UniqueViolation as error:
        found = conn.execute(_KEY_OWNER, (job_id,)).fetchone()
        if error.diag.constraint_name != "ingest_jobs_idempotency_idx" or found is None:
            raise
    raise errors.IdempotencyClash(
        f"job {job_id!r} cannot run again: its idempotency key {found['key']!r} is that of job "
        f"{found['id']!r} now",
        found["id"],
    )


_KEY_OWNER = (
    "SELECT o.id, o.idempotency_key AS key FROM ingest_jobs j"
    " JOIN ingest_jobs o ON o.idempotency_key = j.idempotency_key AND NOT o.idempotency_released"
    " WHERE j.id = %s"
)


def reopen_ingest_all(conn: db.Connection, job_ids: Sequence[str]) -> list[Row]:
    """`reopen_ingest` of each; the rows of those that were failed or cancelled."""
    return conn.execute(_REOPEN_ALL, {"jobs": list(job_ids)}).fetchall()


def release_strays(
    conn: db.Connection, table: tables.JobTable, worker_id: str, keep: list[str]
) -> list[Row]:
    """Queue again, counting nothing, what a worker holds without knowing it; the changed rows.

    Such claims come from commits whose reply was lost. `keep` are the job ids that it does know.
    """
    parameters = {"worker": worker_id, "keep": keep, "seconds": None, "error": None}
    reason = "claimed unknowingly"
    parameters["detail"] = payload.encode({"reason": reason}, "reason")

    def strays() -> list[tables.Lease]:
        rows = conn.execute(_STRAY_IDS[table.name], parameters).fetchall()
        return [tables.lease_of(table, row) for row in rows]

    return quarantine.together(
        conn,
        lambda: conn.execute(_STRAYS_SQL[table.name], parameters).fetchall(),
        strays,
        lambda lease: hand_back(conn, lease, reason=reason),
    )


_STRAY_IDS = {
    table.name: sql.SQL(
        "SELECT id, worker_id, claim_no FROM {} WHERE status = 'running'"
        " AND worker_id = %(worker)s AND id <> ALL (%(keep)s)"
    )
    .format(sql.Identifier(table.name))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}
_STRAYS_SQL = _both(
    sql.SQL(
        "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'queued' END,"
        " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL"
        " WHERE j.status = 'running' AND j.worker_id = %(worker)s AND j.id <> ALL (%(keep)s)"
    ),
    _BACK_EVENT,
)
