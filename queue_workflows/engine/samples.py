"""Store, read and delete the hardware samples of machines."""

from __future__ import annotations

from datetime import datetime

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row


def put(conn: db.Connection, host: str, every_s: int | None, text: str, *, notify: bool) -> None:
    """Store a sample (JSON text) in the ring of its interval (None: in none); notify it if `tell`.

    One statement; its commit does not wait for the disk.
    """
    values = {"host": host, "every_s": every_s, "sample": text, "notify": notify}
    conn.execute(statements.samples.put, values, prepare=True)


def between(
    conn: db.Connection,
    host: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    past_s: float = 600.0,
) -> list[Row]:
    """Return the samples of a host, the oldest first: every_s, sampled_at, sample.

    `since` None: `past_s` seconds before now; `until` None: now.
    """
    values = {"host": host, "since": since, "until": until, "past_s": past_s}
    return conn.execute(statements.samples.between, values).fetchall()


def last(conn: db.Connection, host: str, since: datetime, until: datetime) -> Row | None:
    """Return the last sample of a host between two times, as `between` does; or None."""
    values = {"host": host, "since": since, "until": until}
    return conn.execute(statements.samples.last, values).fetchone()


def hosts(conn: db.Connection) -> list[str]:
    """Return the hosts that have samples, sorted."""
    return [row["host_label"] for row in conn.execute(statements.samples.hosts).fetchall()]


def prune(conn: db.Connection) -> int:
    """Delete samples over a day old; return how many."""
    return conn.execute(statements.samples.prune).rowcount
