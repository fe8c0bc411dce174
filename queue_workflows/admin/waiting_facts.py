"""Find why a queued job waits: what blocks it, and what live workers would claim before it."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

COUNTED = 10_000
"""Jobs before another one that are counted."""


def job(conn: db.Connection, table: str, job_id: str) -> Row | None:
    """Return a job with its `kind`, and for a node its `run_status`; or None."""
    if table == job_tables.NODE_JOBS.name:
        return statements.waiting_facts.node_job(conn, job=job_id)
    return statements.waiting_facts.ingest_job(conn, job=job_id)


def ahead(
    conn: db.Connection, table: str, row: Row, *, newest: bool, models: list[str] | None = None
) -> Row:
    """Return how many jobs (COUNTED at most) go first by priority (`better`), and in all (`every`).

    `models`: only node jobs of these and such without one.
    """
    given = {key: row[key] for key in ("queue", "priority", "seq")}
    given |= {"newest": newest, "models": models, "most": COUNTED}
    if table == job_tables.NODE_JOBS.name:
        return statements.waiting_facts.node_jobs_ahead(conn, **given)
    return statements.waiting_facts.ingest_jobs_ahead(conn, **given)


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
    return statements.waiting_facts.choice(conn, **(worker | values))


def weighed(conn: db.Connection, worker: Row, model: str) -> Row:
    """Return how a worker without this model loaded weighs its jobs.

    `holders`: the hosts that have loaded the model.
    """
    versions = stored_json.texts(stored_json.mapping(worker["claim"]).get("versions"))
    given: Row = worker | {"model": model, "versions": versions}
    return statements.waiting_facts.weighed(conn, **given)


def is_newest(conn: db.Connection, row: Row) -> bool:
    """Return whether no due gpu job of the same model and priority came after this one."""
    given = {key: row[key] for key in ("required_model", "priority", "seq")}
    return statements.waiting_facts.newer_gpu_job(conn, **given) is None


def partition_limits(conn: db.Connection, row: Row) -> Row:
    """Return the limits in force for a job's partition, with `paused`, `running` and `due_at`."""
    return statements.queues.partition_limits(
        conn, queue=row["queue"], partition=row["partition_key"]
    )


def queue_limits(conn: db.Connection, queue: str) -> Row | None:
    """Return the settings of a queue with `paused`, `running` if that is limited, and `due_s`.

    `due_s`: in how many seconds its rate has room for one more start; None: it has room. Returns
    None for a queue without settings.
    """
    for settings in statements.queues.settings(conn, queue=queue):
        return settings | statements.queues.use(conn, **settings)
    return None
