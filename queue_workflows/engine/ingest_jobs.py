"""Queue ingest jobs; find, cancel, delete and retry them for an operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import app_connections, check_violations, statements
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


def insert_many(conn: db.Connection, row: dict[str, Any], args: Sequence[str]) -> list[JobId]:
    """Insert one queued job for each of `args` (JSON texts) and return their ids, in order.

    `row` has the other columns. One statement.
    """
    prefix = identity.new_job_prefix()
    given: dict[str, Any] = {**row, "prefix": prefix, "args": f"[{','.join(args)}]"}
    statements.ingest_jobs.insert_many(conn, **given)
    return identity.job_ids(prefix, len(args))


def insert_batch(conn: db.Connection, batch: job_validation.Batch) -> list[JobId]:
    """Insert the jobs of a batch, all or none, and return their ids, in order.

    Raises `IdempotencyClash` with nothing written. Waits for a transaction that has inserted one of
    the keys and has not ended yet.
    """
    return batch.ids(
        statements.ingest_jobs.insert_batch(conn, prefix=batch.prefix, jobs=batch.jobs)
    )


async def insert_batch_async(conn: Any, batch: job_validation.Batch) -> list[JobId]:
    """Do as `insert_batch` does, on an asynchronous connection of the app.

    Raises `UnknownConnection` before any write.
    """
    values = {"prefix": batch.prefix, "jobs": batch.jobs}
    text = statements.ingest_jobs.insert_batch.text
    return batch.ids(
        await app_connections.fetch_async(conn, text, values, blocking_twin="jobs.enqueue")
    )


def insert_once(conn: db.Connection, batch: job_validation.Batch, actor: str) -> tuple[JobId, str]:
    """Insert the one job of a batch, with an event, and return its id and status.

    If a job has its key, return that one: it keeps the key for as long as it exists, whatever its
    window. Its status is `lost` if it runs and its lease has lapsed. Raises `IdempotencyClash` if
    it has another task, queue or args. One statement.
    """
    row = statements.ingest_jobs.insert_once(
        conn, prefix=batch.prefix, jobs=batch.jobs, actor=payload.error_text(actor)
    )
    if row is None:
        return batch.ids([])[0], "queued"
    return batch.ids([row | {"place": 1}])[0], "lost" if row["lost"] else row["status"]


def counts(conn: db.Connection, live_s: float) -> dict[str, dict[str, int]]:
    """Return the number of jobs per queue and status.

    The member `workers` of a queue counts the heartbeats that are younger than `live_s` seconds.
    """
    found: dict[str, dict[str, int]] = {}
    for row in statements.ingest_jobs.count_by_status(conn):
        found.setdefault(row["queue"], {})[row["status"]] = row["n"]
    for queue, count in {
        row["queue"]: row["n"] for row in statements.workers.count_heartbeats(conn, live_s=live_s)
    }.items():
        found.setdefault(queue, {})["workers"] = count
    return found


def find(conn: db.Connection, wanted: Filter, limit: int | None) -> list[Row]:
    """Return the jobs that match, the newest first, without args and results. `limit` None: all."""
    since = wanted.since
    return statements.ingest_jobs.find(
        conn,
        queue=wanted.queue,
        task_name=wanted.task_name,
        statuses=None if wanted.statuses is None else list(wanted.statuses),
        at=since if isinstance(since, datetime) else None,
        ago=since if isinstance(since, timedelta) else None,
        key=wanted.key,
        text=wanted.text,
        before=wanted.before,
        lost=wanted.lost,
        limit=limit,
    )


def retry(conn: db.Connection, ids: Sequence[str]) -> set[str]:
    """Queue failed and cancelled jobs again, in a new generation with all their attempts.

    Return the ids of the jobs that stay as they are because another job has their idempotency key.
    """
    try:
        with conn.transaction():
            statements.retry_jobs.reopen_ingest(conn, jobs=list(ids))
    except psycopg.errors.UniqueViolation:
        return {job_id for job_id in ids if not _retry_one(conn, job_id)}
    return set()


def _retry_one(conn: db.Connection, job_id: str) -> bool:
    try:
        with conn.transaction():
            reopen(conn, job_id)
    except errors.IdempotencyClash:
        return False
    return True


def reopen(conn: db.Connection, job_id: str) -> Row | None:
    """Queue a failed or cancelled ingest job again, with all counters at zero; return its row.

    None: it is in another state, or unknown. Raises `IdempotencyClash`, with nothing written, when
    another job owns its idempotency key now.
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
