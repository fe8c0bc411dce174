"""Why a queued job waits: what each live worker of its queue would claim instead."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.runtime import shapes
from queue_workflows.store import limits
from queue_workflows.types import Row

COUNTED = 10_000
_JOB = {
    "workflow_node_jobs": (
        "SELECT j.*, r.status AS run_status, 'node job' AS kind FROM workflow_node_jobs j"
        " JOIN workflow_runs r ON r.id = j.run_id WHERE j.id = %s"
    ),
    "ingest_jobs": "SELECT j.*, 'ingest job' AS kind FROM ingest_jobs j WHERE j.id = %s",
}
_WORKERS = (
    "SELECT w.worker_id, w.host_label, w.pid, w.state, w.known_models,"
    " coalesce((SELECT j.required_model FROM workflow_node_jobs j WHERE j.worker_id = w.worker_id"
    " AND j.status = 'running' LIMIT 1), w.detail -> 'model' ->> 'id', w.current_model)"
    " AS current_model,"
    " w.vram_total_mb, w.detail -> 'claim' AS claim,"
    " queue_workflows_off_policy(w.host_label, w.queue) AS off,"
    " (SELECT j.id FROM workflow_node_jobs j WHERE j.worker_id = w.worker_id"
    " AND j.status = 'running' LIMIT 1) AS node, (SELECT j.id FROM ingest_jobs j"
    " WHERE j.worker_id = w.worker_id AND j.status = 'running' LIMIT 1) AS ingest"
    " FROM workers w WHERE w.queue = %(queue)s AND w.state NOT IN ('stopped', 'dead')"
    " AND w.last_seen > now() - %(stale_s)s * interval '1 second'"
    " ORDER BY w.host_label, w.started_at, w.worker_id"
)
# What stands before the job in the claim's order, of what the worker can take.
_AHEAD = (
    "SELECT count(*) FILTER (WHERE priority < %(priority)s) AS better, count(*) AS every FROM ("
    "SELECT j.priority FROM {jobs} j{runs} WHERE j.queue = %(queue)s AND j.status = 'queued'"
    " AND j.blocked_reason IS NULL AND (j.priority < %(priority)s OR (j.priority = %(priority)s"
    " AND CASE WHEN %(newest)s THEN j.seq > %(seq)s ELSE j.seq < %(seq)s END)){of} LIMIT 10000) a"
)
_LIVE = (
    " JOIN workflow_runs r ON r.id = j.run_id"
    " AND r.status NOT IN ('completed', 'failed', 'cancelled')"
)
_OF = " AND (j.required_model IS NULL OR j.required_model = ANY (%(models)s))"


def job(conn: db.Connection, table: str, job_id: str) -> Row | None:
    """The row with `kind`, and of a node its `run_status`; or None."""
    return conn.execute(_JOB[table].encode(), (job_id,)).fetchone()


def run(conn: db.Connection, run_id: str) -> Row | None:
    """Return a run's id, workflow_name, status, available_at and definition; or None."""
    return conn.execute(
        "SELECT id, workflow_name, status::text, available_at, definition FROM workflow_runs"
        " WHERE id = %s",
        (run_id,),
    ).fetchone()


def run_nodes(conn: db.Connection, run_id: str) -> list[Row]:
    """Return id, node_id, status and input_spec of a run's nodes, in the order of the queue."""
    return conn.execute(
        "SELECT id, node_id, status::text, input_spec FROM workflow_node_jobs WHERE run_id = %s"
        " ORDER BY seq",
        (run_id,),
    ).fetchall()


def workers(conn: db.Connection, queue: str, stale_s: float) -> list[Row]:
    """The live workers of a queue: who and where, what they can load, how they claim.

    `current_model`: what will be warm when they claim next. `off`: the policy of what switches them
    off, or None; `node`, `ingest`: the job each runs.
    """
    return conn.execute(_WORKERS, {"queue": queue, "stale_s": stale_s}).fetchall()


def ahead(
    conn: db.Connection, table: str, row: Row, *, newest: bool, models: list[str] | None = None
) -> Row:
    """How many jobs (10,000 at most) go first by priority (`better`), and in all (`every`).

    `models`: only jobs of these and such without one.
    """
    nodes = table == "workflow_node_jobs"
    query = (
        _AHEAD.replace("{jobs}", table)
        .replace("{runs}", _LIVE if nodes else "")
        .replace("{of}", "" if models is None else _OF)
    )
    values = {key: row[key] for key in ("queue", "priority", "seq")}
    found = conn.execute(query.encode(), values | {"newest": newest, "models": models}).fetchone()
    assert found is not None
    return found


def misfit(conn: db.Connection, worker: Row, model: str | None) -> Row:
    """`misfit` ('model', 'vram' or None), as the claim sees it, and `needs_gb`."""
    row = conn.execute(
        "SELECT queue_workflows_gpu_misfit(%(host_label)s, %(known_models)s::text[],"
        " %(vram_total_mb)s::integer, %(model)s) AS misfit,"
        " queue_workflows_gpu_needs(%(host_label)s, %(model)s) AS needs_gb",
        worker | {"model": model},
    ).fetchone()
    assert row is not None
    return row


def models(conn: db.Connection, worker: Row) -> list[str]:
    """Of the models in the queue those that a worker can take jobs of."""
    row = conn.execute(
        "SELECT queue_workflows_gpu_can(%(host_label)s, %(known_models)s::text[],"
        " %(vram_total_mb)s::integer) AS models",
        worker,
    ).fetchone()
    return row["models"] if row else []


def choice(conn: db.Connection, worker: Row, can: list[str]) -> Row:
    """What the worker would claim next: model, how, band, seq, why; see gpu_policy.sql."""
    claim = shapes.mapping(worker["claim"])
    grace_s, bound_s = shapes.number(claim.get("grace_s")), shapes.number(claim.get("bound_s"))
    values: dict[str, Any] = {
        "models": [*can, ""],
        "newest": claim.get("newest") is True,
        "policy": shapes.text(claim.get("policy")) or "strict",
        "grace_s": 300.0 if grace_s is None else grace_s,
        "bound_s": 2400.0 if bound_s is None else bound_s,
    }
    row = conn.execute(
        "SELECT * FROM queue_workflows_gpu_next(%(worker_id)s, %(host_label)s, %(current_model)s,"
        " %(models)s::text[], %(newest)s, %(policy)s, %(grace_s)s::float8, %(bound_s)s::float8)",
        worker | values,
    ).fetchone()
    assert row is not None
    return row


def weighed(conn: db.Connection, worker: Row, model: str) -> Row:
    """How a cold worker weighs a line; see gpu_policy.sql. `holders`: hosts that hold the model."""
    row = conn.execute(
        "SELECT g.*, (SELECT array_agg(DISTINCT f.host_label) FROM"
        " queue_workflows_gpu_fleet(%(worker_id)s) f WHERE f.model = %(model)s) AS holders"
        " FROM queue_workflows_gpu_weigh(ARRAY(SELECT f FROM queue_workflows_gpu_fleet("
        "%(worker_id)s) f), %(host_label)s, %(model)s) g",
        worker | {"model": model},
    ).fetchone()
    assert row is not None
    return row


def is_newest(conn: db.Connection, row: Row) -> bool:
    """Whether no gpu job of its model and priority came after it."""
    found = conn.execute(
        "SELECT FROM workflow_node_jobs j"
        + _LIVE
        + " WHERE j.queue = 'gpu' AND j.status = 'queued'"
        " AND j.blocked_reason IS NULL AND j.required_model IS NOT DISTINCT FROM %(required_model)s"
        " AND j.priority = %(priority)s AND j.seq > %(seq)s LIMIT 1",
        {key: row[key] for key in ("required_model", "priority", "seq")},
    ).fetchone()
    return found is None


def turn(conn: db.Connection, table: str, row: Row) -> Row | None:
    """The job that has the turn of this one's lock key: id and status; or None."""
    query = (
        "SELECT j.id, j.status::text FROM {jobs} j WHERE j.lock_key = %s AND (j.status = 'running'"
        " OR (j.status = 'queued' AND j.blocked_reason IS NULL)) LIMIT 1"
    )
    return conn.execute(query.replace("{jobs}", table).encode(), (row["lock_key"],)).fetchone()


def limits_of(conn: db.Connection, row: Row) -> Row:
    """The limits in force for an ingest job's partition, with `paused`, `running` and `due_at`."""
    return limits.of_partition(conn, row["queue"], row["partition_key"])


def queue_limits(conn: db.Connection, queue: str) -> Row | None:
    """What is said of a queue, with `paused`; `running`, where that is limited, and `due_s`.

    `due_s`: in how many seconds its rate has room for one more start; None: it has.
    """
    said = limits.of_queue(conn, queue)
    return None if said is None else said | limits.use(conn, said)
