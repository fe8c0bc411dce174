"""Read what the database says about claims: whether one holds, and which ones a worker holds."""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables


def is_held(conn: db.Connection, lease: job_tables.Lease) -> bool:
    """Return whether this claim still holds its job."""
    is_held = statements.claims.is_held[lease.table.name]
    return conn.execute(is_held, job_tables.fence(lease)).fetchone() is not None


def has_recorded(lease: job_tables.Lease, events: Sequence[str]) -> db.Script[bool]:
    """Return whether this very claim has left one of these events: its write was committed."""
    in_run = lease.table.in_run
    row = yield from db.one(
        statements.claims.has_recorded_node if in_run else statements.claims.has_recorded_ingest,
        job_tables.fence(lease, events=list(events)),
    )
    return row is not None


def held_by(conn: db.Connection, table: job_tables.JobTable, prefix: str) -> list[job_tables.Lease]:
    """Return the claims of workers whose id starts with `prefix`."""
    rows = conn.execute(statements.claims.held_by[table.name], {"prefix": prefix}).fetchall()
    return [job_tables.lease_of(table, row) for row in rows]
