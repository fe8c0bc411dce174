"""Claim one job for this process, without a worker that renews its lease.

Its length: the next job of each kind of queue, and a job that the caller names.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import (
    claim_isolation,
    claims,
    job_tables,
)
from queue_workflows.runtime import identity
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
LEASE_S = 600.0


class Claimed(dict[str, Any]):
    """The row of a job as its claim returned it: its holder may run the job in any process."""


@functools.lru_cache(maxsize=8)
def _own_worker_id(host: str, _pid: int) -> str:
    return identity.new_worker_id(host)


def _claimant(queue: str, host: str | None, lease_s: float, **more: Any) -> claims.Claimant:
    label = host or config.host_label()
    obey = not config.DISABLE_WORKER_CONTROL.read()
    own_id = _own_worker_id(label, os.getpid())
    versions = config.node_version_keys() if queue in config.DAG_QUEUES else None
    return claims.Claimant(own_id, label, queue, lease_s, obey=obey, versions=versions, **more)


def claim_cpu_job(lane: int, *, host: str | None, lease_s: float, host_priority: int) -> Row | None:
    """Claim the next cpu job; return its row, or None if there is none."""
    who = _claimant("cpu", host, lease_s, newest=host_priority < 0, lane=lane)
    return _claim(job_tables.NODE_JOBS, who)


def claim_gpu_job(
    lane: int,
    current_model: str | None,
    *,
    host: str | None,
    lease_s: float,
    host_priority: int,
    known_models: Iterable[str] | None,
) -> Row | None:
    """Claim the next gpu job by GPU_CLAIM_POLICY; return its row, or None if there is none.

    `known_models` None: the process can load any model.
    """
    who = _claimant(
        "gpu",
        host,
        lease_s,
        newest=host_priority < 0,
        lane=lane,
        model=current_model,
        models=None if known_models is None else sorted(known_models),
        policy=config.gpu_claim_policy(),
        grace_s=config.GPU_URGENT_GRACE_S.read(),
        bound_s=config.GPU_MAX_WAIT_S.read(),
    )
    return _claim(job_tables.NODE_JOBS, who)


def claim_ingest_job(queue: str, *, host: str | None, lease_s: float) -> Row | None:
    """Claim the next job of an ingest queue; return its row, or None if there is none."""
    return _claim(job_tables.INGEST_JOBS, _claimant(queue, host, lease_s))


def take(table: job_tables.JobTable, job: Row) -> Row | None:
    """Return a job that this process may run, or None if it may not; `job`: a row of it.

    A row that says `queued` is claimed now; None if that is not possible, for example since the job
    is paused, switched OFF or not queued any more. A row that a claim returned, or that was read
    under a claim of this process, is returned if the claim still holds.
    """
    if job.get("status") == "queued":
        who = _claimant(job["queue"], None, LEASE_S)
        with db.transaction() as conn:
            job_id = claims.claim_job(conn, table, job["id"], who)
            return _row(conn, table, job_id) if job_id else None
    own = identity.process_prefix(config.host_label(), os.getpid())
    is_read = "created_at" in job and not isinstance(job, Claimed)
    if is_read and not (job["worker_id"] or "").startswith(own):
        if job["status"] == "running":
            _log.warning("job %s is not run here: %s holds it", job["id"], job["worker_id"])
        return None
    with db.statement() as conn:
        return job if claims.is_held(conn, job_tables.lease_of(table, job)) else None


def _row(conn: db.Connection, table: job_tables.JobTable, job_id: str) -> Claimed | None:
    get = statements.nodes.get if table.in_run else statements.ingest_jobs.get
    row = get(conn, job=job_id)
    return Claimed(row) if row else None


def _claim(table: job_tables.JobTable, who: claims.Claimant) -> Row | None:
    try:
        with db.transaction() as conn:
            jobs = claims.claim(conn, table, who, promote=True)
            return _row(conn, table, jobs[0]["id"]) if jobs else None
    except db.Error as error:
        if not claim_isolation.is_about_rows(error):
            raise
    # A row that raises in the statement would otherwise keep every other job from being claimed.
    with db.transaction() as conn:
        found = db.run(conn, claim_isolation.claim_apart(table, who, promote=True))
        return _row(conn, table, found.job_id) if found.job_id else None
