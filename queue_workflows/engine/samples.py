"""The rings of hardware samples: put, told to listeners, looked back at, pruned."""

from __future__ import annotations

from datetime import datetime

from queue_workflows import db
from queue_workflows.types import Row

_PUT = b"SELECT queue_workflows_put_sample(%s::text, %s::integer, %s::jsonb, %s::boolean)"
_BETWEEN = (
    "SELECT every_s, sampled_at, sample FROM hw_samples WHERE host_label = %(host)s"
    " AND sampled_at >= coalesce(%(since)s, now() - %(past)s * interval '1 second')"
    " AND sampled_at <= coalesce(%(until)s, now()) ORDER BY sampled_at, every_s"
)
_LAST = (
    "SELECT every_s, sampled_at, sample FROM hw_samples WHERE host_label = %(host)s"
    " AND sampled_at BETWEEN %(since)s AND %(until)s ORDER BY sampled_at DESC, every_s LIMIT 1"
)
# The fine ones of a box that has fallen silent stay for a day: they say what it did last.
_PRUNE = "DELETE FROM hw_samples WHERE sampled_at < now() - interval '1 day'"


def put(conn: db.Connection, host: str, every_s: int | None, text: str, *, tell: bool) -> None:
    """Store a sample (JSON text) in its ring, None: in none, and notify it if told to.

    One statement; its commit does not wait for the disk.
    """
    conn.execute(_PUT, (host, every_s, text, tell), prepare=True)


def between(
    conn: db.Connection,
    host: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    past_s: float = 600.0,
) -> list[Row]:
    """Samples of a host, the oldest first: every_s, sampled_at, sample.

    `since` None: `past_s` before now; `until` None: now.
    """
    values = {"host": host, "since": since, "until": until, "past": past_s}
    return conn.execute(_BETWEEN, values).fetchall()


def last(conn: db.Connection, host: str, since: datetime, until: datetime) -> Row | None:
    """The last sample of a host between two times: every_s, sampled_at, sample; or None."""
    return conn.execute(_LAST, {"host": host, "since": since, "until": until}).fetchone()


def hosts(conn: db.Connection) -> list[str]:
    """The hosts that have samples, sorted."""
    rows = conn.execute("SELECT DISTINCT host_label FROM hw_samples ORDER BY 1").fetchall()
    return [row["host_label"] for row in rows]


def prune(conn: db.Connection) -> int:
    """Delete samples over a day old; how many."""
    return conn.execute(_PRUNE).rowcount
