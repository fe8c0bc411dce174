"""Read what the database says about claims: whether one holds, and which ones a worker holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables


def is_held(conn: db.Connection, lease: job_tables.Lease) -> bool:
    """Return whether this claim still holds its job."""
    is_held = statements.claims.is_held[lease.table.name]
    return conn.execute(is_held, job_tables.fence(lease)).fetchone() is not None


def has_recorded(conn: db.Connection, lease: job_tables.Lease, events: Sequence[str]) -> bool:
    """Return whether this very claim has left one of these events: its write was committed."""
    in_run = lease.table.in_run
    found = conn.execute(
        statements.claims.has_recorded_node if in_run else statements.claims.has_recorded_ingest,
        job_tables.fence(lease, events=list(events)),
    )
    return found.fetchone() is not None


def held_by(
    conn: db.Connection,
    table: job_tables.JobTable,
    prefix: str,
    *,
    exclude: Collection[int] = (),
) -> list[job_tables.Lease]:
    """Return the claims of workers whose id starts with `prefix`, without jobs of these `seq`."""
    parameters = {"prefix": prefix, "seqs": [*exclude]}
    rows = conn.execute(statements.claims.held_by[table.name], parameters).fetchall()
    return [job_tables.lease_of(table, row) for row in rows]


def cancelled_since(
    conn: db.Connection,
    table: job_tables.JobTable,
    prefix: str,
    *,
    seqs: Collection[int] | None = None,
) -> list[float | None]:
    """Return for each job that such workers hold since how many seconds it is cancelled, or None.

    A request to cancel it counts, and the end of its run. `seqs`: of these jobs alone.
    """
    of_nodes = statements.claims.cancelled_since_nodes
    rows = conn.execute(
        of_nodes if table.in_run else statements.claims.cancelled_since_ingest,
        {"prefix": prefix, "seqs": None if seqs is None else [*seqs]},
    ).fetchall()
    return [row["since_s"] for row in rows]
