"""Claim and run jobs in a process without a worker, where leases are not renewed.

Each function takes a connection from the pool only for the time of a statement.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from queue_workflows import config, db
from queue_workflows.claim import claims, job_steps, job_tables, row_isolation
from queue_workflows.db import statements
from queue_workflows.runtime import identity
from queue_workflows.tasks import control
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
LEASE_S = 600.0
AGAIN_FIRST_S = 0.1
AGAIN_MAX_S = 5.0
T = TypeVar("T")


class Claimed(dict[str, Any]):
    """The row of a job as its claim returned it; whoever has it may run the job, in any process."""


@functools.lru_cache(maxsize=8)
def _own_worker_id(host: str, _pid: int) -> str:
    return identity.new_worker_id(host)


def _claimant(queue: str, host: str | None, lease_s: float, **more: Any) -> claims.Claimant:
    label = host or config.host_label()
    obey = not config.DISABLE_WORKER_CONTROL.read()
    own_id = _own_worker_id(label, os.getpid())
    versions = config.node_version_keys() if queue in config.DAG_QUEUES else None
    who = claims.Claimant(own_id, label, queue, lease_s, obey=obey, versions=versions, **more)
    if queue != "gpu":
        return who
    return who._replace(policy=config.gpu_claim_policy())


def claim_next(
    table: job_tables.JobTable, queue: str, *, host: str | None, lease_s: float, **more: Any
) -> Row | None:
    """Claim the next job of a queue; return its row, or None if there is none.

    `more` has further fields of `claims.Claimant`. Gpu jobs are chosen by GPU_CLAIM_POLICY.
    """
    who = _claimant(queue, host, lease_s, **more)
    try:
        with db.transaction() as conn:
            return _row_of(conn, table, claims.claim(table, who, promote=True))
    except db.Error as error:
        if not row_isolation.is_about_rows(error):
            raise
    # Otherwise a row that raises in the statement would prevent all claims.
    with db.transaction() as conn:
        return _row_of(conn, table, claims.claim_apart(table, who))


def take(table: job_tables.JobTable, job: Row) -> Row | None:
    """Return the row of a job if this process may run it, else None.

    If the row `job` has the status `queued`, claim it now; that may fail, for example because the
    job is paused, switched OFF or not queued any more. A row that a claim returned, or that was
    read under a claim of this process, is returned if the claim still holds.
    """
    if job.get("status") == "queued":
        who = _claimant(job["queue"], None, LEASE_S)
        with db.transaction() as conn:
            return _row_of(conn, table, claims.claim(table, who, only=job["id"]))
    own = identity.process_prefix(config.host_label(), os.getpid())
    is_read = "created_at" in job and not isinstance(job, Claimed)
    if is_read and not (job["worker_id"] or "").startswith(own):
        if job["status"] == "running":
            _log.warning("job %s is not run here: %s holds it", job["id"], job["worker_id"])
        return None
    fence = job_tables.fence(job_tables.lease_of(table, job))
    with db.statement() as conn:
        return job if statements.claims.is_held[table.name](conn, **fence) is not None else None


def _row_of(
    conn: db.Connection, table: job_tables.JobTable, claim: db.Script[list[Any]]
) -> Claimed | None:
    rows = db.run(conn, claim)
    if not rows:
        return None
    get = statements.nodes.get if table.in_run else statements.ingest_jobs.get
    row = get(conn, job=rows[0]["id"])
    return Claimed(row) if row else None


def asker(table: job_tables.JobTable, job: Row, interrupted: Callable[[], bool]) -> control.Ask:
    """Return a function that answers requests of a job's handler in the calling thread.

    Each request takes a connection from the pool for one statement.
    """
    lease = job_tables.lease_of(table, job)

    def ask(request: JsonDict) -> control.Answered:
        def answer() -> JsonDict:
            with db.statement() as conn:
                return db.run(conn, job_steps.answer(lease, request))

        return control.answered(lambda: despite_outages(answer, interrupted))

    return ask


def despite_outages(
    work: Callable[[], T],
    interrupted: Callable[[], bool],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Call `work` for a running handler; while the database is away, `wait(seconds)` and retry.

    So an outage does not fail the job. The retries end with the lease, or with the first try after
    `interrupted` returns True. The beginning and the end of the outage are logged.
    """
    pause_s, is_away = AGAIN_FIRST_S, False
    while True:
        try:
            found = work()
        except (db.OperationalError, db.InterfaceError) as error:
            if interrupted():
                raise
            if not is_away:
                is_away = True
                _log.warning("waiting for the database: %s", str(error).strip())
            wait(pause_s)
            pause_s = min(AGAIN_MAX_S, 2 * pause_s)
        else:
            if is_away:
                _log.warning("the database is back")
            return found
