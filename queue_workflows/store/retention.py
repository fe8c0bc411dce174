"""Deletes what is finished and old, one batch a call; the caller commits each.

Rows are met again by place (ctid), and other tables row by row (OFFSET 0): a table that was empty
when it was last counted is planned as empty, and a join compares each with each (decision 0019).
"""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.store import isolation

BLOCKS = 256
"""Pages of a table that a batch looks at: 2 MiB, in which some thousands of jobs fit."""
RUNS = 20
"""Runs that a batch deletes at most; their nodes, answers and outbox rows go with them."""
RUNS_TIMEOUT = "60s"
"""Each may have MAX_NODES_PER_RUN nodes. What is locked meanwhile nobody waits for."""
ROWS = 5000

# Tables are walked as they lie: an index that knew when a job was finished would cost every job.
_OLD_JOBS = (
    " FROM ingest_jobs j LEFT JOIN queue_settings q ON q.queue = j.queue"
    " WHERE j.status IN ('completed', 'failed', 'cancelled')"
    " AND coalesce(q.retention_days, %(days)s::float8) > 0"
    # The bounds keep a NaN and an age that no interval can hold from ending all pruning.
    " AND coalesce(j.finished_at, j.created_at) < now() - least(greatest("
    "coalesce(q.retention_days, %(days)s::float8), 0), 36500) * interval '1 day'"
)
_OF_PAGES = " AND j.ctid >= %(first)s::tid AND j.ctid < %(end)s::tid"
_DELETE_JOBS = (
    "WITH old AS MATERIALIZED (SELECT j.ctid AS at" + _OLD_JOBS + _OF_PAGES + ""
    " FOR UPDATE OF j SKIP LOCKED)"
    " DELETE FROM ingest_jobs j USING old WHERE j.ctid = old.at RETURNING j.id"
)
_DUE_JOBS = "SELECT j.id" + _OLD_JOBS + _OF_PAGES + " AND j.id <> ALL (%(aside)s::text[])"
_DELETE_SOME_JOBS = (
    "WITH old AS MATERIALIZED (SELECT j.ctid AS at" + _OLD_JOBS + ""
    " AND j.id = ANY (%(ids)s::text[]) FOR UPDATE OF j SKIP LOCKED)"
    " DELETE FROM ingest_jobs j USING old WHERE j.ctid = old.at RETURNING j.id"
)
_OLD_RUNS = (
    " FROM workflow_runs r WHERE r.status IN ('completed', 'failed', 'cancelled')"
    " AND %(days)s::float8 > 0"
    " AND coalesce(r.finished_at, r.updated_at) < now() - %(days)s::float8 * interval '1 day'"
    " AND NOT EXISTS (SELECT FROM workflow_dispatch_events e"
    " WHERE e.run_id = r.id AND e.processed_at IS NULL OFFSET 0)"
    " AND NOT EXISTS (SELECT FROM workflow_node_jobs n WHERE n.run_id = r.id"
    " AND n.status IN ('queued', 'running', 'awaiting_input') OFFSET 0)"
)
_OF_RUN_PAGES = " AND r.ctid >= %(first)s::tid AND r.ctid < %(end)s::tid"
_DELETE_RUNS = (
    "WITH old AS MATERIALIZED (SELECT r.ctid AS at" + _OLD_RUNS + _OF_RUN_PAGES + ""
    " LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED)"
    " DELETE FROM workflow_runs r USING old WHERE r.ctid = old.at RETURNING r.id"
)
_DUE_RUNS = (
    "SELECT r.id" + _OLD_RUNS + _OF_RUN_PAGES + " AND r.id <> ALL (%(aside)s::text[])"
    " LIMIT %(limit)s"
)
_DELETE_SOME_RUNS = (
    "WITH old AS MATERIALIZED (SELECT r.ctid AS at" + _OLD_RUNS + ""
    " AND r.id = ANY (%(ids)s::text[]) FOR UPDATE OF r SKIP LOCKED)"
    " DELETE FROM workflow_runs r USING old WHERE r.ctid = old.at RETURNING r.id"
)
_DELETE_OUTBOX = (
    "DELETE FROM workflow_dispatch_events WHERE ctid = ANY (ARRAY("
    "SELECT ctid FROM workflow_dispatch_events WHERE processed_at < now() - %s * interval '1 day'"
    " ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED))"
)
_DELETE_INGEST_EVENTS = (
    "DELETE FROM ingest_job_events WHERE ctid = ANY (ARRAY(SELECT ctid FROM ingest_job_events"
    " WHERE created_at < now() - %s * interval '1 day' ORDER BY id LIMIT %s))"
)
_DELETE_HEARTBEATS = "DELETE FROM worker_heartbeats WHERE last_seen < now() - %s * interval '1 day'"


def blocks(conn: db.Connection, table: str) -> int:
    """How many pages the table has now."""
    row = conn.execute(
        "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::bigint AS n",
        (table,),
    ).fetchone()
    assert row is not None
    return row["n"]


def _within(first: int, days: float) -> dict[str, object]:
    return {"first": f"({first},0)", "end": f"({first + BLOCKS},0)", "days": days, "limit": RUNS}


def _of_age(conn: db.Connection) -> None:
    """Say that what this transaction deletes goes by its age; see sql/functions/history.sql."""
    conn.execute("SELECT set_config('queue_workflows.retention', 'on', true)")


def delete_jobs(conn: db.Connection, first: int, days: float, rows: isolation.Isolation) -> int:
    """Delete ingest jobs finished that long ago that lie in BLOCKS pages from `first` on.

    A queue's own `retention_days` goes before `days`; 0 keeps for ever. A row that raises is set
    aside in `rows`. How many went.
    """
    duty = isolation.Duty(
        "deletion of ingest job",
        _DELETE_JOBS.encode(),
        _DUE_JOBS.encode(),
        _DELETE_SOME_JOBS.encode(),
        _stays,
        lambda: _within(first, days),
        _of_age,
    )
    return len(rows.batch(conn, duty))


def delete_runs(conn: db.Connection, first: int, days: float, rows: isolation.Isolation) -> int:
    """Delete up to RUNS runs finished that long ago out of BLOCKS pages; 0 days keep for ever.

    A run with an open outbox row, or a node that is not finished, stays. A row that raises is set
    aside in `rows`. How many went.
    """
    duty = isolation.Duty(
        "deletion of run",
        _DELETE_RUNS.encode(),
        _DUE_RUNS.encode(),
        _DELETE_SOME_RUNS.encode(),
        _stays,
        lambda: _within(first, days),
        _with_time,
    )
    return len(rows.batch(conn, duty))


def _stays(conn: db.Connection, row_id: str, error: BaseException, failures: int) -> bool:
    """Return False: a finished row that cannot be deleted has no other end."""
    del conn, row_id, error, failures
    return False


def _with_time(conn: db.Connection) -> None:
    conn.execute("SELECT set_config('statement_timeout', %s, true)", (RUNS_TIMEOUT,))


def delete_outbox(conn: db.Connection, days: float) -> int:
    """Delete up to ROWS outbox rows processed that long ago; how many."""
    return conn.execute(_DELETE_OUTBOX, (days, ROWS)).rowcount


def delete_ingest_events(conn: db.Connection, days: float) -> int:
    """Delete up to ROWS events of ingest jobs of that age; how many."""
    _of_age(conn)
    return conn.execute(_DELETE_INGEST_EVENTS, (days, ROWS)).rowcount


def delete_heartbeats(conn: db.Connection, days: float) -> int:
    """Delete the heartbeats of hosts not heard of for that long; how many."""
    return conn.execute(_DELETE_HEARTBEATS, (days,)).rowcount


def due(conn: db.Connection, *, run_days: float, job_days: float) -> dict[str, int]:
    """How many runs and ingest jobs would go now: `{"runs": n, "jobs": n}`."""
    runs = conn.execute("SELECT count(*) AS n" + _OLD_RUNS, {"days": run_days}).fetchone()
    jobs = conn.execute("SELECT count(*) AS n" + _OLD_JOBS, {"days": job_days}).fetchone()
    assert runs is not None
    assert jobs is not None
    return {"runs": runs["n"], "jobs": jobs["n"]}
