"""Store the logs of attempts, each under its claim, read them and delete old ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row


class Written(NamedTuple):
    """The log of one attempt: its first part, its last part, and how many bytes between are gone.

    A `head` of None is stored already. Neither part has a NUL or a lone surrogate.
    """

    lease: job_tables.Lease
    head: str | None
    tail: str
    cut_bytes: int


def write(conn: db.Connection, table: job_tables.JobTable, logs: Sequence[Written]) -> int:
    """Store the logs of attempts and return how many were stored.

    Leaves out jobs that are gone or were claimed again, by any worker.
    """
    return conn.execute(*writing(table, logs)[:2]).rowcount


def writing(table: job_tables.JobTable, logs: Sequence[Written]) -> db.Statement:
    """Return the statement that stores the logs of attempts."""
    parameters = {
        "jobs": [log.lease.job_id for log in logs],
        "claims": [log.lease.claim_no for log in logs],
        "heads": [log.head for log in logs],
        "tails": [log.tail for log in logs],
        "cuts": [log.cut_bytes for log in logs],
    }
    return db.Statement(statements.logs.write[table.name], parameters)


def of_jobs(conn: db.Connection, table: job_tables.JobTable, job_ids: Sequence[str]) -> list[Row]:
    """Return the logs of these jobs' attempts: job_id, claim_no, head, tail, cut_bytes."""
    parameters = {"jobs": list(job_ids), "table": table.name}
    return conn.execute(statements.logs.of_jobs, parameters).fetchall()


def nodes_that_logged(
    conn: db.Connection, run_id: str, since: datetime | None, node_ids: Sequence[str] | None
) -> list[Row]:
    """Return which of a run's nodes wrote to a log since then, the last to write last.

    Each has node_id, queue, job_id, updated_at. `of_jobs` reads the logs, which may be large.
    `since` None: at any time. `node_ids` None: of all its nodes.
    """
    parameters = {"run_id": run_id, "since": since, "nodes": node_ids}
    return conn.execute(statements.logs.nodes_that_logged, parameters).fetchall()


def prune(conn: db.Connection, *, older_than_days: float, batch: int) -> int:
    """Delete up to `batch` logs that are older than that many days; return how many."""
    parameters = {"days": older_than_days, "batch": batch}
    return conn.execute(statements.logs.prune, parameters).rowcount
