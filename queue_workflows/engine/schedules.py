"""Claim an instant of a schedule and queue its job; read and delete claimed instants."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from queue_workflows import db
from queue_workflows.db import statements


def database_now(conn: db.Connection) -> datetime:
    """Return the database's clock, with a time zone: the start of the transaction of `conn`."""
    row = conn.execute(statements.schedules.now).fetchone()
    assert row is not None
    return row["now"]


def fire(
    conn: db.Connection,
    *,
    name: str,
    fire_at: datetime,
    task_name: str,
    queue: str,
    reason: str,
    priority: int | None = None,
    lock_key: str | None = None,
) -> str | None:
    """Claim an instant and queue its job; return the job's id, or None if it was claimed before.

    Joins the caller's transaction. It waits for a transaction that is claiming the same instant,
    so fire several in one order.
    """
    row = conn.execute(
        statements.schedules.fire,
        {
            "name": name,
            "fire_at": fire_at,
            "task_name": task_name,
            "queue": queue,
            "reason": reason,
            "priority": priority,
            "lock_key": lock_key,
        },
    ).fetchone()
    return row["id"] if row else None


def last_fires(
    conn: db.Connection, names: Iterable[str], *, until: datetime
) -> dict[str, datetime]:
    """Return the latest instant up to `until` that fired, by name.

    Names without such an instant are left out.
    """
    wanted = {"names": sorted(set(names)), "until": until}
    rows = conn.execute(statements.schedules.last_fires, wanted).fetchall()
    return {row["name"]: row["fire_at"] for row in rows}


def prune(conn: db.Connection, *, older_than_days: int = 30, batch: int = 1000) -> int:
    """Delete up to `batch` instants that were claimed that many days ago; return how many."""
    parameters = {"days": older_than_days, "batch": batch}
    return conn.execute(statements.schedules.prune, parameters).rowcount
