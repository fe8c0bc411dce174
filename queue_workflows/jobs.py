"""Enqueue, read, list, cancel, retry, delete and explain jobs.

`enqueue`, `list`, `state` and `delete` work on ingest jobs, most others on node jobs too. Each call
is one transaction, or joins the transaction of `conn`. Its length: one noun of the public API is
one module.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import psycopg

from queue_workflows import acts, db, errors
from queue_workflows.claim import job_tables, manual_changes
from queue_workflows.dag import payload
from queue_workflows.db import check_violations, statements
from queue_workflows.runtime import clock
from queue_workflows.tasks import job_validation, registry
from queue_workflows.types import (
    IngestJob,
    JobId,
    JobKeywords,
    JobOptions,
    JobStatus,
    JsonDict,
    NewIngestJob,
    NodeJob,
    Row,
    Rows,
    Who,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Kind = Literal["node", "ingest"]
"""The kinds of jobs, which are nodes of runs, and ingest jobs outside of runs."""
LONGEST_WINDOW_S = 366 * 86400.0
STATUSES: tuple[str, ...] = get_args(JobStatus)
"""The statuses of an ingest job."""
BATCH = 500
"""The most jobs that one transaction changes, so that it takes far less than 5 s."""
_NO_SUCH_JOB = "there is no such job"
_Outcome = tuple[str, str | None]
"""An outcome, and the reason if it is a refusal."""
_Change = Callable[[db.Connection, Mapping[str, Row]], Mapping[str, _Outcome]]
"""Gets the locked rows by id; returns the outcome of each id."""
_ChangeNodes = Callable[[db.Connection, str, Mapping[str, Row]], Mapping[str, _Outcome]]
"""Gets a run and the rows of its jobs by id; returns the outcome of each id."""
_ONLY_ENDED = ": only a failed or cancelled one is retried"


# --- enqueue -----------------------------------------------------------------------------------


@check_violations.translated()
def enqueue(
    task_name: str,
    *,
    queue: str | None = None,
    reason: str = "tick",
    priority: int | None = None,
    args: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    idempotency_window_s: float | None = None,
    lock_key: str | None = None,
    partition_key: str | None = None,
    available_at: datetime | None = None,
    max_attempts: int | None = None,
    backoff: float | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    conn: Any = None,
) -> JobId:
    """Queue one ingest job and return its id. `types.JobOptions` explains the options.

    Options default to the task's own; the default priority is 100. If a job already has the
    `idempotency_key`, its id is returned, with `created` False. With `conn` (psycopg, SQLAlchemy,
    Django), join its transaction. Raises before any write: `UnknownQueue`, `UnknownTask`,
    `InvalidJob`, `ArgsRefused`, `InvalidPayload`, `IdempotencyClash` (all ValueErrors),
    `UnknownConnection` (a TypeError).
    """
    job = job_validation.with_task_defaults(job_validation.NewJob(
        task_name, queue, reason, priority, args, idempotency_key, idempotency_window_s, lock_key,
        partition_key, available_at, max_attempts, backoff, timeout_s, headers,
    ))  # fmt: skip
    if job_validation.has_options(job) or not _is_psycopg(conn):
        return _insert(job_validation.batches([job]), conn)[0]
    row = job_validation.base_columns(job)
    row["args"] = job_validation.encode_args(task_name, args)
    with db.statement(conn) as own:
        return JobId(statements.ingest_jobs.insert(own, **row))


@check_violations.translated()
def enqueue_many(
    jobs: Iterable[NewIngestJob] | None = None,
    *,
    task_name: str | None = None,
    queue: str | None = None,
    args: Iterable[Mapping[str, Any]] | None = None,
    conn: Any = None,
    **options: Unpack[JobOptions],
) -> builtins.list[JobId]:
    """Queue one ingest job for each member of `jobs` or of `args`, all or none; return their ids.

    The ids are in the order of the members. A member of `jobs` has the keywords of `enqueue`;
    keywords that it lacks are taken from the call. Workers are notified once. Raises as `enqueue`
    does; the message names the job.
    """
    if args is not None and jobs is None and task_name is not None and _is_psycopg(conn):
        job = job_validation.with_task_defaults(job_validation.NewJob(task_name, queue, **options))
        if not job_validation.has_options(job):
            return _enqueue_args(job_validation.base_columns(job), args, conn)
    defaults = {"task_name": task_name, "queue": queue, **options}
    found = job_validation.from_keywords(defaults, jobs, args)
    return _insert(job_validation.batches(found, whole=conn is not None), conn)


async def enqueue_async(task_name: str, *, conn: Any = None, **job: Unpack[JobKeywords]) -> JobId:
    """Do as `enqueue` does, without blocking the event loop.

    `conn` is an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession, whose transaction is
    joined. Without it, another thread works on a connection of the engine, where a cancelled call
    may still queue the job.
    """
    if conn is None:
        return await db.call_async(enqueue, None, task_name, **job)
    (batch,) = job_validation.batches([job_validation.NewJob(task_name, **job)])
    return (await _insert_async(batch, conn))[0]


async def enqueue_many_async(
    jobs: Iterable[NewIngestJob] | None = None,
    *,
    task_name: str | None = None,
    queue: str | None = None,
    args: Iterable[Mapping[str, Any]] | None = None,
    conn: Any = None,
    **options: Unpack[JobOptions],
) -> builtins.list[JobId]:
    """Do as `enqueue_many` does, without blocking the event loop; `conn` as in `enqueue_async`."""
    defaults: dict[str, Any] = {"task_name": task_name, "queue": queue, **options}
    if conn is None:
        return await db.call_async(enqueue_many, None, jobs, args=args, **defaults)
    found = job_validation.from_keywords(defaults, jobs, args)
    batches = job_validation.batches(found, whole=True)
    return [one for batch in batches for one in await _insert_async(batch, conn)]


def _is_psycopg(conn: Any) -> bool:
    """Return whether a call uses a psycopg connection, of the engine or of the app."""
    return conn is None or db.is_psycopg(conn)


def _enqueue_args(
    row: dict[str, Any], args: Iterable[Mapping[str, Any]], conn: Any
) -> builtins.list[JobId]:
    texts = job_validation.encode_args_of_each(row["task_name"], args)
    # An app's connection may be in autocommit mode, in which each statement is a transaction.
    parts = [texts] if conn is not None and texts else [*payload.parts(texts)]
    ids: builtins.list[JobId] = []
    with _whole(conn, len(parts)) as own:
        for part in parts:
            prefix = job_validation.new_job_prefix()
            given: dict[str, Any] = {**row, "prefix": prefix, "args": f"[{','.join(part)}]"}
            statements.ingest_jobs.insert_many(own, **given)
            ids += job_validation.job_ids(prefix, len(part))
    return ids


def _insert(batches: builtins.list[job_validation.Batch], conn: Any) -> builtins.list[JobId]:
    insert = statements.ingest_jobs.insert_batch
    with _whole(conn, len(batches)) as own:
        return [
            one
            for batch in batches
            for one in batch.ids(insert(own, prefix=batch.prefix, jobs=batch.jobs))
        ]


def _whole(conn: Any, statements: int) -> AbstractContextManager[db.Connection]:
    if conn is None and statements == 1:
        return db.statement()
    return db.transaction(conn, async_twin="jobs.enqueue_async()")


async def _insert_async(batch: job_validation.Batch, conn: Any) -> builtins.list[JobId]:
    text = statements.ingest_jobs.insert_batch.text
    given = {"prefix": batch.prefix, "jobs": batch.jobs}
    with check_violations.translated():
        return batch.ids(await db.fetch_async(conn, text, given, blocking_twin="jobs.enqueue"))


@check_violations.translated()
def enqueue_once(
    task_name: str,
    *,
    by: str | None = None,
    conn: Any = None,
    **job: Unpack[JobKeywords],
) -> tuple[JobId, str]:
    """Queue one ingest job, or find the one that has its `idempotency_key`; return id and status.

    Unlike in `enqueue`, the key belongs to its job for as long as the job exists. The job's history
    begins with an event `queued` by `by`, for which the role needs INSERT on `ingest_job_events`.
    The status is `lost` if the job runs and its lease has lapsed. It is one transaction, or joins
    the transaction of `conn`. Raises as `enqueue` does, and `ArgsRefused` for args that the task
    does not read.
    """
    registry.refuse_dropped(task_name, job.get("args"))
    if job.get("idempotency_key") is not None:
        job.setdefault("idempotency_window_s", LONGEST_WINDOW_S)
    (batch,) = job_validation.batches([job_validation.NewJob(task_name, **job)])
    with db.statement(conn) as own:
        row = statements.ingest_jobs.insert_once(
            own, prefix=batch.prefix, jobs=batch.jobs, actor=acts.actor(by) or ""
        )
    if row is None:
        return batch.ids([])[0], "queued"
    return batch.ids([row | {"place": 1}])[0], "lost" if row["lost"] else row["status"]


# --- read --------------------------------------------------------------------------------------


@overload
def get(job_id: str, *, kind: Literal["node"], conn: Any = None) -> NodeJob | None: ...
@overload
def get(job_id: str, *, kind: Literal["ingest"], conn: Any = None) -> IngestJob | None: ...
@overload
def get(job_id: str, *, kind: None = None, conn: Any = None) -> Row | None: ...
def get(job_id: str, *, kind: Kind | None = None, conn: Any = None) -> Any:
    """Return a job's row, or None if there is none; `history.get_job` has its attempts and log.

    The `kind` `node` or `ingest` searches only that kind. With `conn` (psycopg, SQLAlchemy,
    Django), read in its transaction.
    """
    if not payload.is_storable(job_id):
        return None
    with db.statement(conn) as own:
        row = None if kind == "ingest" else statements.nodes.get(own, job=job_id)
        if row is None and kind != "node":
            row = statements.ingest_jobs.get(own, job=job_id)
        return row


async def get_async(job_id: str, *, kind: Kind | None = None, conn: Any = None) -> Row | None:
    """Do as `get` does, without blocking the event loop; `conn` as in `enqueue_async`."""
    return await db.call_async(get, conn, job_id, kind=kind)


def state(job_id: str, *, conn: Any = None) -> Row | None:
    """Return the state of an ingest job without args and result; None if there is no such job.

    `id`, `status`, `task_name`, `queue`, `attempts` (failed ones), `max_attempts`, `claim_no`,
    `generation`, `created_at`, `available_at`, `started_at`, `finished_at`, `heartbeat_at`,
    `cancel_requested_at`, `error`, `progress`. `lost`: it runs, and its lease has lapsed.
    """
    if not payload.is_storable(job_id):
        return None
    with db.statement(conn) as own:
        return statements.ingest_jobs.state(own, job=job_id)


def list(  # noqa: A001  the verb that users look for
    *,
    queue: str | None = None,
    task_name: str | None = None,
    status: str | Iterable[str] | None = None,
    since: datetime | timedelta | None = None,
    key: str | None = None,
    text: str | None = None,
    before: int | None = None,
    lost: bool | None = None,
    limit: int | None = 100,
    conn: db.Connection | None = None,
) -> Rows:
    """Return ingest jobs, the newest first, without args and results; `get` has these.

    `since` matches jobs queued, started or ended since then, or within that time. `key` matches an
    idempotency, lock or partition key, `text` a part of the id, task, a key or the error. `before`
    is the `seq` of the last job of the previous page. `lost` selects running jobs whose lease has
    lapsed (True), or has not; each row has it too. `limit` None means all. Raises `InvalidConfig`
    (a ValueError) for a value that cannot match, such as an unknown status.
    """
    texts = {"queue": queue, "task_name": task_name, "key": key, "text": text}
    for name, one in texts.items():
        if one is not None and not isinstance(one, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidConfig(f"{name} must be a text, not {one!r:.80}")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise errors.InvalidConfig(
            f"limit must be a whole number from 0, or None, not {limit!r:.40}"
        )
    statuses = None if status is None else [status] if isinstance(status, str) else [*status]
    for one in statuses or ():
        if one not in STATUSES:
            raise errors.InvalidConfig(f"status {one!r:.80} is none of {', '.join(STATUSES)}")
    clock.check_since(since)
    if not all(map(payload.is_storable, texts.values())):
        return []
    with db.transaction(conn) as own:
        return statements.ingest_jobs.find(
            own,
            queue=queue,
            task_name=task_name,
            statuses=statuses,
            at=since if isinstance(since, datetime) else None,
            ago=since if isinstance(since, timedelta) else None,
            key=key,
            text=text,
            before=before,
            lost=lost,
            limit=limit,
        )


def explain(job_id: str, *, conn: db.Connection | None = None) -> JsonDict | None:
    """Return why a job is not running, or None if there is no such job.

    `id`, `kind`, `name`, `queue`, `model`, `priority`, `status`. `clause` and `detail`: what keeps
    every worker from the job, or None. `workers`: for each live worker of the queue `worker_id`,
    `host_label`, `pid`, `state`, `running` (a job or None), `clause` and `detail`; clause `next`:
    the worker takes the job next. `can_run`: some live worker will take it. `lost`: it runs, and
    its lease has lapsed. Takes no lock.
    """
    from queue_workflows.admin import waiting_reasons  # late, as a process that enqueues needs none

    if not payload.is_storable(job_id):
        return None
    with db.transaction(conn) as own:
        return waiting_reasons.of_job(own, job_id)


# --- change ------------------------------------------------------------------------------------


def cancel(job_id: str, *, conn: Any = None, **who: Unpack[Who]) -> Row | None:
    """Cancel a job and return its row; None if there is no such job or it has ended.

    A waiting job is cancelled at once; the `cancel_event` of a running job is set. A node's job is
    cancelled with its run, because the nodes that depend on it can never run. For `by` and `reason`
    see `acts`. With `conn` (psycopg, SQLAlchemy, Django), join its transaction.
    """
    if not payload.is_storable(job_id):
        return None
    with db.transaction(conn) as own:
        job = statements.nodes.get(own, job=job_id)
        with acts.recorded(own, "cancel", *_subjects(job_id, job), **who) as act:
            if job is None:
                rows = statements.cancellation.cancel[job_tables.INGEST_JOBS.name](
                    own, ids=[job_id]
                )
            else:
                act.detail["node"] = job["node_id"]
                rows = _cancel_in_run(own, job["run_id"], [job_id])
            if not rows:
                act.subjects.clear()
            return rows[0] if rows else None


def _cancel_in_run(conn: db.Connection, run_id: str, ids: builtins.list[str]) -> Rows:
    """Cancel jobs of a run, and with them the run; return the rows of the changed jobs."""
    statements.runs.lock(conn, run_id=run_id)
    rows = statements.cancellation.cancel[job_tables.NODE_JOBS.name](conn, ids=ids)
    if rows:
        statements.runs.cancel(conn, run_id=run_id, error=None)
    return rows


def _subjects(job_id: str, node: Row | None) -> builtins.list[tuple[str, str]]:
    """Return the subjects of an act on a job, which are the job, and for a node also its run."""
    own = [("job", job_id)]
    return own if node is None else [*own, ("run", node["run_id"])]


async def cancel_async(job_id: str, *, conn: Any = None, **who: Unpack[Who]) -> Row | None:
    """Do as `cancel` does, without blocking the event loop; `conn` as in `enqueue_async`."""
    return await db.call_async(cancel, conn, job_id, **who)


@check_violations.translated()
def retry(
    job_id: str, *, from_step: str | None = None, conn: Any = None, **who: Unpack[Who]
) -> Row:
    """Run a failed or cancelled job again, with all its attempts; return its row.

    Its recorded steps keep their results, but the first step named `from_step` and steps that began
    after it are repeated. A node's job reopens its run, whose start queues the node. Raises
    `UnknownJob` (a KeyError), `InvalidConfig` (a ValueError) for a job in another status or without
    such a step, and `IdempotencyClash` if another job has its idempotency key by now. `by`,
    `reason`, `conn`: as in `cancel`.
    """
    if not payload.is_storable(job_id):
        raise errors.UnknownJob(f"there is no job {job_id!r:.80}")
    with db.transaction(conn) as own:
        job = statements.nodes.get(own, job=job_id)
        subjects = _subjects(job_id, job)
        with acts.recorded(own, "retry", *subjects, **who, from_step=from_step) as act:
            if job is None:
                row = _retry_ingest(own, job_id)
            else:
                act.detail["node"] = job["node_id"]
                row = _retry_node(own, job)
            if from_step is not None:
                _forget_from(own, _table_of(job), job_id, from_step)
            return row


def _table_of(node: Row | None) -> job_tables.JobTable:
    return job_tables.INGEST_JOBS if node is None else job_tables.NODE_JOBS


def steps(job_id: str, *, conn: db.Connection | None = None) -> Rows:
    """Return the recorded steps of a job of either family, in the order in which they began first.

    Each has `kind`, `name`, `key`, `state`, `output` (as JSON text), `error`, `arguments` (their
    text, cut), `position`, `claim_no`, `attempts`, `crashes`, `due_at`, `started_at` and
    `ended_at`.
    """
    with db.transaction(conn) as own:
        if not payload.is_storable(job_id):
            return []
        table = _table_of(statements.nodes.get(own, job=job_id))
        return statements.job_steps.of_job(own, table=table.name, job=job_id)


def _forget_from(conn: db.Connection, table: job_tables.JobTable, job_id: str, step: str) -> None:
    """Delete the first step of this name and the steps that began after it."""
    rows = statements.job_steps.of_job(conn, table=table.name, job=job_id)
    known = dict.fromkeys(row["name"] for row in rows)
    if step not in known:
        has = ", ".join([*known][:20]) or "none"
        raise errors.InvalidConfig(
            f"job {job_id!r} has no step {step!r:.120}; its steps: {has}{errors.hint(step, known)}"
        )
    statements.job_steps.forget_from(conn, table=table.name, job=job_id, name=step)


def _reopen(conn: db.Connection, job_id: str) -> Row | None:
    """Queue a failed or cancelled ingest job again, with all counters at zero; return its row.

    Returns None if it is in another state, or unknown. Raises `IdempotencyClash` before any write
    if another job has its idempotency key now.
    """
    try:
        with conn.transaction():
            rows = statements.retry_jobs.reopen_ingest(conn, jobs=[job_id])
            return rows[0] if rows else None
    except Exception as error:
        if not check_violations.is_violation_of(error, "ingest_jobs_idempotency_idx"):
            raise
        found = statements.retry_jobs.key_owner(conn, job=job_id)
        if found is None:
            raise
    raise errors.IdempotencyClash(
        f"job {job_id!r} cannot run again: its idempotency key {found['key']!r} is that of job "
        f"{found['id']!r} now",
        found["id"],
    )


def _retry_ingest(conn: db.Connection, job_id: str) -> Row:
    locked = statements.ingest_jobs.lock(conn, ids=[job_id])
    if not locked:
        raise errors.UnknownJob(f"there is no job {job_id!r}")
    if (why := _not_retried(locked[0])) is not None:
        raise errors.InvalidConfig(f"job {job_id!r}: {why}")
    row = _reopen(conn, job_id)
    assert row is not None
    return row


def _not_retried(row: Row) -> str | None:
    """Return why an ingest job cannot run again, or None if it can."""
    if row["status"] not in ("failed", "cancelled"):
        return f"it is {row['status']}{_ONLY_ENDED}"
    if row["generation"] >= job_tables.LAST_GENERATION:
        return "it is in its last generation: queue a new job"
    return None


def _retry_node(conn: db.Connection, job: Row) -> Row:
    if job["status"] not in ("failed", "cancelled"):
        raise errors.InvalidConfig(f"job {job['id']!r}: it is {job['status']}{_ONLY_ENDED}")
    manual_changes.reopen_run(conn, job["run_id"])
    return statements.nodes.get(conn, job=job["id"]) or job


async def retry_async(
    job_id: str, *, from_step: str | None = None, conn: Any = None, **who: Unpack[Who]
) -> Row:
    """Do as `retry` does, without blocking the event loop; `conn` as in `enqueue_async`."""
    return await db.call_async(retry, conn, job_id, from_step=from_step, **who)


def delete(job_id: str, *, conn: db.Connection | None = None, **who: Unpack[Who]) -> bool:
    """Delete an ingest job; return False if there is none. Its history stays until it is pruned.

    `by`, `reason`: see `acts`. Raises `InvalidConfig` (a ValueError) for a running job and
    for the job of a node, which is deleted with its run. `conn`: join its transaction.
    """
    (done,) = delete_many(job_id, conn=conn, **who)
    if done["outcome"] == "deleted" or done["reason"] == _NO_SUCH_JOB:
        return done["outcome"] == "deleted"
    raise errors.InvalidConfig(f"job {job_id!r}: {done['reason']}")


# --- change many ---------------------------------------------------------------------------------


def cancel_many(
    ids: str | Iterable[str],
    *,
    running: bool = True,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> builtins.list[JsonDict]:
    """Cancel queued jobs, and request the end of running ingest jobs unless `running` is false.

    Returns for each id, in order, `id`, `outcome` (`cancelled`, `asked to stop`, `refused`,
    `unknown`), `status` before the call, and `reason`. Jobs of nodes are cancelled with their run,
    as in `cancel`. For `by` and `reason` see `acts`. Each 500 ingest jobs and each run are one
    transaction, unless `conn` is given. Raises `InvalidConfig` (a ValueError) for an invalid id.
    """

    def change(conn: db.Connection, rows: Mapping[str, Row]) -> Mapping[str, _Outcome]:
        chosen = [*rows] if running else _having(rows, "queued")
        return _cancelled(
            rows, statements.cancellation.cancel[job_tables.INGEST_JOBS.name](conn, ids=chosen)
        )

    return _each(ids, "cancel", change, _cancel_nodes, who, conn)


def retry_many(
    ids: str | Iterable[str], *, conn: db.Connection | None = None, **who: Unpack[Who]
) -> builtins.list[JsonDict]:
    """Queue failed and cancelled jobs again, each with all its attempts; nodes with their run.

    See `cancel_many`; the `outcome` is `queued`, `refused` or `unknown`.
    """
    return _each(ids, "retry", _retry, _retry_nodes, who, conn)


def delete_many(
    ids: str | Iterable[str], *, conn: db.Connection | None = None, **who: Unpack[Who]
) -> builtins.list[JsonDict]:
    """Delete ingest jobs that do not run; their history stays until it is pruned.

    See `cancel_many`; the `outcome` is `deleted`, `refused` or `unknown`.
    """
    return _each(ids, "delete", _delete, None, who, conn)


def _each(
    ids: str | Iterable[str],
    action: str,
    change: _Change,
    change_nodes: _ChangeNodes | None,
    who: Who,
    conn: db.Connection | None,
) -> builtins.list[JsonDict]:
    done: dict[str, JsonDict] = {}
    wanted, nodes = payload.distinct_ids(ids), Rows()
    for start in range(0, len(wanted), BATCH):
        some = wanted[start : start + BATCH]
        with db.transaction(conn) as own, acts.recorded(own, action, **who) as act:
            known = [one for one in some if payload.is_storable(one)]
            rows = {row["id"]: row for row in statements.ingest_jobs.lock(own, ids=known)}
            outcomes = change(own, rows)
            act.subjects.extend(("job", one) for one, (_, why) in outcomes.items() if why is None)
            rest = [one for one in known if one not in rows]
            nodes += statements.ingest_jobs.find_node_jobs(own, ids=rest)
        done |= {one: _report(one, rows.get(one), outcomes) for one in some}
    # A run's nodes may come from several batches, and only the first change of a run finds it over.
    nodes.sort(key=lambda row: row["run_id"])
    for run_id, found in itertools.groupby(nodes, lambda row: row["run_id"]):
        rows = {row["id"]: row for row in found}
        if change_nodes is None:
            outcomes = dict.fromkeys(rows, ("refused", f"it is a node of run {run_id}"))
        else:
            with db.transaction(conn) as own, acts.recorded(own, action, **who) as act:
                outcomes = change_nodes(own, run_id, rows)
                act.subjects.extend(("job", one) for one, (_, why) in outcomes.items() if not why)
                act.subjects.extend([("run", run_id)] if act.subjects else [])
        done |= {one: _report(one, row, outcomes) for one, row in rows.items()}
    return [done[one] for one in wanted]


def _report(job_id: str, row: Row | None, outcomes: Mapping[str, _Outcome]) -> JsonDict:
    if row is None:
        return {"id": job_id, "outcome": "unknown", "status": None, "reason": _NO_SUCH_JOB}
    outcome, reason = outcomes[job_id]
    return {"id": job_id, "outcome": outcome, "status": row["status"], "reason": reason}


def _cancel_nodes(
    conn: db.Connection, run_id: str, rows: Mapping[str, Row]
) -> Mapping[str, _Outcome]:
    return _cancelled(rows, _cancel_in_run(conn, run_id, [*rows]))


def _cancelled(rows: Mapping[str, Row], changed: Rows) -> Mapping[str, _Outcome]:
    ends = {True: "cancelled", False: "asked to stop"}
    return _refused(rows) | {
        row["id"]: (ends[row["status"] == "cancelled"], None) for row in changed
    }


def _retry_nodes(
    conn: db.Connection, run_id: str, rows: Mapping[str, Row]
) -> Mapping[str, _Outcome]:
    chosen = _having(rows, "failed", "cancelled")
    end: _Outcome = ("queued", None)
    try:
        if chosen:
            manual_changes.reopen_run(conn, run_id)
    except errors.InvalidConfig as error:
        end = ("refused", str(error))
    return _refused(rows, _ONLY_ENDED) | dict.fromkeys(chosen, end)


def _having(rows: Mapping[str, Row], *statuses: str) -> builtins.list[str]:
    return [job_id for job_id, row in rows.items() if row["status"] in statuses]


def _refused(rows: Mapping[str, Row], rule: str = "") -> dict[str, _Outcome]:
    return {job_id: ("refused", f"it is {row['status']}{rule}") for job_id, row in rows.items()}


def _retry(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    outcomes: dict[str, _Outcome] = {
        job_id: ("queued", None) if (why := _not_retried(row)) is None else ("refused", why)
        for job_id, row in rows.items()
    }
    chosen = [job_id for job_id, (outcome, _) in outcomes.items() if outcome == "queued"]
    key_taken = _reopen_all(conn, chosen) if chosen else set[str]()
    reason = "another job has its idempotency key by now"
    return outcomes | dict.fromkeys(key_taken, ("refused", reason))


def _reopen_all(conn: db.Connection, ids: Sequence[str]) -> set[str]:
    """Queue failed and cancelled jobs again; return jobs whose idempotency key another job has."""
    try:
        with conn.transaction():
            statements.retry_jobs.reopen_ingest(conn, jobs=[*ids])
    except psycopg.errors.UniqueViolation:
        taken: set[str] = set()
        for job_id in ids:
            try:
                _reopen(conn, job_id)
            except errors.IdempotencyClash:
                taken.add(job_id)
        return taken
    return set()


def _delete(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = [job_id for job_id, row in rows.items() if row["status"] != "running"]
    statements.ingest_jobs.delete(conn, ids=chosen)
    outcomes = _refused(rows, ": cancel it first")
    return outcomes | dict.fromkeys(chosen, ("deleted", None))
