"""What people look at: a run while it goes, where its nodes ran, and the whole system in counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

_LIVE = "('running', 'awaiting_input', 'failed')"


def run_head(conn: db.Connection, run_id: str) -> Row | None:
    """The run without its definition and context, with `elapsed_s` since it was queued; or None."""
    return conn.execute(
        "SELECT id, workflow_name, status, error, out_dir, generation, created_at, started_at,"
        " finished_at, extract(epoch FROM coalesce(finished_at, now()))::float8"
        " - extract(epoch FROM queued_at)::float8 AS elapsed_s FROM workflow_runs WHERE id = %s",
        (run_id,),
    ).fetchone()


def steps(conn: db.Connection, run_id: str) -> list[Row]:
    """Per step (a node id up to its first slash): step, how many nodes per status, elapsed_s.

    `elapsed_s` from the first start to the last end, or to now while any has not ended; or None.
    """
    return conn.execute(
        "SELECT split_part(node_id, '/', 1) AS step,"
        " count(*) FILTER (WHERE status = 'queued') AS queued,"
        " count(*) FILTER (WHERE status = 'running') AS running,"
        " count(*) FILTER (WHERE status = 'awaiting_input') AS awaiting_input,"
        " count(*) FILTER (WHERE status = 'completed') AS completed,"
        " count(*) FILTER (WHERE status = 'skipped') AS skipped,"
        " count(*) FILTER (WHERE status = 'failed') AS failed,"
        " count(*) FILTER (WHERE status = 'cancelled') AS cancelled,"
        " extract(epoch FROM CASE WHEN bool_and(finished_at IS NOT NULL) THEN max(finished_at)"
        " ELSE now() END)::float8 - extract(epoch FROM min(started_at))::float8 AS elapsed_s"
        " FROM workflow_node_jobs WHERE run_id = %s GROUP BY 1",
        (run_id,),
    ).fetchall()


def nodes(conn: db.Connection, run_id: str, *, limit: int, live_only: bool) -> list[Row]:
    """Return a run's nodes as they are shown, those that run, wait for input or failed first.

    `elapsed_s` until the end, or now; None before the start. `live_only`: those alone, and the
    queued ones of which an attempt failed.
    """
    return conn.execute(
        "SELECT id, node_id, status, queue, required_model, claimed_by, worker_id, progress,"
        " input_spec, crash_count, attempts, max_attempts, blocked_reason, available_at, error,"
        " seconds,"
        " extract(epoch FROM coalesce(finished_at, now()))::float8"
        " - extract(epoch FROM started_at)::float8 AS elapsed_s"
        " FROM workflow_node_jobs WHERE run_id = %(run)s"
        " AND (NOT %(live)s OR status IN " + _LIVE + " OR status = 'queued' AND attempts > 0)"
        " ORDER BY status NOT IN " + _LIVE + ", started_at, seq LIMIT %(limit)s",
        {"run": run_id, "live": live_only, "limit": limit},
    ).fetchall()


def node_seconds(conn: db.Connection, run_id: str) -> dict[str, float]:
    """How long each completed node's body took, by node id."""
    rows = conn.execute(
        "SELECT node_id, coalesce(seconds, 0)::float8 AS seconds FROM workflow_node_jobs"
        " WHERE run_id = %s AND status = 'completed'",
        (run_id,),
    ).fetchall()
    return {row["node_id"]: row["seconds"] for row in rows}


def ran_where(conn: db.Connection, run_id: str) -> list[Row]:
    """Per worker that completed nodes of the run: host_label, queue, worker_id, nodes, seconds."""
    return conn.execute(
        "SELECT host_label, queue, worker_id, count(*) AS nodes,"
        " coalesce(sum(elapsed_s), 0)::float8 AS seconds FROM workflow_node_events"
        " WHERE run_id = %s AND event_type = 'completed' AND worker_id IS NOT NULL"
        " GROUP BY 1, 2, 3 ORDER BY queue, nodes DESC, worker_id",
        (run_id,),
    ).fetchall()


def crashes(conn: db.Connection, run_id: str) -> int:
    """How many times a node of the run was taken back from a worker that died."""
    row = conn.execute(
        "SELECT coalesce(sum(crash_count), 0) AS n FROM workflow_node_jobs WHERE run_id = %s",
        (run_id,),
    ).fetchone()
    return int(row["n"]) if row else 0


_JOBS = (
    "SELECT queue, 'queued' AS state, count(*) FILTER (WHERE blocked_reason IS NULL) AS n,"
    " count(*) FILTER (WHERE blocked_reason IS NOT NULL) AS blocked,"
    " extract(epoch FROM now())::float8 - extract(epoch FROM min(created_at)"
    " FILTER (WHERE blocked_reason IS NULL))::float8 AS oldest_s"
    " FROM {jobs} WHERE status = 'queued' GROUP BY queue"
    " UNION ALL SELECT queue, 'running', count(*), 0, NULL FROM {jobs}"
    " WHERE status = 'running' GROUP BY queue"
)
_NODES = _JOBS.replace("{jobs}", "workflow_node_jobs")
_INGEST = _JOBS.replace("{jobs}", "ingest_jobs")
_WAITING = (
    "SELECT count(*) AS n FROM workflow_runs r JOIN workflow_node_jobs j ON j.run_id = r.id"
    " WHERE r.status = 'running' AND j.status = 'awaiting_input'"
)


def queues(conn: db.Connection) -> list[Row]:
    """Per queue with work, `queued` or `running`: queue, state, n, blocked (not due), oldest_s."""
    return [*conn.execute(_NODES).fetchall(), *conn.execute(_INGEST).fetchall()]


def runs_by_status(conn: db.Connection) -> dict[str, int]:
    """How many runs there are of each status."""
    rows = conn.execute(
        "SELECT status, count(*) AS n FROM workflow_runs GROUP BY status"
    ).fetchall()
    return {row["status"]: row["n"] for row in rows}


def orchestration(conn: db.Connection, *, patience_s: float) -> dict[str, Any]:
    """What orchestrators have not done yet.

    `open_events`, `lag_s` (age of the oldest that is due, 0.0 for none), `answers` not taken yet,
    `awaiting_input` nodes, and `not_started`: ids (at most 50) of startable runs older than
    `patience_s`.
    """
    events = conn.execute(
        "SELECT count(*) AS n, coalesce(extract(epoch FROM now())::float8"
        " - extract(epoch FROM min(created_at)"
        " FILTER (WHERE available_at IS NULL OR available_at <= now()))::float8, 0) AS lag_s"
        " FROM workflow_dispatch_events WHERE processed_at IS NULL"
    ).fetchone()
    answers = conn.execute(
        "SELECT count(*) AS n FROM workflow_input_submissions"
        " WHERE status IN ('pending', 'processing')"
    ).fetchone()
    waiting = conn.execute(_WAITING).fetchone()
    late = conn.execute(
        "SELECT id FROM workflow_runs WHERE status = 'queued' AND mode = 'node'"
        " AND available_at IS NULL AND queued_at < now() - %s * interval '1 second'"
        " ORDER BY priority, queued_at, id LIMIT 50",
        (patience_s,),
    ).fetchall()
    assert events and answers and waiting
    return {
        "open_events": events["n"],
        "lag_s": events["lag_s"],
        "answers": answers["n"],
        "awaiting_input": waiting["n"],
        "not_started": [row["id"] for row in late],
    }


def waiting_inputs(conn: db.Connection, run_id: str | None, *, limit: int) -> list[Row]:
    """The input nodes that wait in live runs (of one run, if named), the longest wait first.

    run_id, workflow_name, node_id, job_id, input_spec (None: not stored yet), waiting_s, answered
    (whether an answer is in flight).
    """
    return conn.execute(
        "SELECT j.run_id, r.workflow_name, j.node_id, j.id AS job_id, j.input_spec,"
        " extract(epoch FROM now())::float8"
        " - extract(epoch FROM coalesce(j.started_at, j.created_at))::float8 AS waiting_s,"
        " EXISTS (SELECT FROM workflow_input_submissions s WHERE s.run_id = j.run_id"
        " AND s.node_id = j.node_id AND s.status IN ('pending', 'processing')) AS answered"
        " FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id"
        " WHERE j.status = 'awaiting_input' AND r.status = 'running'"
        " AND (%(run)s::text IS NULL OR r.id = %(run)s)"
        " ORDER BY waiting_s DESC, j.seq LIMIT %(limit)s",
        {"run": run_id, "limit": limit},
    ).fetchall()


def has_answer(conn: db.Connection, run_id: str, node_id: str) -> bool:
    """Whether an answer to the node is in flight."""
    row = conn.execute(
        "SELECT 1 AS one FROM workflow_input_submissions WHERE run_id = %s AND node_id = %s"
        " AND status IN ('pending', 'processing')",
        (run_id, node_id),
    ).fetchone()
    return row is not None


def find(conn: db.Connection, any_id: str) -> Row | None:
    """What has this id, a run before a job: kind (run, node job, ingest job), status, run_id,
    name (the workflow, node id or task); or None.
    """
    return conn.execute(
        "SELECT 1 AS rank, 'run' AS kind, status::text, id AS run_id, workflow_name AS name"
        " FROM workflow_runs WHERE id = %(id)s"
        " UNION ALL SELECT 2, 'node job', status::text, run_id, node_id FROM workflow_node_jobs"
        " WHERE id = %(id)s"
        " UNION ALL SELECT 3, 'ingest job', status::text, NULL, task_name FROM ingest_jobs"
        " WHERE id = %(id)s ORDER BY rank LIMIT 1",
        {"id": any_id},
    ).fetchone()


def running_under(conn: db.Connection, any_id: str) -> list[Row]:
    """The jobs that run now and are, or belong to, what has this id, each with its worker.

    job_id, name (node id or task), queue, worker_id, host_label, pid (None: its worker is unknown).
    """
    return conn.execute(
        "SELECT j.id AS job_id, j.node_id AS name, j.queue::text, j.worker_id,"
        " j.claimed_by AS host_label, w.pid FROM workflow_node_jobs j"
        " LEFT JOIN workers w USING (worker_id)"
        " WHERE j.status = 'running' AND (j.run_id = %(id)s OR j.id = %(id)s)"
        " UNION ALL SELECT j.id, j.task_name, j.queue, j.worker_id, j.claimed_by, w.pid"
        " FROM ingest_jobs j LEFT JOIN workers w USING (worker_id)"
        " WHERE j.status = 'running' AND j.id = %(id)s ORDER BY name",
        {"id": any_id},
    ).fetchall()


def node_counts(conn: db.Connection, run_id: str) -> dict[str, int]:
    """How many nodes of a run there are of each status."""
    rows = conn.execute(
        "SELECT status::text, count(*) AS n FROM workflow_node_jobs WHERE run_id = %s GROUP BY 1",
        (run_id,),
    ).fetchall()
    return {row["status"]: row["n"] for row in rows}


def held_jobs(conn: db.Connection) -> dict[str, list[str]]:
    """The ids of the jobs that run now, of both families, by the worker that holds them."""
    rows = conn.execute(
        "SELECT worker_id, array_agg(id) AS ids FROM ("
        "SELECT worker_id, id FROM workflow_node_jobs WHERE status = 'running'"
        " UNION ALL SELECT worker_id, id FROM ingest_jobs WHERE status = 'running') held"
        " WHERE worker_id IS NOT NULL GROUP BY worker_id"
    ).fetchall()
    return {row["worker_id"]: row["ids"] for row in rows}


def foreign_work(conn: db.Connection, workflows: Iterable[str], tasks: Iterable[str]) -> list[Row]:
    """Unfinished runs of other workflows and ingest jobs of other tasks: kind, name, n."""
    return conn.execute(
        "SELECT 'run' AS kind, workflow_name AS name, count(*) AS n FROM workflow_runs"
        " WHERE status IN ('queued', 'running') AND mode = 'node' AND workflow_name <> ALL (%s)"
        " GROUP BY 2 UNION ALL SELECT 'ingest job', task_name, count(*) FROM ingest_jobs"
        " WHERE status IN ('queued', 'running') AND task_name <> ALL (%s) GROUP BY 2 ORDER BY 1, 2",
        (list(workflows), list(tasks)),
    ).fetchall()


def unfinished(conn: db.Connection) -> list[Row]:
    """Workflows with runs that are not over, the oldest first: name, n, ids (3 oldest at most)."""
    return conn.execute(
        "SELECT workflow_name AS name, count(*) AS n,"
        " (array_agg(id ORDER BY queued_at, id))[1:3] AS ids FROM workflow_runs"
        " WHERE status IN ('queued', 'running') AND mode = 'node'"
        " GROUP BY 1 ORDER BY min(queued_at), 1"
    ).fetchall()


def ahead(conn: db.Connection, run_id: str) -> Row:
    """What was queued before a run, is no less urgent and has work to do now: n, names, first.

    `first`: the oldest one's id. A run that only waits for a person is in nobody's way.
    """
    row = conn.execute(
        "SELECT count(*) AS n, array_agg(DISTINCT o.workflow_name) AS names,"
        " (array_agg(o.id ORDER BY o.queued_at, o.id))[1] AS first"
        " FROM workflow_runs r JOIN workflow_runs o ON o.queued_at < r.queued_at"
        " AND o.priority <= r.priority AND o.mode = 'node'"
        " WHERE r.id = %s AND (o.status = 'queued' AND o.available_at IS NULL"
        " OR o.status = 'running' AND EXISTS (SELECT FROM workflow_node_jobs j"
        " WHERE j.run_id = o.id AND j.status IN ('queued', 'running')))",
        (run_id,),
    ).fetchone()
    assert row is not None
    return row


def failures(conn: db.Connection, run_id: str, *, limit: int) -> list[Row]:
    """A run's failed nodes, the first to fail first: node_id, error, traceback (or None)."""
    return conn.execute(
        "SELECT j.node_id, j.error, (SELECT e.detail ->> 'traceback' FROM workflow_node_events e"
        " WHERE e.run_id = j.run_id AND e.node_id = j.node_id AND e.event_type = 'failed'"
        " ORDER BY e.id DESC LIMIT 1) AS traceback FROM workflow_node_jobs j"
        " WHERE j.run_id = %s AND j.status = 'failed' ORDER BY j.finished_at, j.seq LIMIT %s",
        (run_id, limit),
    ).fetchall()
