"""Pause and limit queues and their partitions; report their counts and what blocks them."""

from __future__ import annotations

import json
from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.runtime import durations
from queue_workflows.types import Row

RATE_WINDOW_S = 300
"""`counts` measures rates over the last five minutes."""


def limit(conn: db.Connection, queue: str, partition: str | None, limits: dict[str, Any]) -> Row:
    """Set these limits of a queue, or of a partition of it, and return its row.

    `limits`: by column; None takes a limit off, and one that is not named stays.
    """
    given = {"queue": queue, "partition": partition, "limits": json.dumps(limits)}
    text = statements.queues.limit_queue if partition is None else statements.queues.limit_partition
    row = text(conn, **given)
    if partition is not None:
        statements.queues.delete_unset_partition(conn, **given)
    return row


def counts(conn: db.Connection) -> dict[str, Row]:
    """Return for each queue with live jobs or recent events: counts by state, oldest_s, came, went.

    `came`, `went`: jobs of the last RATE_WINDOW_S. Reads every live job and the events of that
    time.
    """
    found: dict[str, Row] = {}
    for table in reversed(statements.JOB_TABLES):
        for rows in (statements.queues.count_jobs, statements.queues.count_events):
            for row in rows[table](conn, window=RATE_WINDOW_S):
                found.setdefault(row["queue"], {}).update(row)
    return found


def held_back(conn: db.Connection) -> dict[str, str]:
    """Return the queues that have due jobs of which none may start now, each with the cause.

    The cause, in words, is a pause, a limit of the queue, or the limits of its partitions.
    """
    found: dict[str, str] = {}
    for row in statements.queues.waiting(conn):
        if row["paused"] and (row["ready"] or row["limited"]):
            found[row["queue"]] = "its queue is paused"
        elif row["ready"]:
            now = statements.queues.use(conn, **row)
            if row["max_running"] is not None and now["running"] >= row["max_running"]:
                found[row["queue"]] = f"{row['max_running']} at once"
            elif now["due_s"] is not None and (
                rate := durations.rate_text(row["rate_limit"], row["rate_period_s"])
            ):
                found[row["queue"]] = rate
        elif row["limited"]:
            found[row["queue"]] = "limits of its partitions"
    return found
