"""Queue ingest jobs; find, cancel, delete and retry them for an operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import app_connections, statements
from queue_workflows.engine import retry_jobs as job_retries
from queue_workflows.engine import workers
from queue_workflows.runtime import identity
from queue_workflows.tasks import job_validation
from queue_workflows.types import JobId, Row


class Filter(NamedTuple):
    """Which jobs to find; None matches every job."""

    queue: str | None = None
    task_name: str | None = None
    statuses: Sequence[str] | None = None
    since: datetime | timedelta | None = None
    """Jobs that were queued, started or ended since then, or within that time."""
    key: str | None = None
    """Their idempotency, lock or partition key."""
    text: str | None = None
    """Part of their id, task, keys or error, in any case."""
    before: int | None = None
    """Jobs whose `seq` is smaller."""
    lost: bool | None = None
    """Of the running jobs only those whose claim is lost, or only the others."""


def insert(conn: db.Connection, row: dict[str, Any]) -> JobId:
    """Insert one queued job without options and return its id."""
    found = conn.execute(statements.ingest_jobs.insert, row, prepare=True).fetchone()
    assert found is not None
    return JobId(found["id"])


def insert_many(conn: db.Connection, row: dict[str, Any], args: Sequence[str]) -> list[JobId]:
    """Insert one queued job for each of `args` (JSON texts) and return their ids, in order.

    `row` has the other columns. One statement.
    """
    prefix = identity.new_job_prefix()
    values = {**row, "prefix": prefix, "args": f"[{','.join(args)}]"}
    conn.execute(statements.ingest_jobs.insert_many, values, prepare=True)
    return identity.job_ids(prefix, len(args))


def insert_batch(conn: db.Connection, batch: job_validation.Batch) -> list[JobId]:
    """Insert the jobs of a batch, all or none, and return their ids, in order.

    Raises `IdempotencyClash` with nothing written. Waits for a transaction that has inserted one of
    the keys and has not ended yet.
    """
    values = {"prefix": batch.prefix, "jobs": batch.jobs}
    return batch.ids(
        conn.execute(statements.ingest_jobs.insert_batch, values, prepare=True).fetchall()
    )


async def insert_batch_async(conn: Any, batch: job_validation.Batch) -> list[JobId]:
    """Do as `insert_batch` does, on an asynchronous connection of the app.

    Raises `UnknownConnection` before any write.
    """
    values = {"prefix": batch.prefix, "jobs": batch.jobs}
    text = statements.ingest_jobs.insert_batch
    return batch.ids(
        await app_connections.fetch_async(conn, text, values, blocking_twin="jobs.enqueue")
    )


def insert_once(conn: db.Connection, batch: job_validation.Batch, actor: str) -> tuple[JobId, str]:
    """Insert the one job of a batch, with an event, and return its id and status.

    If a job has its key, return that one: it keeps the key for as long as it exists, whatever its
    window. Its status is `lost` if it runs and its lease has lapsed. Raises `IdempotencyClash` if
    it has another task, queue or args. One statement.
    """
    values = {"prefix": batch.prefix, "jobs": batch.jobs, "actor": payload.error_text(actor)}
    row = conn.execute(statements.ingest_jobs.insert_once, values, prepare=True).fetchone()
    if row is None:
        return batch.ids([])[0], "queued"
    return batch.ids([row | {"place": 1}])[0], "lost" if row["lost"] else row["status"]


def state(conn: db.Connection, job_id: str) -> Row | None:
    """Return how far a job is, and whether its claim is lost; None if there is no such job."""
    return conn.execute(statements.ingest_jobs.state, {"job": job_id}, prepare=True).fetchone()


def get(conn: db.Connection, job_id: str) -> Row | None:
    """Return the job, or None."""
    return conn.execute(statements.ingest_jobs.get, {"job": job_id}).fetchone()


def counts(conn: db.Connection, live_s: float) -> dict[str, dict[str, int]]:
    """Return the number of jobs per queue and status.

    The member `workers` of a queue counts the heartbeats that are younger than `live_s` seconds.
    """
    found: dict[str, dict[str, int]] = {}
    for row in conn.execute(statements.ingest_jobs.count_by_status).fetchall():
        found.setdefault(row["queue"], {})[row["status"]] = row["n"]
    for queue, count in workers.count_heartbeats(conn, live_s).items():
        found.setdefault(queue, {})["workers"] = count
    return found


def find(conn: db.Connection, wanted: Filter, limit: int | None) -> list[Row]:
    """Return the jobs that match, the newest first, without args and results. `limit` None: all."""
    since = wanted.since
    values = {
        "queue": wanted.queue,
        "task_name": wanted.task_name,
        "statuses": None if wanted.statuses is None else list(wanted.statuses),
        "at": since if isinstance(since, datetime) else None,
        "ago": since if isinstance(since, timedelta) else None,
        "key": wanted.key,
        "text": wanted.text,
        "before": wanted.before,
        "lost": wanted.lost,
        "limit": limit,
    }
    return conn.execute(statements.ingest_jobs.find, values).fetchall()


def name_actor(conn: db.Connection, actor: str) -> None:
    """Name who makes the changes in the rest of the transaction, for the history of jobs."""
    conn.execute(statements.ingest_jobs.name_actor, {"actor": payload.error_text(actor)})


def lock(conn: db.Connection, ids: Sequence[str]) -> dict[str, Row]:
    """Lock these jobs until the transaction ends; return those that exist, by id.

    Each has id, status, generation and cancel_requested_at.
    """
    return {
        row["id"]: row
        for row in conn.execute(statements.ingest_jobs.lock, {"ids": list(ids)}).fetchall()
    }


def cancel_queued(conn: db.Connection, ids: Sequence[str]) -> None:
    """Cancel those of these jobs that are queued."""
    conn.execute(statements.ingest_jobs.cancel_queued, {"ids": list(ids)})


def request_cancel(conn: db.Connection, ids: Sequence[str]) -> None:
    """Request the cancellation of those of these jobs that run."""
    conn.execute(statements.ingest_jobs.request_cancel, {"ids": list(ids)})


def delete(conn: db.Connection, ids: Sequence[str]) -> None:
    """Delete those of these jobs that do not run."""
    conn.execute(statements.ingest_jobs.delete, {"ids": list(ids)})


def retry(conn: db.Connection, ids: Sequence[str]) -> set[str]:
    """Queue failed and cancelled jobs again, in a new generation with all their attempts.

    Return the ids of the jobs that stay as they are because another job has their idempotency key.
    """
    try:
        with conn.transaction():
            job_retries.reopen_ingest_all(conn, ids)
    except psycopg.errors.UniqueViolation:
        return {job_id for job_id in ids if not _retry_one(conn, job_id)}
    return set()


def _retry_one(conn: db.Connection, job_id: str) -> bool:
    try:
        with conn.transaction():
            job_retries.reopen_ingest(conn, job_id)
    except errors.IdempotencyClash:
        return False
    return True


def runs_of_node_jobs(conn: db.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the run of each of these ids that is a node job."""
    rows = conn.execute(statements.ingest_jobs.find_node_jobs, {"ids": list(ids)}).fetchall()
    return {row["id"]: row["run_id"] for row in rows}
