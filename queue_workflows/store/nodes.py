"""Node jobs as rows: made, read, and changed by operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from psycopg import sql

from queue_workflows import db, errors
from queue_workflows.engine import job_tables, row_isolation
from queue_workflows.types import Row, Unreadable

_ENQUEUE = (
    "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model, inputs,"
    " priority, pipeline_name, generation)"
    " SELECT r.id, %(node_id)s, %(node_module)s, %(queue)s, %(required_model)s, %(inputs)s::jsonb,"
    " %(priority)s::smallint, %(pipeline_name)s, r.generation"
    " FROM workflow_runs r WHERE r.id = %(run_id)s"
    " ON CONFLICT (run_id, node_id) DO NOTHING RETURNING id"
)


def enqueue(conn: db.Connection, values: dict[str, Any]) -> str | None:
    """Insert one queued job and return its id; None when the run is unknown or has such a node."""
    row = conn.execute(_ENQUEUE, values).fetchone()
    return row["id"] if row else None


def insert_many(conn: db.Connection, run_id: str, rows_json: str) -> int:
    """Insert the rows of a plan (a JSON array of objects) with the run's priority and generation.

    An existing row is left alone, except that one that failed or was cancelled in an earlier
    generation is opened again. How many rows are new or opened.
    """
    row = conn.execute(
        "SELECT queue_workflows_insert_nodes(%s::text, %s::jsonb) AS n",
        (run_id, rows_json),
        prepare=True,
    ).fetchone()
    return row["n"] if row else 0


def get(conn: db.Connection, job_id: str) -> Row | None:
    """The job, or None."""
    return conn.execute("SELECT * FROM workflow_node_jobs WHERE id = %s", (job_id,)).fetchone()


def get_by_node(conn: db.Connection, run_id: str, node_id: str) -> Row | None:
    """The job of a node, or None."""
    return conn.execute(
        "SELECT * FROM workflow_node_jobs WHERE run_id = %s AND node_id = %s", (run_id, node_id)
    ).fetchone()


def hold_by_node(conn: db.Connection, run_id: str, node_id: str) -> Row | None:
    """Return the job of a node, or None.

    No other transaction changes an input node that is not over until this one ends. The lock is
    taken by a function, so that a role that submits answers needs no right to change nodes.
    """
    conn.execute("SELECT queue_workflows_hold_node(%s::text, %s::text)", (run_id, node_id))
    return get_by_node(conn, run_id, node_id)


def of_run(conn: db.Connection, run_id: str) -> list[Row]:
    """All jobs of a run, oldest first."""
    return conn.execute(
        "SELECT * FROM workflow_node_jobs WHERE run_id = %s ORDER BY created_at, seq", (run_id,)
    ).fetchall()


def done_among(conn: db.Connection, run_id: str, node_ids: Iterable[str]) -> set[str]:
    """Those of `node_ids` that are completed or skipped."""
    rows = conn.execute(
        "SELECT node_id FROM workflow_node_jobs WHERE run_id = %s AND node_id = ANY (%s)"
        " AND status IN ('completed', 'skipped')",
        (run_id, list(node_ids)),
        prepare=True,
    ).fetchall()
    return {row["node_id"] for row in rows}


def running_among(conn: db.Connection, run_id: str, node_ids: Iterable[str]) -> set[str]:
    """Those of `node_ids` that run now."""
    rows = conn.execute(
        "SELECT node_id FROM workflow_node_jobs WHERE run_id = %s AND node_id = ANY (%s)"
        " AND status = 'running'",
        (run_id, list(node_ids)),
    ).fetchall()
    return {row["node_id"] for row in rows}


def present(conn: db.Connection, run_id: str, node_ids: Iterable[str]) -> set[str]:
    """Those of `node_ids` that have a row which is neither failed nor cancelled."""
    rows = conn.execute(
        "SELECT node_id FROM workflow_node_jobs WHERE run_id = %s AND node_id = ANY (%s)"
        " AND status NOT IN ('failed', 'cancelled')",
        (run_id, list(node_ids)),
        prepare=True,
    ).fetchall()
    return {row["node_id"] for row in rows}


def all_done(conn: db.Connection, run_id: str) -> set[str]:
    """Every completed or skipped node of a run."""
    rows = conn.execute(
        "SELECT node_id FROM workflow_node_jobs WHERE run_id = %s"
        " AND status IN ('completed', 'skipped')",
        (run_id,),
        prepare=True,
    ).fetchall()
    return {row["node_id"] for row in rows}


def context(conn: db.Connection, run_id: str, heads: Iterable[str] | None) -> dict[str, Any]:
    """`run.context` with the `context_delta` of each completed node under its id.

    Only the members that `heads` names; None: all of them. Raises `UnreadableRow` for a context
    that is no object, and for a member that cannot be loaded.
    """
    wanted = None if heads is None else list(heads)
    row = conn.execute(_CONTEXT, {"heads": wanted, "run_id": run_id}).fetchone()
    if row is None:
        return {}
    if row["kind"] != "object":
        raise errors.UnreadableRow(f"its context is a JSON {row['kind']}, not an object")
    found: Any = row["context"]
    if not isinstance(found, Unreadable):
        return found
    for head in wanted if wanted is not None and len(wanted) > 1 else ():
        try:
            context(conn, run_id, [head])
        except errors.UnreadableRow:
            wanted = [head]
            break
    what = f" under {wanted[0]!r:.120}" if wanted and len(wanted) == 1 else ""
    raise errors.UnreadableRow(f"its context{what} cannot be read: {found.reason}")


_CONTEXT = (
    "SELECT jsonb_typeof(r.context) AS kind, CASE jsonb_typeof(r.context) WHEN 'object' THEN"
    " coalesce((SELECT jsonb_object_agg(key, value) FROM jsonb_each(r.context)"
    " WHERE %(heads)s::text[] IS NULL OR key = ANY (%(heads)s::text[])), '{}')"
    " || coalesce((SELECT jsonb_object_agg(j.node_id, j.context_delta)"
    " FROM workflow_node_jobs j WHERE j.run_id = r.id AND j.status = 'completed'"
    " AND (%(heads)s::text[] IS NULL OR j.node_id = ANY (%(heads)s::text[]))), '{}') END"
    " AS context FROM workflow_runs r WHERE r.id = %(run_id)s"
)


def operate(
    conn: db.Connection,
    job_id: str,
    table: job_tables.JobTable,
    status: str,
    values: dict[str, Any],
) -> Row | None:
    """The operator's unfenced change to `completed`, `failed` or `awaiting_input`.

    With its event and outbox row; None when the job is terminal already.
    """
    parameters = values | {"job": job_id, "worker": None, "detail": '{"by": "operator"}'}
    if table.in_run:
        return conn.execute(_OPERATE[table.name, status], parameters).fetchone()
    # Locked, as a job that is claimed or handed back between the two statements would miss both.
    conn.execute(_LOCK[table.name], (job_id,))
    row = conn.execute(_OPERATE[table.name, status], parameters).fetchone()
    return row or conn.execute(_OPERATE_WAITING[status], parameters).fetchone()


_RUNS: Final = " AND j.status = 'running'"
_NOT_OVER: Final = (
    "j.id = %(job)s AND j.status NOT IN ('completed', 'failed', 'cancelled', 'skipped')"
)
# As in queue_workflows_node_step(): a number is 1 at the end; a text or a dict is the app's own.
_AT_END: Final = (
    "progress = CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress"
    " ELSE '1' END"
)
_FINISHED: Final = (
    "UPDATE {jobs} j SET status = 'completed', {result} = %(result)s::jsonb, error = NULL,"
    " seconds = %(seconds)s::float8, finished_at = now(), blocked_reason = NULL,"
    " worker_id = NULL, lease_expires_at = NULL, " + _AT_END + " WHERE " + _NOT_OVER
)
_FINISHED_NODE = sql.SQL(
    "UPDATE {jobs} j SET status = 'completed', {result} = %(result)s::jsonb, error = NULL,"
    " seconds = %(seconds)s::float8, vm_rss_mb_peak = %(rss)s::integer, finished_at = now(),"
    " blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL, " + _AT_END + ""
    " WHERE " + _NOT_OVER
)
_FAILED: Final = (
    "UPDATE {jobs} j SET status = 'failed', error = %(error)s, seconds = %(seconds)s::float8,"
    " finished_at = now(), blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL"
    " WHERE " + _NOT_OVER
)
_WAITING = sql.SQL(
    "UPDATE {jobs} j SET status = 'awaiting_input', blocked_reason = NULL, worker_id = NULL,"
    " lease_expires_at = NULL WHERE j.status <> 'awaiting_input' AND " + _NOT_OVER
)
_STATUS = sql.SQL("status")
_OPERATE = {
    ("workflow_node_jobs", "completed"): job_tables.transition(
        job_tables.NODE_JOBS, _FINISHED_NODE, event=_STATUS
    ),
    ("workflow_node_jobs", "failed"): job_tables.transition(
        job_tables.NODE_JOBS, sql.SQL(_FAILED), event=_STATUS
    ),
    ("workflow_node_jobs", "awaiting_input"): job_tables.transition(
        job_tables.NODE_JOBS, _WAITING, event=sql.SQL("'parked'")
    ),
    ("ingest_jobs", "completed"): job_tables.transition(
        job_tables.INGEST_JOBS, sql.SQL(_FINISHED + _RUNS), event=_STATUS
    ),
    ("ingest_jobs", "failed"): job_tables.transition(
        job_tables.INGEST_JOBS, sql.SQL(_FAILED + _RUNS), event=_STATUS
    ),
}
_OPERATE_WAITING = {
    "completed": job_tables.unlogged(job_tables.INGEST_JOBS, sql.SQL(_FINISHED)),
    "failed": job_tables.unlogged(job_tables.INGEST_JOBS, sql.SQL(_FAILED)),
}


def set_resolved_inputs(conn: db.Connection, job_id: str, value: str) -> Row | None:
    """Write what the node received (JSON text); the row, or None."""
    return conn.execute(
        "UPDATE workflow_node_jobs SET resolved_inputs = %s::jsonb WHERE id = %s RETURNING *",
        (value, job_id),
    ).fetchone()


def set_input_spec(conn: db.Connection, job_id: str, value: str) -> Row | None:
    """Write what an input node asks for (JSON text); the row, or None."""
    return conn.execute(
        "UPDATE workflow_node_jobs SET input_spec = %s::jsonb WHERE id = %s RETURNING *",
        (value, job_id),
    ).fetchone()


def answer(conn: db.Connection, job_id: str, context_delta: str) -> Row | None:
    """Complete a node that waits for its input, with event and outbox row; None: it waits not."""
    parameters = {
        "job": job_id,
        "result": context_delta,
        "worker": None,
        "seconds": None,
        "error": None,
        "detail": '{"by": "input"}',
    }
    return conn.execute(_ANSWER, parameters).fetchone()


_ANSWER = job_tables.transition(
    job_tables.NODE_JOBS,
    sql.SQL(
        "UPDATE {jobs} j SET status = 'completed', {result} = %(result)s::jsonb, error = NULL,"
        " finished_at = now(), " + _AT_END + ""
        " WHERE j.id = %(job)s AND j.status = 'awaiting_input'"
    ),
    event=_STATUS,
)


def next_overdue(conn: db.Connection, aside: list[str]) -> str | None:
    """Return the job of the oldest wait that is over and nobody holds, without `aside`; or None."""
    row = conn.execute(_DUE_ID, (aside,), prepare=True).fetchone()
    return row["job_id"] if row else None


def overdue_input(conn: db.Connection, job_id: str | None = None) -> Row | None:
    """An input node (`job_id`: this one) that has waited as long as its policy lets it, or None.

    Its row, locked with its wait until the transaction ends; `answered`: an answer is on its way
    in, or being handed in; `over`: it waits no more, or waits anew.
    """
    statement = _DUE if job_id is None else _DUE_OF
    due = conn.execute(statement, {"job": job_id}, prepare=True).fetchone()
    if due is None:
        return None
    # Before it is looked for answers: `submit_input` holds the row from its answer to its commit.
    free = conn.execute(_FREE, (due["job_id"],), prepare=True).fetchone() is not None
    return conn.execute(_OVERDUE, {"job": due["job_id"], "free": free}, prepare=True).fetchone()


_DUE = (
    "SELECT job_id FROM workflow_input_timeouts WHERE due_at <= now()"
    " ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED"
)
_DUE_OF = (
    "SELECT job_id FROM workflow_input_timeouts WHERE job_id = %(job)s AND due_at <= now()"
    " FOR UPDATE SKIP LOCKED"
)
_DUE_ID = (
    "SELECT job_id FROM workflow_input_timeouts WHERE due_at <= now() AND job_id <> ALL (%s)"
    " ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED"
)
_FREE = "SELECT FROM workflow_node_jobs WHERE id = %s FOR UPDATE SKIP LOCKED"
_OVERDUE = (
    "SELECT j.*, due.job_id AS due_id, NOT %(free)s::boolean"
    " OR EXISTS (SELECT FROM workflow_input_submissions s"
    " WHERE s.run_id = j.run_id AND s.node_id = j.node_id"
    " AND s.status IN ('pending', 'processing')) AS answered,"
    " j.status IS DISTINCT FROM 'awaiting_input' OR j.claim_no <> due.claim_no AS over"
    " FROM workflow_input_timeouts due LEFT JOIN workflow_node_jobs j ON j.id = due.job_id"
    " WHERE due.job_id = %(job)s"
)


def wait_on(conn: db.Connection, job_id: str, more_s: float | None) -> None:
    """Let an input node's wait end `more_s` from now; None: it is over."""
    if more_s is None:
        conn.execute("DELETE FROM workflow_input_timeouts WHERE job_id = %s", (job_id,))
        return
    conn.execute(
        "UPDATE workflow_input_timeouts SET due_at = now() + %s * interval '1 second'"
        " WHERE job_id = %s",
        (more_s, job_id),
    )


def time_out(conn: db.Connection, job_id: str, *, default: str | None, error: str) -> Row | None:
    """End a wait: completed with `default` (JSON text of a `context_delta`), or None failed.

    With event and outbox row. None: it waits no more; the first answer has won.
    """
    parameters = {
        "job": job_id,
        "result": default,
        "worker": None,
        "seconds": None,
        "error": error if default is None else None,
        "detail": '{"by": "timeout"}',
    }
    statement = _ANSWER if default is not None else _TIMED_OUT
    return conn.execute(statement, parameters).fetchone()


_TIMED_OUT = job_tables.transition(
    job_tables.NODE_JOBS,
    sql.SQL(
        "UPDATE {jobs} j SET status = 'failed', error = %(error)s, finished_at = now()"
        " WHERE j.id = %(job)s AND j.status = 'awaiting_input'"
    ),
    event=_STATUS,
)


def mend_turns(conn: db.Connection) -> int:
    """Let in the first of each lock key's line where nobody is, of both families; how many."""
    # The families in the order in which a commit takes their locks.
    row = conn.execute(
        "SELECT queue_workflows_mend_turns('ingest_jobs')"
        " + queue_workflows_mend_turns('workflow_node_jobs') AS n",
        prepare=True,
    ).fetchone()
    return row["n"] if row else 0


_TO_QUEUE = (
    "UPDATE {jobs} j SET status = CASE WHEN {over} THEN 'cancelled' ELSE 'queued' END,"
    " finished_at = CASE WHEN {over} THEN now() END, worker_id = NULL, lease_expires_at = NULL,"
    " started_at = CASE WHEN {over} THEN j.started_at END,"
    " priority = least(j.priority, %(band)s::smallint)"
)
_REQUEUED = sql.SQL("CASE status WHEN 'queued' THEN 'requeued' ELSE status END")
_REQUEUE = {
    "retry": job_tables.transition(
        job_tables.NODE_JOBS,
        sql.SQL(
            _TO_QUEUE + ", watchdog_retries = j.watchdog_retries + 1"
            " WHERE j.id = %(job)s AND j.status = 'running'"
        ),
        event=_REQUEUED,
    ),
    "all": job_tables.transition(
        job_tables.NODE_JOBS, sql.SQL(_TO_QUEUE + " WHERE j.status = 'running'"), event=_REQUEUED
    ),
    "workflow_node_jobs": job_tables.transition(
        job_tables.NODE_JOBS,
        sql.SQL(
            _TO_QUEUE + " WHERE j.status = 'running' AND j.claimed_by = %(host)s"
            " AND j.queue = %(queue)s"
        ),
        event=_REQUEUED,
    ),
    "ingest_jobs": job_tables.transition(
        job_tables.INGEST_JOBS,
        sql.SQL(
            _TO_QUEUE + " WHERE j.status = 'running' AND j.claimed_by = %(host)s"
            " AND j.queue = %(queue)s"
        ),
        event=_REQUEUED,
    ),
}


def requeue(conn: db.Connection, which: str, **parameters: Any) -> list[Row]:
    """An operator takes running jobs back: `retry` one, `all` nodes, or one host's of a queue."""
    base = {
        "worker": None,
        "seconds": None,
        "error": None,
        "detail": '{"by": "operator"}',
        "band": 10,
    }
    return conn.execute(_REQUEUE[which], base | parameters).fetchall()


_CANCEL_ONE = sql.SQL(
    "UPDATE {jobs} j SET status = 'cancelled', finished_at = now(), blocked_reason = NULL"
    " WHERE j.id = %(id)s AND j.status IN ('queued', %(waiting)s)"
)
_CANCEL = {
    job_tables.NODE_JOBS.name: job_tables.transition(
        job_tables.NODE_JOBS, _CANCEL_ONE, event=_STATUS
    ),
    job_tables.INGEST_JOBS.name: job_tables.unlogged(job_tables.INGEST_JOBS, _CANCEL_ONE),
}
_LOCK = {
    table.name: sql.SQL("SELECT FROM {} WHERE id = %s FOR UPDATE").format(
        sql.Identifier(table.name)
    )
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)
}
_CANCEL_OF_RUN = job_tables.transition(
    job_tables.NODE_JOBS,
    sql.SQL(
        "UPDATE {jobs} j SET status = 'cancelled', finished_at = now(), blocked_reason = NULL"
        " WHERE j.status = 'queued' AND j.run_id = %(id)s"
    ),
    event=_STATUS,
)


def cancel_queued_of_run(conn: db.Connection, run_id: str) -> int:
    """Cancel a run's queued jobs; how many."""
    return len(conn.execute(_CANCEL_OF_RUN, _plain(id=run_id)).fetchall())


def cancel(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> Row | None:
    """Cancel a job that waits, or ask for the end of one that runs; None: unknown or terminal."""
    # Locked, as a job that is handed back between the two statements would miss both.
    conn.execute(_LOCK[table.name], (job_id,))
    rows = conn.execute(_CANCEL[table.name], _plain(id=job_id, waiting="awaiting_input")).fetchall()
    if rows:
        return rows[0]
    return conn.execute(
        sql.SQL(
            "UPDATE {} SET cancel_requested_at = coalesce(cancel_requested_at, now())"
            " WHERE id = %s AND status = 'running' RETURNING *"
        ).format(sql.Identifier(table.name)),
        (job_id,),
    ).fetchone()


def _plain(**parameters: Any) -> dict[str, Any]:
    return {"worker": None, "seconds": None, "error": None, "detail": None} | parameters


def sweep_orphans(conn: db.Connection) -> int:
    """Cancel queued and waiting jobs whose run is over (they came in beside a cancel); how many."""
    return len(conn.execute(_SWEEP, _plain()).fetchall())


_IS_ORPHAN = (
    "q.status IN ('queued', 'awaiting_input')"
    " AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = q.run_id AND r.mode = 'node'"
    " AND r.status IN ('completed', 'failed', 'cancelled') OFFSET 0)"
)
_CANCEL_CHOSEN = sql.SQL(
    "UPDATE {jobs} j SET status = 'cancelled', finished_at = now(), blocked_reason = NULL"
    " WHERE j.id = ANY (ARRAY(SELECT id FROM chosen))"
)
_SWEEP = job_tables.transition(
    job_tables.NODE_JOBS,
    _CANCEL_CHOSEN,
    event=_STATUS,
    chosen=sql.SQL(
        "chosen AS MATERIALIZED (SELECT q.id FROM {jobs} q WHERE " + _IS_ORPHAN + ""
        " LIMIT 500 FOR UPDATE OF q SKIP LOCKED), "
    ),
)
_ORPHANS = (
    "SELECT q.id FROM workflow_node_jobs q WHERE " + _IS_ORPHAN + ""
    " AND q.id <> ALL (%(aside)s::text[]) LIMIT 500"
)
_SWEEP_AMONG = job_tables.transition(
    job_tables.NODE_JOBS,
    _CANCEL_CHOSEN,
    event=_STATUS,
    chosen=sql.SQL(
        "chosen AS MATERIALIZED (SELECT q.id FROM {jobs} q WHERE q.id = ANY (%(ids)s::text[])"
        " AND " + _IS_ORPHAN + " FOR UPDATE OF q SKIP LOCKED), "
    ),
)


def orphans_duty(rest: row_isolation.Ending) -> row_isolation.Duty:
    """Return `sweep_orphans` as a duty that leaves out rows which raise."""
    return row_isolation.Duty(
        "cancel of node job", _SWEEP, _ORPHANS.encode(), _SWEEP_AMONG, rest, _plain
    )
