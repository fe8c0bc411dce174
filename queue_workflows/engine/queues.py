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


def pause(conn: db.Connection, queue: str, partition: str | None, values: dict[str, Any]) -> Row:
    """Pause a queue, or a partition of it, and return its row.

    `values`: `at` or `lasts` or (both None) neither, and `by`.
    """
    text = statements.queues.pause_queue if partition is None else statements.queues.pause_partition
    row = conn.execute(text, values | {"queue": queue, "partition": partition}).fetchone()
    assert row is not None
    return row


def resume(conn: db.Connection, queue: str, partition: str | None) -> bool:
    """End a pause; return whether there was one, also one that had run out."""
    given = {"queue": queue, "partition": partition}
    if partition is None:
        return bool(conn.execute(statements.queues.resume_queue, given).fetchall())
    rows = conn.execute(statements.queues.resume_partition, given).fetchall()
    conn.execute(statements.queues.delete_unset_partition, given)
    return bool(rows)


def limit(conn: db.Connection, queue: str, partition: str | None, limits: dict[str, Any]) -> Row:
    """Set these limits of a queue, or of a partition of it, and return its row.

    `limits`: by column; None takes a limit off, and one that is not named stays.
    """
    given = {"queue": queue, "partition": partition, "limits": json.dumps(limits)}
    text = statements.queues.limit_queue if partition is None else statements.queues.limit_partition
    row = conn.execute(text, given).fetchone()
    assert row is not None
    if partition is not None:
        conn.execute(statements.queues.delete_unset_partition, given)
    return row


def admit_from_partitions(conn: db.Connection) -> int:
    """Admit jobs of partitions whose time has come, and of those from which no job is admitted.

    Return how many partitions of the second kind there were.
    """
    row = conn.execute(statements.queues.admit_from_partitions, prepare=True).fetchone()
    return row["n"] if row else 0


def settings(conn: db.Connection) -> list[Row]:
    """Return the settings of queues, by name, each with whether it is `paused` now."""
    return conn.execute(statements.queues.settings, {"queue": None}).fetchall()


def settings_of(conn: db.Connection, queue: str) -> Row | None:
    """Return the settings of one queue, with `paused`; None if it has none."""
    return conn.execute(statements.queues.settings, {"queue": queue}).fetchone()


def partition_settings(conn: db.Connection) -> list[Row]:
    """Return the settings of single partitions, by queue and key, each with `paused`."""
    return conn.execute(statements.queues.partition_settings).fetchall()


def partition_limits(conn: db.Connection, queue: str, partition: str) -> Row:
    """Return the limits in force for a partition, with `paused`, `running` and `due_at`.

    `due_at`: when its next job may be admitted, or None.
    """
    given = {"queue": queue, "partition": partition}
    row = conn.execute(statements.queues.partition_limits, given).fetchone()
    assert row is not None
    return row


def is_used(conn: db.Connection, queue: str) -> bool:
    """Return whether a queue has settings, or an ingest job that could be claimed."""
    row = conn.execute(statements.queues.is_used, {"queue": queue}).fetchone()
    return bool(row and row["found"])


def counts(conn: db.Connection) -> dict[str, Row]:
    """Return for each queue with live jobs or recent events: counts by state, oldest_s, came, went.

    `came`, `went`: jobs of the last RATE_WINDOW_S. Reads every live job and the events of that
    time.
    """
    found: dict[str, Row] = {}
    for table in reversed(statements.JOB_TABLES):
        for texts in (statements.queues.count_jobs, statements.queues.count_events):
            for row in conn.execute(texts[table], {"window": RATE_WINDOW_S}).fetchall():
                found.setdefault(row["queue"], {}).update(row)
    return found


def use(conn: db.Connection, limits: Row) -> Row:
    """Return how many jobs of a queue with these settings run, as `running`, and `due_s`.

    `due_s`: in how many seconds its rate allows the next start; None: now, or there is no rate.
    """
    row = conn.execute(statements.queues.use, limits).fetchone()
    assert row is not None
    return row


def held_back(conn: db.Connection) -> dict[str, str]:
    """Return the queues that have due jobs of which none may start now, each with the cause.

    The cause, in words, is a pause, a limit of the queue, or the limits of its partitions.
    """
    found: dict[str, str] = {}
    for row in conn.execute(statements.queues.waiting).fetchall():
        if row["paused"] and (row["ready"] or row["limited"]):
            found[row["queue"]] = "its queue is paused"
        elif row["ready"]:
            now = use(conn, row)
            if row["max_running"] is not None and now["running"] >= row["max_running"]:
                found[row["queue"]] = f"{row['max_running']} at once"
            elif now["due_s"] is not None and (
                rate := durations.rate_text(row["rate_limit"], row["rate_period_s"])
            ):
                found[row["queue"]] = rate
        elif row["limited"]:
            found[row["queue"]] = "limits of its partitions"
    return found


def paused(conn: db.Connection) -> list[Row]:
    """Return what is paused now: queue, partition (None: the whole queue), since, until, by."""
    return conn.execute(statements.queues.paused).fetchall()
