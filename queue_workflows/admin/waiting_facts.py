"""Find why a queued job waits: what blocks it, and what live workers would claim before it."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, queues
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

COUNTED = 10_000
"""Jobs before another one that are counted."""


def job(conn: db.Connection, table: str, job_id: str) -> Row | None:
    """Return a job with its `kind`, and for a node its `run_status`; or None."""
    if table == job_tables.NODE_JOBS.name:
        return conn.execute(statements.waiting_facts.node_job, {"job": job_id}).fetchone()
    return conn.execute(statements.waiting_facts.ingest_job, {"job": job_id}).fetchone()


def run(conn: db.Connection, run_id: str) -> Row | None:
    """Return a run's id, workflow_name, status, available_at and definition; or None."""
    return conn.execute(statements.waiting_facts.run, {"run": run_id}).fetchone()


def run_nodes(conn: db.Connection, run_id: str) -> list[Row]:
    """Return id, node_id, status and input_spec of a run's nodes, in the order of the queue."""
    return conn.execute(statements.waiting_facts.run_nodes, {"run": run_id}).fetchall()


def workers(conn: db.Connection, queue: str, stale_s: float) -> list[Row]:
    """Return the live workers of a queue: who and where, what they can load, how they claim.

    `current_model`: what will be warm when they claim next. `off`: the policy of the switch that is
    OFF for them, or None. `node`, `ingest`: the job each runs.
    """
    given = {"queue": queue, "stale_s": stale_s}
    return conn.execute(statements.waiting_facts.workers, given).fetchall()


def ahead(
    conn: db.Connection, table: str, row: Row, *, newest: bool, models: list[str] | None = None
) -> Row:
    """Return how many jobs (COUNTED at most) go first by priority (`better`), and in all (`every`).

    `models`: only node jobs of these and such without one.
    """
    given = {key: row[key] for key in ("queue", "priority", "seq")}
    given |= {"newest": newest, "models": models, "most": COUNTED}
    if table == job_tables.NODE_JOBS.name:
        found = conn.execute(statements.waiting_facts.node_jobs_ahead, given).fetchone()
    else:
        found = conn.execute(statements.waiting_facts.ingest_jobs_ahead, given).fetchone()
    assert found is not None
    return found


def misfit(conn: db.Connection, worker: Row, model: str | None) -> Row:
    """Return `misfit` ('model', 'vram' or None), as the claim sees it, and `needs_gb`."""
    row = conn.execute(statements.waiting_facts.misfit, worker | {"model": model}).fetchone()
    assert row is not None
    return row


def models(conn: db.Connection, worker: Row) -> list[str]:
    """Return the models in the queue of which a worker can take jobs."""
    row = conn.execute(statements.waiting_facts.models, worker).fetchone()
    return row["models"] if row else []


def choice(conn: db.Connection, worker: Row, can: list[str]) -> Row:
    """Return what a gpu worker would claim next: model, how, band, seq, why."""
    claim = stored_json.mapping(worker["claim"])
    grace_s, bound_s = (
        stored_json.number(claim.get("grace_s")),
        stored_json.number(claim.get("bound_s")),
    )
    values: dict[str, Any] = {
        "models": [*can, ""],
        "newest": claim.get("newest") is True,
        "policy": stored_json.text(claim.get("policy")) or "strict",
        "grace_s": 300.0 if grace_s is None else grace_s,
        "bound_s": 2400.0 if bound_s is None else bound_s,
        "versions": stored_json.texts(claim.get("versions")),
    }
    row = conn.execute(statements.waiting_facts.choice, worker | values).fetchone()
    assert row is not None
    return row


def weighed(conn: db.Connection, worker: Row, model: str) -> Row:
    """Return how a worker without this model loaded weighs its jobs.

    `holders`: the hosts that have loaded the model.
    """
    versions = stored_json.texts(stored_json.mapping(worker["claim"]).get("versions"))
    values = worker | {"model": model, "versions": versions}
    row = conn.execute(statements.waiting_facts.weighed, values).fetchone()
    assert row is not None
    return row


def is_newest(conn: db.Connection, row: Row) -> bool:
    """Return whether no due gpu job of the same model and priority came after this one."""
    given = {key: row[key] for key in ("required_model", "priority", "seq")}
    return conn.execute(statements.waiting_facts.newer_gpu_job, given).fetchone() is None


def lock_owner(conn: db.Connection, table: str, row: Row) -> Row | None:
    """Return id and status of the job that runs under this one's lock key or runs next; or None."""
    given = {"lock_key": row["lock_key"]}
    return conn.execute(statements.waiting_facts.lock_owner[table], given).fetchone()


def awaited_event(conn: db.Connection, table: str, row: Row) -> Row | None:
    """Return name, key and `due_at` of the event for which a job's handler waits, or None."""
    given = {"job": row["id"], "claim": row["claim_no"], "table": table}
    return conn.execute(statements.waiting_facts.awaited_event, given).fetchone()


def partition_limits(conn: db.Connection, row: Row) -> Row:
    """Return the limits in force for a job's partition, with `paused`, `running` and `due_at`."""
    return queues.partition_limits(conn, row["queue"], row["partition_key"])


def queue_limits(conn: db.Connection, queue: str) -> Row | None:
    """Return the settings of a queue with `paused`, `running` if that is limited, and `due_s`.

    `due_s`: in how many seconds its rate has room for one more start; None: it has room. Returns
    None for a queue without settings.
    """
    settings = queues.settings_of(conn, queue)
    return None if settings is None else settings | queues.use(conn, settings)
