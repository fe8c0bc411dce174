"""Keep the 0.3.0 functions for node jobs and ingest jobs.

Some are functions of the present API under their old names. The others claim, change and requeue
jobs for a caller other than a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from queue_workflows import db, history, jobs, queues, runs, workers
from queue_workflows.claim import job_tables, manual_claims, record, recovery, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.types import IngestJob, JobId, NodeJob, Row

_IN_BRIEF = ("id", "run_id", "node_id", "status")

# --- node jobs ---------------------------------------------------------------------------------

enqueue_node_job = runs.add_node
insert_skipped_job = runs.add_skipped_node
list_jobs_for_run = runs.nodes
record_node_event = history.record_event
prune_node_events = history.prune_events
snapshot = queues.running_and_queued


def get_node_job(job_id: str) -> NodeJob | None:
    """Call `jobs.get` for a node's job."""
    return jobs.get(job_id, kind="node")


def claim_next_cpu_job(
    worker_lane: int = 0, *, host: str | None = None, lease_s: float = 600, host_priority: int = 0
) -> Row | None:
    """Claim the next cpu job for this process; return its row, or None if there is none."""
    return manual_claims.claim_next(
        job_tables.NODE_JOBS,
        "cpu",
        host=host,
        lease_s=lease_s,
        newest=host_priority < 0,
        lane=worker_lane,
    )


def claim_next_gpu_job(
    worker_lane: int = 0,
    current_model: str | None = None,
    *,
    host: str | None = None,
    lease_s: float = 600,
    host_priority: int = 0,
    known_models: Iterable[str] | None = None,
) -> Row | None:
    """Claim the next gpu job for this process; return its row, or None if there is none.

    GPU_CLAIM_POLICY `strict` orders by priority band, then `current_model`, then age. Without
    `known_models`, the process can load any model.
    """
    return manual_claims.claim_next(
        job_tables.NODE_JOBS,
        "gpu",
        host=host,
        lease_s=lease_s,
        newest=host_priority < 0,
        lane=worker_lane,
        model=current_model,
        models=None if known_models is None else sorted(known_models),
    )


def mark_completed(
    job_id: str,
    *,
    context_delta: dict[str, Any] | None,
    seconds: float | None = None,
    vm_rss_mb_peak: int | None = None,
) -> NodeJob | None:
    """Complete a job, with its outbox event; return its row, or None if it was over."""
    text = payload.encode(context_delta or {}, "context_delta")
    given: dict[str, Any] = {
        "job": job_id, "result": text, "seconds": seconds, "rss": vm_rss_mb_peak,
    }  # fmt: skip
    with db.transaction() as conn:
        complete = statements.manual_changes.complete[job_tables.NODE_JOBS.name]
        row = complete(conn, **given)
    return cast("NodeJob | None", row)


def mark_failed(job_id: str, *, error: str, seconds: float | None = None) -> NodeJob | None:
    """Fail a job, with its outbox event; return its row, or None if it was over."""
    return cast("NodeJob | None", _fail(job_tables.NODE_JOBS, job_id, error, seconds))


def _fail(table: job_tables.JobTable, job_id: str, error: str, seconds: float | None) -> Row | None:
    text = payload.error_text(error)
    with db.transaction() as conn:
        fail = statements.manual_changes.fail[table.name]
        return fail(conn, job=job_id, error=text, seconds=seconds)


def mark_awaiting_input(job_id: str) -> NodeJob | None:
    """Park a job until its answer, with its outbox event; return its row, or None if it is over."""
    with db.transaction() as conn:
        row = statements.manual_changes.park_node(conn, job=job_id)
        if row is None:
            job = statements.nodes.get(conn, job=job_id)
            row = job if job and job["status"] == "awaiting_input" else None
    return cast("NodeJob | None", row)


def set_resolved_inputs(job_id: str, resolved_inputs: dict[str, Any]) -> NodeJob | None:
    """Store the resolved inputs of a node; return its row, or None if there is no such job."""
    text = payload.encode(resolved_inputs, "resolved_inputs")
    with db.transaction() as conn:
        row = statements.nodes.set_resolved_inputs(conn, job=job_id, inputs=text)
    return cast("NodeJob | None", row)


def set_input_spec(run_id: str, node_id: str, spec: dict[str, Any]) -> NodeJob | None:
    """Store the question of an input node; return its row, or None if there is no such node."""
    text = payload.encode(spec, "input_spec")
    with db.transaction() as conn:
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        row = statements.nodes.set_input_spec(conn, job=job["id"], spec=text) if job else None
    return cast("NodeJob | None", row)


def reclaim_expired_leases() -> list[Row]:
    """Take back node jobs whose lease has lapsed; return id, run_id, node_id, status of each.

    A row that raises is left out, and the others are taken back.
    """
    with db.statement() as conn:
        isolation = row_isolation.Isolation()
        return _brief(recovery.reclaim_lapsed(conn, job_tables.NODE_JOBS, isolation))


def _brief(rows: list[Row]) -> list[Row]:
    return [{name: row[name] for name in _IN_BRIEF} for row in rows]


def requeue_job_for_retry(job_id: str) -> NodeJob | None:
    """Queue a running job at the front and count a watchdog retry; None if it does not run."""
    rows = _requeue(job_tables.NODE_JOBS, job=job_id, counted=True)
    return cast("NodeJob | None", rows[0] if rows else None)


def reclaim_all_running_for_resume() -> list[Row]:
    """Queue every running node job at the front, uncounted; see `reclaim_expired_leases`."""
    return _brief(_requeue(job_tables.NODE_JOBS))


def requeue_running_for_worker(host_label: str, queue: str) -> int:
    """Queue a host's running jobs of a queue at the front, uncounted; return how many."""
    return len(_requeue(job_tables.of_queue(queue), host=host_label, queue=queue))


def _requeue(
    table: job_tables.JobTable,
    *,
    job: str | None = None,
    host: str | None = None,
    queue: str | None = None,
    counted: bool = False,
) -> list[Row]:
    requeue = statements.recovery.requeue[table.name]
    with db.transaction() as conn:
        return requeue(
            conn, ids=None if job is None else [job], host=host, queue=queue, counted=counted,
            band=record.FRONT_PRIORITY, detail='{"by": "operator"}',
        )  # fmt: skip


def cancel_queued_jobs_for_run(run_id: str) -> int:
    """Cancel a run's queued jobs and leave the run as it is; return how many."""
    with db.transaction() as conn:
        return len(statements.cancellation.cancel_queued_nodes(conn, run_id=run_id))


def list_unprocessed_dispatch_events(*, limit: int = 50) -> list[Row]:
    """Return outbox events that no dispatcher has processed, the oldest first."""
    with db.transaction() as conn:
        return statements.outbox.unprocessed(conn, limit=limit)


def count_unprocessed_dispatch_events() -> int:
    """Return the number of outbox events that no dispatcher has processed."""
    with db.statement() as conn:
        return statements.overview.open_events(conn)["n"]


# --- workers -----------------------------------------------------------------------------------

upsert_worker_heartbeat = workers.heartbeat
clear_worker_current_model = workers.clear_model
flag_stale_workers_holding_running_jobs = workers.flag_stale


# --- ingest jobs -------------------------------------------------------------------------------

ingest_snapshot = queues.ingest_counts


def enqueue_ingest_job(
    *,
    task_name: str,
    queue: str,
    reason: str = "tick",
    priority: int = 100,
    args: Mapping[str, Any] | None = None,
    conn: Any = None,
) -> JobId:
    """Call `jobs.enqueue`; the priority is 100 even if the task declares another."""
    return jobs.enqueue(
        task_name, queue=queue, reason=reason, priority=priority, args=args, conn=conn
    )


def get_ingest_job(job_id: str) -> IngestJob | None:
    """Call `jobs.get` for an ingest job."""
    return jobs.get(job_id, kind="ingest")


def claim_next_ingest_job(
    queue: str, *, host: str | None = None, lease_s: float = 600
) -> Row | None:
    """Claim the next job of an ingest queue for this process; return its row, or None."""
    return manual_claims.claim_next(job_tables.INGEST_JOBS, queue, host=host, lease_s=lease_s)


def mark_ingest_completed(
    job_id: str, *, result: Any = None, seconds: float | None = None
) -> IngestJob | None:
    """Complete a job; return its row, or None if it was over."""
    text = payload.encode(result, "result")
    with db.transaction() as conn:
        complete = statements.manual_changes.complete[job_tables.INGEST_JOBS.name]
        row = complete(conn, job=job_id, result=text, seconds=seconds)
    return cast("IngestJob | None", row)


def mark_ingest_failed(
    job_id: str, *, error: str, seconds: float | None = None
) -> IngestJob | None:
    """Fail a job; return its row, or None if it was over."""
    return cast("IngestJob | None", _fail(job_tables.INGEST_JOBS, job_id, error, seconds))


def reclaim_expired_ingest_leases() -> list[Row]:
    """Take back ingest jobs whose lease has lapsed, except rows that raise; return the rows."""
    with db.statement() as conn:
        isolation = row_isolation.Isolation()
        return recovery.reclaim_lapsed(conn, job_tables.INGEST_JOBS, isolation)
