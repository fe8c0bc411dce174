"""Ingest jobs as an operator sees them, and what is done to many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import psycopg

from queue_workflows import db, errors
from queue_workflows.engine import retry
from queue_workflows.types import Row

_LIST = (
    "SELECT id, task_name, queue::text, status::text, reason, priority, attempts, max_attempts,"
    " crash_count, watchdog_retries, claim_no, generation, claimed_by, worker_id, blocked_reason,"
    " available_at, cancel_requested_at, lock_key, partition_key, idempotency_key, progress, error,"
    " seconds, created_at, started_at, finished_at FROM ingest_jobs j"
    " WHERE (%(queue)s::text IS NULL OR j.queue = %(queue)s)"
    " AND (%(task_name)s::text IS NULL OR j.task_name = %(task_name)s)"
    " AND (%(statuses)s::text[] IS NULL OR j.status = ANY (%(statuses)s::text[]))"
    " AND (%(at)s::timestamptz IS NULL"
    " OR greatest(j.created_at, j.started_at, j.finished_at) >= %(at)s)"
    " AND (%(ago)s::interval IS NULL"
    " OR greatest(j.created_at, j.started_at, j.finished_at) >= now() - %(ago)s)"
    " AND (%(key)s::text IS NULL"
    " OR %(key)s IN (j.idempotency_key, j.lock_key, j.partition_key))"
    " ORDER BY j.seq DESC LIMIT %(limit)s"
)
# In one order, so that no two callers wait for each other.
_LOCK = (
    "SELECT id, status::text, generation, cancel_requested_at FROM ingest_jobs"
    " WHERE id = ANY (%s) ORDER BY id FOR UPDATE"
)
_CANCEL = (
    "UPDATE ingest_jobs SET status = 'cancelled', finished_at = now(), blocked_reason = NULL"
    " WHERE id = ANY (%s) AND status = 'queued'"
)
_ASK = (
    "UPDATE ingest_jobs SET cancel_requested_at = now()"
    " WHERE id = ANY (%s) AND status = 'running' AND cancel_requested_at IS NULL"
)
_DELETE = "DELETE FROM ingest_jobs WHERE id = ANY (%s) AND status <> 'running'"


class Wanted(NamedTuple):
    """Which jobs to list; None: whatever."""

    queue: str | None = None
    task_name: str | None = None
    statuses: Sequence[str] | None = None
    since: datetime | timedelta | None = None
    """Queued, started or ended since then, or within that time."""
    key: str | None = None
    """Their idempotency, lock or partition key."""


def listed(conn: db.Connection, wanted: Wanted, limit: int | None) -> list[Row]:
    """Those jobs, the newest first. Reads the table once: no index serves every filter."""
    since = wanted.since
    values = {
        "queue": wanted.queue,
        "task_name": wanted.task_name,
        "statuses": None if wanted.statuses is None else list(wanted.statuses),
        "at": since if isinstance(since, datetime) else None,
        "ago": since if isinstance(since, timedelta) else None,
        "key": wanted.key,
        "limit": limit,
    }
    return conn.execute(_LIST, values).fetchall()


def name_actor(conn: db.Connection, by: str) -> None:
    """Who does what the rest of the transaction does, for the history of jobs."""
    conn.execute("SELECT set_config('queue_workflows.actor', %s, true)", (by,))


def locked(conn: db.Connection, ids: Sequence[str]) -> dict[str, Row]:
    """The rows (id, status, generation, cancel_requested_at) of those that exist, locked, by id."""
    return {row["id"]: row for row in conn.execute(_LOCK, (list(ids),)).fetchall()}


def cancel(conn: db.Connection, ids: Sequence[str]) -> None:
    """Cancel what is queued."""
    conn.execute(_CANCEL, (list(ids),))


def ask_to_end(conn: db.Connection, ids: Sequence[str]) -> None:
    """Ask for the end of what runs."""
    conn.execute(_ASK, (list(ids),))


def delete(conn: db.Connection, ids: Sequence[str]) -> None:
    """Delete what does not run."""
    conn.execute(_DELETE, (list(ids),))


def reopen(conn: db.Connection, ids: Sequence[str]) -> set[str]:
    """Queue failed and cancelled jobs anew; the ids of those that another job's key forbids."""
    try:
        with conn.transaction():
            retry.reopen_ingest_all(conn, ids)
    except psycopg.errors.UniqueViolation:
        return {job_id for job_id in ids if not _reopened(conn, job_id)}
    return set()


def _reopened(conn: db.Connection, job_id: str) -> bool:
    try:
        with conn.transaction():
            retry.reopen_ingest(conn, job_id)
    except errors.IdempotencyClash:
        return False
    return True


def runs_of(conn: db.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Of ids that are node jobs the run of each."""
    rows = conn.execute(
        "SELECT id, run_id FROM workflow_node_jobs WHERE id = ANY (%s)", (list(ids),)
    ).fetchall()
    return {row["id"]: row["run_id"] for row in rows}
