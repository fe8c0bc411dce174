"""Store the logs of attempts, each under its claim, and delete old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables


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
    parameters = {
        "jobs": [log.lease.job_id for log in logs],
        "claims": [log.lease.claim_no for log in logs],
        "heads": [log.head for log in logs],
        "tails": [log.tail for log in logs],
        "cuts": [log.cut_bytes for log in logs],
    }
    return conn.execute(statements.logs.write[table.name], parameters).rowcount


def prune(conn: db.Connection, *, older_than_days: float, batch: int) -> int:
    """Delete up to `batch` logs that are older than that many days; return how many."""
    parameters = {"days": older_than_days, "batch": batch}
    return conn.execute(statements.logs.prune, parameters).rowcount
