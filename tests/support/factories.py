"""Insert runs and jobs as an app does, and claim, finish or expire them in one call."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from queue_workflows import db
from queue_workflows.engine import claims, job_tables
from queue_workflows.types import Row


def insert(conn: db.Connection, table: str, **columns: Any) -> Row:
    """Insert these columns, dicts and lists of dicts as jsonb; return the row."""
    values = {name: _adapted(value) for name, value in columns.items()}
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING *").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(map(sql.Placeholder, values)),
    )
    row = conn.execute(statement, values).fetchone()
    assert row is not None
    return row


def _adapted(value: Any) -> Any:
    return Jsonb(value) if isinstance(value, dict) else value


def run(conn: db.Connection, **columns: Any) -> str:
    """Insert a run and return its id; it is running, so that nothing starts it."""
    return insert(conn, "workflow_runs", **{"workflow_name": "w", "status": "running"} | columns)[
        "id"
    ]


def node(conn: db.Connection, run_id: str | None = None, node_id: str = "n", **columns: Any) -> Row:
    """Insert a node job, by default queued on cpu, of this run or of a new one."""
    given = {"node_module": "m", "queue": "cpu"} | columns
    return insert(conn, "workflow_node_jobs", run_id=run_id or run(conn), node_id=node_id, **given)


def ingest(conn: db.Connection, **columns: Any) -> Row:
    """Insert an ingest job, by default queued on fetch."""
    return insert(conn, "ingest_jobs", **{"task_name": "t", "queue": "fetch"} | columns)


def who(queue: str = "cpu", worker_id: str = "w1", **more: Any) -> claims.Claimant:
    """Return a claimant of this identity on host `box`."""
    return claims.Claimant(worker_id, more.pop("host", "box"), queue, **more)


def on_limit_wait(waits_s: list[float]) -> claims.OnWait:
    """Return what lets a claim append the seconds until a limit admits the next job."""

    def call(wait: claims.Wait) -> None:
        if wait.limit_s is not None:
            waits_s.append(max(0.0, wait.limit_s))

    return claims.OnWait(call, 0.0)


def claim_node(conn: db.Connection, claimant: claims.Claimant | None = None) -> Row:
    """Claim the next node job; there must be one."""
    job = claims.node_step(conn, claimant or who())
    assert job is not None
    return job


def claim_ingest(conn: db.Connection, claimant: claims.Claimant | None = None) -> Row:
    """Claim the next ingest job; there must be one."""
    (job,) = claims.ingest_step(conn, claimant or who("fetch"))
    return job


def node_lease(job: Row) -> job_tables.Lease:
    """Return the lease of a claimed node job."""
    return job_tables.lease_of(job_tables.NODE_JOBS, job)


def ingest_lease(job: Row) -> job_tables.Lease:
    """Return the lease of a claimed ingest job."""
    return job_tables.lease_of(job_tables.INGEST_JOBS, job)


def node_result(job: Row, **delta: Any) -> claims.NodeResult:
    """Return the result that completes a claimed node job."""
    return claims.NodeResult(node_lease(job), json.dumps(delta), 0.1)


def ingest_result(job: Row, **result: Any) -> claims.IngestResult:
    """Return the result that completes a claimed ingest job."""
    return claims.IngestResult(ingest_lease(job), json.dumps(result), 0.1)


def complete_node(conn: db.Connection, job: Row, **delta: Any) -> None:
    """Complete a claimed node job under its claim; `ClaimLost` when it is held no longer."""
    claims.node_step(
        conn, who(worker_id=job["worker_id"]), done=node_result(job, **delta), claim=False
    )


def complete_ingest(conn: db.Connection, job: Row, **result: Any) -> None:
    """Complete a claimed ingest job under its claim; `ClaimLost` when it is held no longer."""
    claimant = who(job["queue"], worker_id=job["worker_id"])
    claims.ingest_step(conn, claimant, done=[ingest_result(job, **result)], claim=0)


def empty(conn: db.Connection, *names: str) -> None:
    """Delete all rows of these tables, as by their age; cheaper than TRUNCATE for a few."""
    with conn.transaction():
        conn.execute("SELECT set_config('queue_workflows.retention', 'on', true)")
        for name in names:
            conn.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name)))


@contextmanager
def unguarded(conn: db.Connection, table: str) -> Generator[None]:
    """Open a transaction without triggers, for changes that only a test may make."""
    name = sql.Identifier(table)
    with conn.transaction():
        conn.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(name))
        yield
        conn.execute(sql.SQL("ALTER TABLE {} ENABLE TRIGGER USER").format(name))


def table_of(job: Row) -> job_tables.JobTable:
    """Return the job table of a row."""
    return job_tables.NODE_JOBS if "node_id" in job else job_tables.INGEST_JOBS


def expire(conn: db.Connection, job: Row) -> None:
    """Let the lease of a job lapse."""
    conn.execute(
        sql.SQL(
            "UPDATE {} SET lease_expires_at = now() - interval '1 second'"
            " WHERE id = %s AND status = 'running'"
        ).format(sql.Identifier(table_of(job).name)),
        (job["id"],),
    )


def reread(conn: db.Connection, job: Row) -> Row:
    """Return the job's row as it is now."""
    query = sql.SQL("SELECT * FROM {} WHERE id = %s").format(sql.Identifier(table_of(job).name))
    row = conn.execute(query, (job["id"],)).fetchone()
    assert row is not None
    return row


def one(conn: db.Connection, query: str, *values: Any) -> Any:
    """Return the first column of the single row of a test's query."""
    (row,) = conn.execute(query.encode(), values).fetchall()
    return next(iter(row.values()))


def column(conn: db.Connection, query: str, *values: Any) -> list[Any]:
    """Return the first column of each row of a test's query."""
    return [next(iter(row.values())) for row in conn.execute(query.encode(), values).fetchall()]
