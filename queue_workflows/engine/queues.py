"""What is said of queues and of their partitions: pauses and limits; and how queues stand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from psycopg import sql

from queue_workflows import db
from queue_workflows.types import Row

RATE_WINDOW_S = 300
"""Rates of jobs that come in and go out are of the last five minutes."""
FOREVER = timedelta(days=36_525)
"""The longest time span; PostgreSQL's times end sooner than Python's spans."""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PAUSE = sql.SQL(
    "INSERT INTO {table} AS t ({key}, paused_at, paused_until, paused_by)"
    " VALUES ({values}, now(), coalesce(%(at)s::timestamptz, now() + %(lasts)s::interval), %(by)s)"
    " ON CONFLICT ({key}) DO UPDATE SET paused_at = coalesce(CASE WHEN t.paused_until > now()"
    " OR t.paused_until IS NULL THEN t.paused_at END, now()),"
    " paused_until = EXCLUDED.paused_until, paused_by = EXCLUDED.paused_by, updated_at = now()"
    " RETURNING *"
)
_RESUME = sql.SQL(
    "UPDATE {table} SET paused_at = NULL, paused_until = NULL, paused_by = NULL,"
    " updated_at = now() WHERE ({key}) = ({values}) AND paused_at IS NOT NULL RETURNING queue"
)
_DROP_IDLE = (
    "DELETE FROM queue_partitions WHERE queue = %(queue)s AND partition_key = %(partition)s"
    " AND paused_at IS NULL AND max_running IS NULL AND rate_limit IS NULL"
)
_JOBS = (
    "SELECT j.queue::text, count(*) FILTER (WHERE j.status = 'running') AS running,"
    " count(*) FILTER (WHERE j.status = 'queued' AND j.blocked_reason IS NULL) AS ready,"
    " count(*) FILTER (WHERE j.blocked_reason = 'limited') AS limited,"
    " count(*) FILTER (WHERE j.blocked_reason IN ('locked', 'unserved')) AS locked,"
    " count(*) FILTER (WHERE j.blocked_reason = 'not_due') AS not_due,"
    " extract(epoch FROM now())::float8 - extract(epoch FROM min(j.created_at)"
    " FILTER (WHERE j.status = 'queued'"
    " AND j.blocked_reason IS DISTINCT FROM 'not_due'))::float8 AS oldest_s,"
    " count(*) FILTER (WHERE j.status = 'queued'"
    " AND j.created_at > now() - %(window)s * interval '1 second') AS fresh"
    " FROM {jobs} j WHERE j.status IN ('queued', 'running') GROUP BY 1"
)
# What came in within the window is queued still, or has left an event since.
_EVENTS = (
    "SELECT e.queue, count(DISTINCT e.job_id) FILTER (WHERE j.created_at > now()"
    " - %(window)s * interval '1 second' AND j.status <> 'queued') AS came,"
    " count(*) FILTER (WHERE e.event_type IN ('completed', 'failed', 'cancelled')) AS went"
    " FROM {events} e LEFT JOIN {jobs} j ON j.id = e.job_id"
    " WHERE e.created_at > now() - %(window)s * interval '1 second' AND e.queue IS NOT NULL"
    " GROUP BY 1"
)
_FAMILIES = (
    ("workflow_node_jobs", "workflow_node_events"),
    ("ingest_jobs", "ingest_job_events"),
)
_SETTINGS = (
    "SELECT s.*, (s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now()))"
    " AS paused FROM queue_settings s"
)
_PARTITIONS = (
    "SELECT p.*, (p.paused_at IS NOT NULL AND (p.paused_until IS NULL OR p.paused_until > now()))"
    " AS paused FROM queue_partitions p ORDER BY p.queue, p.partition_key"
)
_OF_PARTITION = (
    "SELECT coalesce(p.paused_at IS NOT NULL AND (p.paused_until IS NULL"
    " OR p.paused_until > now()), false) AS paused, p.paused_until, p.paused_by,"
    " coalesce(p.max_running, s.partition_max_running) AS max_running,"
    " coalesce(p.rate_limit, s.partition_rate_limit) AS rate_limit,"
    " CASE WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END"
    " AS rate_period_s, (SELECT min(d.due_at) FROM partition_dues d WHERE d.queue = %(queue)s"
    " AND d.partition_key = %(partition)s AND d.due_at < 'infinity') AS due_at,"
    " (SELECT count(*) FROM ingest_jobs j WHERE j.queue = %(queue)s"
    " AND j.partition_key = %(partition)s AND j.status = 'running') AS running"
    " FROM (SELECT) AS one LEFT JOIN queue_settings s ON s.queue = %(queue)s"
    " LEFT JOIN queue_partitions p ON p.queue = %(queue)s AND p.partition_key = %(partition)s"
)


def _parts(partition: str | None) -> dict[str, sql.Composable]:
    if partition is None:
        return {
            "table": sql.SQL("queue_settings"),
            "key": sql.SQL("queue"),
            "values": sql.SQL("%(queue)s"),
        }
    return {
        "table": sql.SQL("queue_partitions"),
        "key": sql.SQL("queue, partition_key"),
        "values": sql.SQL("%(queue)s, %(partition)s"),
    }


def pause(conn: db.Connection, queue: str, partition: str | None, values: dict[str, Any]) -> Row:
    """Pause a queue, or a partition of it; the row. `values`: `at` or `lasts` or neither, `by`."""
    given = values | {"queue": queue, "partition": partition}
    row = conn.execute(_PAUSE.format(**_parts(partition)), given).fetchone()
    assert row is not None
    return row


def resume(conn: db.Connection, queue: str, partition: str | None) -> bool:
    """End a pause; whether there was one, by hand or for a time."""
    given = {"queue": queue, "partition": partition}
    rows = conn.execute(_RESUME.format(**_parts(partition)), given).fetchall()
    if partition is not None:
        conn.execute(_DROP_IDLE, given)
    return bool(rows)


def limit(conn: db.Connection, queue: str, partition: str | None, values: dict[str, Any]) -> Row:
    """Set these columns of a queue's row, or of a partition's (None: no limit); the row."""
    names = [sql.Identifier(name) for name in sorted(values)]
    marks = [sql.Placeholder(name) for name in sorted(values)]
    parts = _parts(partition)
    statement = sql.SQL(
        "INSERT INTO {table} ({key}, {names}) VALUES ({values}, {marks})"
        " ON CONFLICT ({key}) DO UPDATE SET ({names}) = ROW ({marks}), updated_at = now()"
        " RETURNING *"
    ).format(**parts, names=sql.SQL(", ").join(names), marks=sql.SQL(", ").join(marks))
    given = values | {"queue": queue, "partition": partition}
    row = conn.execute(statement, given).fetchone()
    assert row is not None
    if partition is not None:
        conn.execute(_DROP_IDLE, given)
    return row


def mend_lines(conn: db.Connection) -> int:
    """Look at the lines of partitions that are due, or that nobody was let in from; how many."""
    row = conn.execute("SELECT queue_workflows_mend_lines() AS n", prepare=True).fetchone()
    return row["n"] if row else 0


def settings(conn: db.Connection) -> list[Row]:
    """What is said of queues, by name, each with whether it is `paused` now."""
    return conn.execute(_SETTINGS.encode() + b" ORDER BY s.queue").fetchall()


def of_queue(conn: db.Connection, queue: str) -> Row | None:
    """What is said of one queue, with `paused`; or None."""
    return conn.execute(_SETTINGS.encode() + b" WHERE s.queue = %s", (queue,)).fetchone()


def is_used(conn: db.Connection, queue: str) -> bool:
    """Whether something is said of a queue, or an ingest job is ready in it."""
    row = conn.execute(
        "SELECT EXISTS (SELECT FROM queue_settings WHERE queue = %(queue)s)"
        " OR EXISTS (SELECT FROM ingest_jobs WHERE queue = %(queue)s AND status = 'queued'"
        " AND blocked_reason IS NULL) AS found",
        {"queue": queue},
    ).fetchone()
    return bool(row and row["found"])


def of_partition(conn: db.Connection, queue: str, partition: str) -> Row:
    """The limits in force for a partition, `paused`, how many run, when its line is due or None."""
    row = conn.execute(_OF_PARTITION, {"queue": queue, "partition": partition}).fetchone()
    assert row is not None
    return row


def partitions(conn: db.Connection) -> list[Row]:
    """What is said of single partitions, by queue and key, each with whether it is `paused`."""
    return conn.execute(_PARTITIONS).fetchall()


def counts(conn: db.Connection) -> dict[str, Row]:
    """Per queue with live jobs or recent events: counts by state, oldest_s, came and went.

    `came`, `went`: jobs of the last RATE_WINDOW_S. Reads every live job and the events of the
    window.
    """
    found: dict[str, Row] = {}
    for jobs, events in _FAMILIES:
        for text in (_JOBS, _EVENTS):
            query = text.replace("{jobs}", jobs).replace("{events}", events)
            for row in conn.execute(query.encode(), {"window": RATE_WINDOW_S}).fetchall():
                found.setdefault(row["queue"], {}).update(row)
    return found


def use(conn: db.Connection, said: Row) -> Row:
    """`running`: how many of a queue run; `due_s`: when its rate has room for one more start.

    In seconds; None: at once, or it has no rate.
    """
    row = conn.execute(
        "SELECT (SELECT count(*) FROM ingest_jobs j WHERE j.status = 'running'"
        " AND j.queue = %(queue)s) AS running, (SELECT nullif(greatest(0, %(rate_period_s)s::float8"
        " - extract(epoch FROM now())::float8 + extract(epoch FROM s.started_at)::float8), 0)"
        " FROM queue_starts s"
        " WHERE s.queue = %(queue)s AND s.n = 1 - %(rate_limit)s::bigint + ("
        "SELECT max(n) FROM queue_starts l WHERE l.queue = %(queue)s)) AS due_s",
        said,
    ).fetchone()
    assert row is not None
    return row


def held_back(conn: db.Connection) -> dict[str, str]:
    """The queues of which jobs are due and none may start now, each with what keeps them, in words.

    A pause, a limit of the queue, or those of its partitions.
    """
    found: dict[str, str] = {}
    for row in conn.execute(_HELD_BACK).fetchall():
        if row["paused"] and (row["ready"] or row["limited"]):
            found[row["queue"]] = "its queue is paused"
        elif row["ready"]:
            now = use(conn, row)
            if row["max_running"] is not None and now["running"] >= row["max_running"]:
                found[row["queue"]] = f"{row['max_running']} at once"
            elif now["due_s"] is not None and (
                rate := rate_text(row["rate_limit"], row["rate_period_s"])
            ):
                found[row["queue"]] = rate
        elif row["limited"]:
            found[row["queue"]] = "limits of its partitions"
    return found


_HELD_BACK = (
    "SELECT s.*, (s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now()))"
    " AS paused, EXISTS (SELECT FROM ingest_jobs j WHERE j.queue = s.queue"
    " AND j.status = 'queued' AND j.blocked_reason IS NULL)"
    " OR EXISTS (SELECT FROM workflow_node_jobs j WHERE j.queue = s.queue"
    " AND j.status = 'queued' AND j.blocked_reason IS NULL) AS ready,"
    " EXISTS (SELECT FROM ingest_jobs j WHERE j.queue = s.queue AND j.partition_key IS NOT NULL"
    " AND j.status = 'queued' AND j.blocked_reason = 'limited') AS limited FROM queue_settings s"
)


def paused(conn: db.Connection) -> list[Row]:
    """What is paused now: queue, partition (None: all of it), since, until, by."""
    return conn.execute(
        "SELECT s.queue, s.partition, s.paused_at AS since, s.paused_until AS until,"
        " s.paused_by AS by FROM (SELECT queue, NULL AS partition, paused_at, paused_until,"
        " paused_by FROM queue_settings UNION ALL SELECT queue, partition_key, paused_at,"
        " paused_until, paused_by FROM queue_partitions) s WHERE s.paused_at IS NOT NULL"
        " AND (s.paused_until IS NULL OR s.paused_until > now()) ORDER BY 1, 2 NULLS FIRST"
    ).fetchall()


def rate_text(count: int | None, period_s: float | None) -> str | None:
    """A rate as `limit` takes it: `100/m`, `5/30s`; None for none."""
    if count is None or period_s is None:
        return None
    for unit, seconds in UNITS_S.items():
        if period_s == seconds:
            return f"{count}/{unit}"
    return f"{count}/{period_s:g}s"
