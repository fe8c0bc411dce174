"""What happened to a run or a job: its rows as they are shown, its events, its attempts' logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from psycopg import sql

from queue_workflows import db
from queue_workflows.engine import job_tables
from queue_workflows.types import Row

_RUN = (
    "SELECT id, workflow_name, status::text, error, out_dir, priority, generation, created_at,"
    " queued_at, started_at, finished_at, definition, now() AS read_at,"
    " extract(epoch FROM coalesce(finished_at, now()))::float8"
    " - extract(epoch FROM queued_at)::float8 AS elapsed_s"
    " FROM workflow_runs WHERE id = %s"
)
_COMMON = (
    "id, queue::text, status::text, priority, generation, claim_no, attempts, max_attempts,"
    " crash_count, watchdog_retries, claimed_by, worker_id, blocked_reason, available_at,"
    " cancel_requested_at, progress, error, seconds, created_at, started_at, finished_at,"
    " now() AS read_at"
)
_NODES = (
    "SELECT " + _COMMON + ", run_id, node_id, node_module, pipeline_name, required_model,"
    " coalesce(resolved_inputs, inputs) AS inputs, context_delta AS output, input_spec,"
    " vm_rss_mb_peak FROM workflow_node_jobs"
)
_EVENTS = (
    "id, job_id, attempt, event_type::text, claim_no, worker_id, host_label, elapsed_s, error,"
    " detail, created_at"
)
_NODE_EVENTS = "SELECT node_id, " + _EVENTS + " FROM workflow_node_events WHERE run_id = %(run)s"
_INGEST = (
    "SELECT " + _COMMON + ", task_name, reason, args AS inputs, result AS output, lock_key,"
    " partition_key, idempotency_key, headers, timeout_s FROM ingest_jobs WHERE id = %s"
)
_LOGS = "SELECT job_id, claim_no, head, tail, cut_bytes, updated_at FROM job_attempt_logs l"


def run(conn: db.Connection, run_id: str) -> Row | None:
    """The run with its `definition`, `elapsed_s` since it was queued, and `read_at`; or None."""
    return conn.execute(_RUN, (run_id,)).fetchone()


def nodes(conn: db.Connection, run_id: str, node_ids: Sequence[str] | None) -> list[Row]:
    """The jobs of a run in the order in which they stood in line; None: of all its nodes."""
    return conn.execute(
        _NODES + " WHERE run_id = %s AND (%s::text[] IS NULL OR node_id = ANY (%s)) ORDER BY seq",
        (run_id, node_ids, node_ids),
    ).fetchall()


def node(conn: db.Connection, job_id: str) -> Row | None:
    """One node job, or None."""
    return conn.execute(_NODES + " WHERE id = %s", (job_id,)).fetchone()


def ingest_job(conn: db.Connection, job_id: str) -> Row | None:
    """One ingest job, or None."""
    return conn.execute(_INGEST, (job_id,)).fetchone()


def node_events(conn: db.Connection, run_id: str, node_ids: Sequence[str] | None) -> list[Row]:
    """The events of a run's nodes, the oldest first; None: of all its nodes."""
    return conn.execute(
        _NODE_EVENTS + " AND (%(nodes)s::text[] IS NULL OR node_id = ANY (%(nodes)s))"
        " ORDER BY created_at, id",
        {"run": run_id, "nodes": node_ids},
    ).fetchall()


def ingest_events(conn: db.Connection, job_id: str) -> list[Row]:
    """The events of an ingest job, the oldest first, each with its `actor`."""
    return conn.execute(
        "SELECT " + _EVENTS + ", actor FROM ingest_job_events WHERE job_id = %s"
        " ORDER BY created_at, id",
        (job_id,),
    ).fetchall()


def logs(conn: db.Connection, table: job_tables.JobTable, job_ids: Sequence[str]) -> list[Row]:
    """The stored logs of these jobs' attempts: job_id, claim_no, head, tail, cut_bytes."""
    return conn.execute(
        _LOGS + " WHERE job_id = ANY (%s) AND job_table = %s ORDER BY job_id, claim_no",
        (list(job_ids), table.name),
    ).fetchall()


def logged_since(
    conn: db.Connection, run_id: str, since: datetime | None, node_ids: Sequence[str] | None
) -> list[Row]:
    """Return which of a run's nodes wrote to a log from then on, the last to write last.

    Each node_id, queue, job_id, updated_at. The logs, which may be large, are read by `logs`.
    """
    return conn.execute(
        "SELECT j.node_id, j.queue::text, l.job_id, max(l.updated_at) AS updated_at"
        " FROM workflow_node_jobs j JOIN job_attempt_logs l ON l.job_id = j.id"
        " AND l.job_table = 'workflow_node_jobs'"
        " WHERE j.run_id = %(run)s"
        " AND (%(since)s::timestamptz IS NULL OR l.updated_at >= %(since)s)"
        " AND (%(nodes)s::text[] IS NULL OR j.node_id = ANY (%(nodes)s))"
        " GROUP BY j.node_id, j.queue, l.job_id, j.seq ORDER BY 3, j.seq",
        {"run": run_id, "since": since, "nodes": node_ids},
    ).fetchall()


def node_counts(conn: db.Connection, run_id: str) -> dict[str, int]:
    """How many nodes of a run there are of each status."""
    rows = conn.execute(
        "SELECT status::text, count(*) AS n FROM workflow_node_jobs WHERE run_id = %s"
        " GROUP BY 1 ORDER BY 1",
        (run_id,),
    ).fetchall()
    return {row["status"]: row["n"] for row in rows}


_STARTING = sql.SQL(" UNION ALL ").join(
    sql.SQL(
        "(SELECT {kind} AS kind, id FROM {table} WHERE id BETWEEN %(low)s AND %(high)s"
        " AND starts_with(id, %(start)s) ORDER BY id LIMIT %(limit)s)"
    ).format(kind=sql.Literal(kind), table=sql.Identifier(table))
    for kind, table in (
        ("run", "workflow_runs"),
        ("node job", job_tables.NODE_JOBS.name),
        ("ingest job", job_tables.INGEST_JOBS.name),
    )
)


_UUID = "00000000-0000-0000-0000-000000000000"


def starting_with(conn: db.Connection, start: str, *, limit: int) -> list[Row]:
    """Runs and jobs whose id is a UUID that starts so: kind, id; at most `limit` of each kind.

    Ranges of the primary keys: UUIDs are of one form, so that every collation has them in the order
    of their digits. Ids of another form, which hosts give, have none.
    """
    low, high = start + _UUID[len(start) :], start + _UUID.replace("0", "f")[len(start) :]
    if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", low):
        return []
    values = {"start": start, "low": low, "high": high, "limit": limit}
    return conn.execute(_STARTING, values).fetchall()
