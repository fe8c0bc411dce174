"""Jobs of both families: the door of hosts and operators; each call is one transaction."""

from __future__ import annotations

import datetime
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from queue_workflows import config, db, errors, types
from queue_workflows.admin import overview
from queue_workflows.dag import payload
from queue_workflows.db import app_connections, check_violations
from queue_workflows.engine import (
    cancellation,
    claims,
    ingest_jobs,
    job_events,
    job_tables,
    manual_changes,
    models,
    nodes,
    outbox,
    quarantine,
    recovery,
    row_isolation,
    workers,
)
from queue_workflows.runtime import identity
from queue_workflows.tasks import job_validation
from queue_workflows.types import IngestJob, JobId, JobOptions, NewIngestJob, NodeJob, Row

if TYPE_CHECKING:
    from typing_extensions import Unpack

R = TypeVar("R")
_log = logging.getLogger(__name__)
LIVE_WORKER_S = 30.0
"""Heartbeat age up to which a worker counts as capacity (the contract's figure)."""


@functools.lru_cache(maxsize=8)
def _own_worker_id(host: str, _pid: int) -> str:
    return identity.new_worker_id(host)


def _claimant(queue: str, host: str | None, lease_s: float, **more: Any) -> claims.Claimant:
    label = host or config.host_label()
    obey = not config.DISABLE_WORKER_CONTROL.read()
    own_id = _own_worker_id(label, os.getpid())
    return claims.Claimant(own_id, label, queue, lease_s, obey=obey, **more)


# --- node jobs ---------------------------------------------------------------------------------


@check_violations.translated()
def enqueue_node_job(
    *,
    run_id: str,
    node_id: str,
    node_module: str,
    queue: str,
    required_model: str | None = None,
    inputs: dict[str, Any] | None = None,
    priority: int = 100,
    pipeline_name: str | None = None,
) -> str:
    """Queue one node of a run; its job id. A node that the run has already keeps its row and id.

    Raises before any write: `UnknownQueue` (a ValueError) unless cpu or gpu, `InvalidConfig` (a
    ValueError) for a cpu job with a model, `InvalidPayload`, `UnknownJob` (a KeyError) for no such
    run.
    """
    required_model = _model(node_id, queue, required_model)
    values = {
        "run_id": run_id,
        "node_id": node_id,
        "node_module": node_module,
        "queue": queue,
        "required_model": required_model,
        "inputs": payload.encode(inputs or {}, f"inputs of node {node_id!r}"),
        "priority": priority,
        "pipeline_name": pipeline_name,
    }
    with db.transaction() as conn:
        job_id = nodes.enqueue(conn, values)
        if job_id is not None:
            return job_id
        existing = nodes.get_by_node(conn, run_id, node_id)
    if existing is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    return existing["id"]


def _model(node_id: str, queue: str, required_model: str | None) -> str | None:
    """The model, None for an empty one, which no worker could be asked for."""
    config.check_queue(queue, config.DAG_QUEUES)
    if not required_model:
        return None
    if queue == "cpu":
        raise errors.InvalidConfig(f"node {node_id!r}: a cpu job cannot require a model")
    if not types.is_name(required_model):
        raise errors.InvalidConfig(
            f"node {node_id!r}: model {required_model[:40]!r}: an id has 1 to 400 bytes of UTF-8"
        )
    return required_model


@check_violations.translated()
def insert_skipped_job(
    *,
    run_id: str,
    node_id: str,
    node_module: str | None = None,
    queue: str = "cpu",
    required_model: str | None = None,
    pipeline_name: str | None = None,
) -> str:
    """Put a `skipped` row in a node's place, which satisfies what depends on it; its job id.

    `node_module` None: the node's id, as nothing ever imports it. A node that the run has already
    keeps its row and id. Raises as `enqueue_node_job` does.
    """
    required_model = _model(node_id, queue, required_model)
    row: dict[str, Any] = {
        "node_id": node_id,
        "node_module": node_id if node_module is None else node_module,
        "queue": queue,
        "required_model": required_model,
        "status": "skipped",
        "pipeline_name": pipeline_name,
        "inputs": {},
    }
    with db.transaction() as conn:
        nodes.insert_planned(conn, run_id, payload.encode([row], "row"))
        found = nodes.get_by_node(conn, run_id, node_id)
    if found is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    return found["id"]


def get_node_job(job_id: str) -> NodeJob | None:
    """The job, or None."""
    with db.statement() as conn:
        return cast("NodeJob | None", nodes.get(conn, job_id))


def list_jobs_for_run(run_id: str) -> list[NodeJob]:
    """The run's jobs, oldest first."""
    with db.statement() as conn:
        return cast("list[NodeJob]", nodes.of_run(conn, run_id))


def claim_next_cpu_job(
    worker_lane: int = 0, *, host: str | None = None, lease_s: float = 600, host_priority: int = 0
) -> Row | None:
    """Claim the next cpu job for this process; the row, or None."""
    who = _claimant("cpu", host, lease_s, newest=host_priority < 0, lane=worker_lane)
    return _claim_node(who)


def claim_next_gpu_job(
    worker_lane: int = 0,
    current_model: str | None = None,
    *,
    host: str | None = None,
    lease_s: float = 600,
    host_priority: int = 0,
    known_models: Iterable[str] | None = None,
) -> Row | None:
    """Claim the next gpu job for this process; the row, or None.

    With GPU_CLAIM_POLICY `strict` the best priority band first, inside it `current_model`, then
    age. `known_models` None: any.
    """
    who = _claimant(
        "gpu",
        host,
        lease_s,
        newest=host_priority < 0,
        lane=worker_lane,
        model=current_model,
        models=None if known_models is None else sorted(known_models),
        policy=config.gpu_claim_policy(),
        grace_s=config.GPU_URGENT_GRACE_S.read(),
        bound_s=config.GPU_MAX_WAIT_S.read(),
    )
    return _claim_node(who)


def _claim_node(who: claims.Claimant) -> Row | None:
    try:
        with db.transaction() as conn:
            jobs = claims.claim(conn, job_tables.NODE_JOBS, who, promote=True)
            return nodes.get(conn, jobs[0]["id"]) if jobs else None
    except db.Error as error:
        if not quarantine.is_about_rows(error):
            raise
    with db.transaction() as conn:
        found = quarantine.claim_apart(conn, job_tables.NODE_JOBS, who, promote=True)
        return nodes.get(conn, found.job_id) if found.job_id else None


def mark_completed(
    job_id: str,
    *,
    context_delta: dict[str, Any] | None,
    seconds: float | None = None,
    vm_rss_mb_peak: int | None = None,
) -> NodeJob | None:
    """Complete a job by hand, with its outbox event; the row, or None when it was over already."""
    text = payload.encode(context_delta or {}, "context_delta")
    with db.transaction() as conn:
        return cast(
            "NodeJob | None",
            manual_changes.complete(
                conn,
                job_tables.NODE_JOBS,
                job_id,
                result=text,
                seconds=seconds,
                rss_mb=vm_rss_mb_peak,
            ),
        )


def mark_failed(job_id: str, *, error: str, seconds: float | None = None) -> NodeJob | None:
    """Fail a job by hand, with its outbox event; the row, or None when it was over already."""
    text = payload.error_text(error)
    with db.transaction() as conn:
        return cast(
            "NodeJob | None",
            manual_changes.fail(conn, job_tables.NODE_JOBS, job_id, error=text, seconds=seconds),
        )


def mark_awaiting_input(job_id: str) -> NodeJob | None:
    """Park a job by hand, with its outbox event; the row, or None when it is over."""
    with db.transaction() as conn:
        row = cast("NodeJob | None", manual_changes.park(conn, job_id))
    if row is None and (job := get_node_job(job_id)) and job["status"] == "awaiting_input":
        return job
    return row


def set_resolved_inputs(job_id: str, inputs: dict[str, Any]) -> NodeJob | None:
    """Store what the node received; the row, or None."""
    text = payload.encode(inputs, "resolved_inputs")
    with db.transaction() as conn:
        return cast("NodeJob | None", nodes.set_resolved_inputs(conn, job_id, text))


def set_input_spec(run_id: str, node_id: str, spec: dict[str, Any]) -> NodeJob | None:
    """Store what an input node asks for; the row, or None."""
    text = payload.encode(spec, "input_spec")
    with db.transaction() as conn:
        job = nodes.get_by_node(conn, run_id, node_id)
        return cast("NodeJob | None", nodes.set_input_spec(conn, job["id"], text) if job else None)


def reclaim_expired_leases(
    *, conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> list[Row]:
    """Take back node jobs whose lease has lapsed; rows of id, run_id, node_id and status.

    A row that raises is set aside in `rows` (None: for this call), and the others go on.
    """
    return _brief(_reclaim(job_tables.NODE_JOBS, conn, rows))


def _reclaim(
    table: job_tables.JobTable, conn: db.Connection | None, rows: row_isolation.Isolation | None
) -> list[Row]:
    with db.statement(conn) as own:
        return recovery.reclaim_lapsed(own, table, rows=rows or row_isolation.Isolation())


def _brief(rows: list[Row]) -> list[Row]:
    return [{key: row[key] for key in ("id", "run_id", "node_id", "status")} for row in rows]


def requeue_job_for_retry(job_id: str) -> NodeJob | None:
    """A running job → queued at the front, `watchdog_retries` + 1; its row; None: not running."""
    with db.transaction() as conn:
        return cast("NodeJob | None", manual_changes.requeue_node(conn, job_id))


def reclaim_all_running_for_resume() -> list[Row]:
    """Every running node job → queued at the front, uncounted; as `reclaim_expired_leases`."""
    with db.transaction() as conn:
        return _brief(manual_changes.requeue_all_nodes(conn))


def requeue_running_for_worker(host_label: str, queue: str) -> int:
    """A host's running jobs of a queue → queued at the front, nothing counted; how many."""
    table = job_tables.NODE_JOBS if queue in config.DAG_QUEUES else job_tables.INGEST_JOBS
    with db.transaction() as conn:
        return len(manual_changes.requeue_of_host(conn, table, host_label, queue))


def cancel_queued_jobs_for_run(run_id: str) -> int:
    """Cancel a run's queued jobs; how many."""
    with db.transaction() as conn:
        return cancellation.cancel_queued_nodes(conn, run_id)


def list_unprocessed_dispatch_events(*, limit: int = 50) -> list[Row]:
    """Open outbox events, oldest first."""
    with db.transaction() as conn:
        return outbox.unprocessed(conn, limit)


def count_unprocessed_dispatch_events() -> int:
    """How many outbox events are open."""
    with db.statement() as conn:
        return outbox.count_unprocessed(conn)


def record_node_event(
    *,
    run_id: str,
    node_id: str,
    event_type: str,
    job_id: str | None = None,
    attempt: int = 0,
    host_label: str | None = None,
    queue: str | None = None,
    model: str | None = None,
    elapsed_s: float | None = None,
    error: str | None = None,
    detail: dict[str, Any] | None = None,
) -> int | None:
    """Append an event to a node's history and return its id.

    Best effort: what goes wrong is logged, never raised, and the id is None then.
    """
    try:
        values = {
            "run": run_id,
            "node": node_id,
            "job": job_id,
            "attempt": attempt,
            "event_type": event_type,
            "claim_no": None,
            "worker": None,
            "host": host_label,
            "queue": queue,
            "model": model,
            "elapsed_s": elapsed_s,
            "error": None if error is None else payload.error_text(error),
            "detail": payload.encode(detail or {}, "detail"),
        }
        with db.transaction() as conn:
            event_id = job_events.add_node_event(conn, values)
            if event_type == "model_load_done" and elapsed_s is not None:
                models.learn_load(conn, host_label, model, elapsed_s)
    except Exception as failure:  # noqa: BLE001  best effort by contract
        _log.warning("event %s of node %s was not recorded: %s", event_type, node_id, failure)
        return None
    return event_id


def prune_node_events(older_than_days: float = 30) -> int:
    """Delete node events past that age, in batches of 5,000; how many."""
    total = 0
    while True:
        with db.transaction() as conn:
            count = job_events.prune_nodes(conn, older_than_days=older_than_days, batch=5000)
        total += count
        if count < 5000:
            return total


def snapshot() -> dict[str, Any]:
    """`{"cpu": {"running", "queued"}, "gpu": {...}, "counts": {"cpu_queued": n, ...}}`.

    At most 50 rows a list.
    """
    with db.transaction() as conn:
        return overview.queue_lists(conn)


# --- workers -----------------------------------------------------------------------------------


def upsert_worker_heartbeat(
    *,
    host_label: str,
    queue: str,
    concurrency: int,
    current_model: str | None = None,
    known_models: Iterable[str] | None = None,
    update_current_model: bool = True,
) -> None:
    """Say that this host serves this queue now, which clears its dead flag.

    `known_models` None: as they were.
    """
    values = {
        "host_label": host_label,
        "queue": queue,
        "concurrency": concurrency,
        "current_model": current_model,
        "known_models": None if known_models is None else sorted(known_models),
        "update_current_model": update_current_model,
    }
    with db.transaction() as conn:
        workers.beat(conn, values)


def clear_worker_current_model(
    host_label: str, queue: str, *, mark_stale: bool = True
) -> Row | None:
    """Clear the loaded model of a host's heartbeat; return the changed row, None if there is none.

    `mark_stale` also sets its `last_seen` back by an hour, so that it counts as no capacity.
    """
    with db.transaction() as conn:
        return workers.clear_model(conn, host_label, queue, mark_stale=mark_stale)


def flag_stale_workers_holding_running_jobs(
    *, stale_after_s: float | None = None, conn: db.Connection | None = None
) -> list[Row]:
    """Flag once, with an ERROR in the log, hosts with a stale heartbeat that own running jobs.

    Return their heartbeat rows, each with the number of its `running_jobs`. `stale_after_s` None:
    STALE_WORKER_AFTER_S seconds.
    """
    limit = config.STALE_WORKER_AFTER_S.read() if stale_after_s is None else stale_after_s
    with db.transaction(conn) as own:
        flagged = workers.flag_stale(own, limit)
    for row in flagged:
        _log.error(
            "DEAD WORKER: host %s queue %s was last seen at %s and owns %d running jobs; restart "
            "it, its leases bring the jobs back",
            row["host_label"],
            row["queue"],
            row["last_seen"],
            row["running_jobs"],
        )
    return flagged


# --- ingest jobs -------------------------------------------------------------------------------


@check_violations.translated()
def enqueue_ingest_job(
    *,
    task_name: str,
    queue: str | None = None,
    reason: str = "tick",
    priority: int | None = None,
    args: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    idempotency_window_s: float | None = None,
    lock_key: str | None = None,
    partition_key: str | None = None,
    available_at: datetime.datetime | None = None,
    max_attempts: int | None = None,
    backoff: float | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    conn: Any = None,
) -> JobId:
    """Queue one ingest job; its id. `types.JobOptions` says what the options mean.

    What is not named the task may name, else the priority is 100. While a job has the
    `idempotency_key` no other is queued: that job's id, its `created` False. `conn` (psycopg,
    SQLAlchemy, Django): join its transaction. Raises before any write: `UnknownQueue`,
    `UnknownTask`, `InvalidJob`, `ArgsRefused`, `InvalidPayload`, `IdempotencyClash` (all
    ValueErrors), `UnknownConnection` (a TypeError).
    """
    job = job_validation.with_task_defaults(job_validation.NewJob(
        task_name, queue, reason, priority, args, idempotency_key, idempotency_window_s, lock_key,
        partition_key, available_at, max_attempts, backoff, timeout_s, headers,
    ))  # fmt: skip
    if job_validation.has_options(job) or not _is_ours(conn):
        return _insert(job_validation.batches([job]), conn)[0]
    row = job_validation.plain_row(job)
    with db.statement(conn) as own:
        return ingest_jobs.insert(own, row)


@check_violations.translated()
def enqueue_ingest_jobs(
    jobs: Iterable[NewIngestJob] | None = None,
    *,
    task_name: str | None = None,
    queue: str | None = None,
    args: Iterable[Mapping[str, Any]] | None = None,
    conn: Any = None,
    **options: Unpack[JobOptions],
) -> list[JobId]:
    """Queue a job per member of `jobs` or of `args`: all or none, one wake-up; the ids in order.

    A member of `jobs` has the keywords of `enqueue_ingest_job`; what it lacks is taken from those
    of the call. Raises as `enqueue_ingest_job` does, and says which job.
    """
    if args is not None and jobs is None and task_name is not None and _is_ours(conn):
        job = job_validation.with_task_defaults(job_validation.NewJob(task_name, queue, **options))
        if not job_validation.has_options(job):
            return _enqueue_args(job_validation.base_columns(job), args, conn)
    defaults = {"task_name": task_name, "queue": queue, **options}
    found = job_validation.from_keywords(defaults, jobs, args)
    return _insert(job_validation.batches(found, whole=conn is not None), conn)


def _is_ours(conn: Any) -> bool:
    """Return whether a call uses psycopg: a connection of the engine, or of the app."""
    return conn is None or app_connections.is_psycopg(conn)


def _enqueue_args(row: dict[str, Any], args: Iterable[Mapping[str, Any]], conn: Any) -> list[JobId]:
    texts = job_validation.encode_args_of_each(row["task_name"], args)
    # An app's connection may be in autocommit, where each statement is a transaction.
    parts = [texts] if conn is not None and texts else list(payload.parts(texts))
    with _whole(conn, len(parts)) as own:
        return [one for part in parts for one in ingest_jobs.insert_many(own, row, part)]


def _insert(batches: list[job_validation.Batch], conn: Any) -> list[JobId]:
    with _whole(conn, len(batches)) as own:
        return [one for batch in batches for one in ingest_jobs.insert_batch(own, batch)]


def _whole(conn: Any, statements: int) -> AbstractContextManager[db.Connection]:
    if conn is None and statements == 1:
        return db.statement()
    return app_connections.transaction(conn, async_twin="enqueue_ingest_job_async()")


async def enqueue_ingest_job_async(*, conn: Any = None, **job: Unpack[NewIngestJob]) -> JobId:
    """`enqueue_ingest_job` for an event loop, which it does not block.

    `conn`: an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession; None: a connection of
    the engine's, in another thread. A call that is cancelled may have queued the job all the same.
    """
    given: dict[str, Any] = {**job}
    if conn is None:
        return await _in_thread(enqueue_ingest_job, **given)
    (batch,) = job_validation.batches([job_validation.NewJob(**given)])
    return (await _insert_async(batch, conn))[0]


async def enqueue_ingest_jobs_async(
    jobs: Iterable[NewIngestJob] | None = None,
    *,
    task_name: str | None = None,
    queue: str | None = None,
    args: Iterable[Mapping[str, Any]] | None = None,
    conn: Any = None,
    **options: Unpack[JobOptions],
) -> list[JobId]:
    """`enqueue_ingest_jobs` for an event loop, as `enqueue_ingest_job_async` is."""
    defaults: dict[str, Any] = {"task_name": task_name, "queue": queue, **options}
    if conn is None:
        return await _in_thread(enqueue_ingest_jobs, jobs, args=args, **defaults)
    found = job_validation.from_keywords(defaults, jobs, args)
    batches = job_validation.batches(found, whole=True)
    return [one for batch in batches for one in await _insert_async(batch, conn)]


async def _insert_async(batch: job_validation.Batch, conn: Any) -> list[JobId]:
    with check_violations.translated():
        return await ingest_jobs.insert_batch_async(conn, batch)


async def _in_thread(door: Callable[..., R], *args: Any, **keywords: Any) -> R:
    import asyncio

    return await asyncio.to_thread(door, *args, **keywords)


def get_ingest_job(job_id: str) -> IngestJob | None:
    """The job, or None."""
    with db.statement() as conn:
        return cast("IngestJob | None", ingest_jobs.get(conn, job_id))


def claim_next_ingest_job(
    queue: str, *, host: str | None = None, lease_s: float = 600
) -> Row | None:
    """Claim the next job of an ingest queue for this process; the row, or None."""
    who = _claimant(queue, host, lease_s)
    try:
        with db.transaction() as conn:
            rows = claims.claim(conn, job_tables.INGEST_JOBS, who, promote=True)
            return ingest_jobs.get(conn, rows[0]["id"]) if rows else None
    except db.Error as error:
        if not quarantine.is_about_rows(error):
            raise
    with db.transaction() as conn:
        found = quarantine.claim_apart(conn, job_tables.INGEST_JOBS, who, promote=True)
        return ingest_jobs.get(conn, found.job_id) if found.job_id else None


def mark_ingest_completed(
    job_id: str, *, result: Any = None, seconds: float | None = None
) -> IngestJob | None:
    """Complete a job by hand; the row, or None when it was over already."""
    text = payload.encode(result, "result")
    with db.transaction() as conn:
        return cast(
            "IngestJob | None",
            manual_changes.complete(
                conn, job_tables.INGEST_JOBS, job_id, result=text, seconds=seconds
            ),
        )


def mark_ingest_failed(
    job_id: str, *, error: str, seconds: float | None = None
) -> IngestJob | None:
    """Fail a job by hand; the row, or None when it was over already."""
    text = payload.error_text(error)
    with db.transaction() as conn:
        return cast(
            "IngestJob | None",
            manual_changes.fail(conn, job_tables.INGEST_JOBS, job_id, error=text, seconds=seconds),
        )


def reclaim_expired_ingest_leases(
    *, conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> list[Row]:
    """Take back ingest jobs whose lease has lapsed, as `reclaim_expired_leases`; the rows."""
    return _reclaim(job_tables.INGEST_JOBS, conn, rows)


def ingest_snapshot() -> dict[str, Any]:
    """`{"queues": {q: {"queued", "running", "completed", "failed", "workers"}}}`, configured."""
    with db.transaction() as conn:
        counts = ingest_jobs.counts(conn, LIVE_WORKER_S)
    keys = ("queued", "running", "completed", "failed", "workers")
    return {
        "queues": {
            queue: {key: counts.get(queue, {}).get(key, 0) for key in keys}
            for queue in sorted(config.get_config().ingest_queues)
        }
    }
