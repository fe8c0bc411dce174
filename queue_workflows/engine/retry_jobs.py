"""Queue ingest jobs again that have failed or were cancelled, in a new generation."""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows import db, errors
from queue_workflows.db import check_violations, statements
from queue_workflows.types import Row


def reopen_ingest(conn: db.Connection, job_id: str) -> Row | None:
    """Queue a failed or cancelled ingest job again, with all counters at zero; return its row.

    None: it is in another state, or unknown. Raises `IdempotencyClash`, with nothing written, when
    another job owns its idempotency key now.
    """
    try:
        with conn.transaction():
            rows = reopen_ingest_all(conn, [job_id])
            return rows[0] if rows else None
    except Exception as error:
        if not check_violations.is_violation_of(error, "ingest_jobs_idempotency_idx"):
            raise
        found = conn.execute(statements.retry_jobs.key_owner, {"job": job_id}).fetchone()
        if found is None:
            raise
    raise errors.IdempotencyClash(
        f"job {job_id!r} cannot run again: its idempotency key {found['key']!r} is that of job "
        f"{found['id']!r} now",
        found["id"],
    )


def reopen_ingest_all(conn: db.Connection, job_ids: Sequence[str]) -> list[Row]:
    """Queue those of these jobs again that have failed or were cancelled; return their rows."""
    return conn.execute(statements.retry_jobs.reopen_ingest, {"jobs": list(job_ids)}).fetchall()
