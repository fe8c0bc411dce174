"""What `doctor` asks the server and the tables: facts, each a cheap statement that only reads."""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from psycopg import pq

from queue_workflows import db
from queue_workflows.types import Row

TABLES = (
    "workflow_runs", "workflow_node_jobs", "workflow_input_submissions",
    "workflow_dispatch_events", "workflow_node_events", "ingest_jobs", "ingest_job_events",
    "schedule_fires", "workers", "worker_heartbeats", "worker_controls", "job_attempt_logs",
    "workflow_input_timeouts", "queue_settings", "gpu_models", "gpu_unassignable",
    "model_controls", "hw_samples", "queue_partitions", "queue_starts", "partition_starts",
    "partition_dues",
)  # fmt: skip
"""The tables that the engine writes; `lock_turns` and `partition_turns` are their owner's alone,
by functions of his."""
RENEWED = {
    "workflow_node_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "ingest_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "workers": ["last_seen", "state", "job_ids", "detail"],
}
"""Columns that each renewal writes."""


def driver() -> tuple[str, str, int]:
    """psycopg's version, its implementation (`c`, `binary` or `python`), and libpq's version."""
    return psycopg.__version__, pq.__impl__, pq.version()


def python_version() -> str:
    """This interpreter's version, as `3.11.7`."""
    return ".".join(map(str, sys.version_info[:3]))


def _one(conn: db.Connection, query: bytes, values: dict[str, Any] | None = None) -> Row:
    row = conn.execute(query, values).fetchone()
    assert row is not None
    return row


def reason(error: db.Error) -> str:
    """Why a statement was refused, in one sentence of the server's."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__


def submitters(conn: db.Connection) -> list[str]:
    """Return the roles that may insert runs and neither own the tables nor work on jobs.

    At most 10, by name, without superusers and the roles that PostgreSQL itself brings.
    """
    rows = conn.execute(
        b"SELECT r.rolname FROM pg_roles r, pg_class c WHERE c.oid = to_regclass('workflow_runs')"
        b" AND NOT r.rolsuper AND r.rolname !~ '^pg_'"
        b" AND NOT pg_has_role(r.oid, c.relowner, 'USAGE')"
        b" AND has_any_column_privilege(r.oid, c.oid, 'INSERT')"
        b" AND NOT has_table_privilege(r.oid, to_regclass('workflow_node_jobs'), 'UPDATE')"
        b" ORDER BY 1 LIMIT 10"
    ).fetchall()
    return [row["rolname"] for row in rows]


def public_may_create(conn: db.Connection) -> str | None:
    """Return our schema's name if every role may create functions in it; else None."""
    row = conn.execute(
        b"SELECT quote_ident(n.nspname) AS name FROM pg_namespace n"
        b" WHERE n.nspname = current_schema() AND EXISTS ("
        b" SELECT FROM aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a"
        b" WHERE a.grantee = 0 AND a.privilege_type = 'CREATE')"
    ).fetchone()
    return row["name"] if row else None


def machines(conn: db.Connection) -> int:
    """Return how many hosts have had a worker of nodes within the last day."""
    row = _one(
        conn,
        b"SELECT count(DISTINCT host_label) AS n FROM workers"
        b" WHERE queue IN ('cpu', 'gpu') AND last_seen > now() - interval '1 day'",
    )
    return row["n"]


def server(conn: db.Connection) -> Row:
    """version_num, version, standby (it replays another's log), read_only, role."""
    return _one(
        conn,
        b"SELECT current_setting('server_version_num')::int AS version_num,"
        b" current_setting('server_version') AS version, pg_is_in_recovery() AS standby,"
        b" current_setting('default_transaction_read_only') = 'on' AS read_only,"
        b" current_user::text AS role",
    )


def clock(conn: db.Connection) -> Any:
    """The server's clock now, aware."""
    return _one(conn, b"SELECT clock_timestamp() AS now")["now"]


def settings(conn: db.Connection, names: list[str]) -> dict[str, str]:
    """Settings as they are in force for this role and database."""
    rows = conn.execute(
        b"SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", (names,)
    ).fetchall()
    return {row["name"]: row["setting"] for row in rows}


def missing_rights(conn: db.Connection) -> list[str]:
    """What this role may not do with those of our tables that exist: `UPDATE on workers`, ..."""
    rows = conn.execute(
        b"SELECT p.name || ' on ' || t.name AS missing FROM unnest(%(tables)s::text[]) AS t (name),"
        b" unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (name)"
        b" WHERE NOT has_table_privilege(to_regclass(t.name), p.name)"
        b" UNION ALL SELECT 'SELECT on queue_schema_version'"
        b" WHERE NOT has_table_privilege(to_regclass('queue_schema_version'), 'SELECT')",
        {"tables": list(TABLES)},
    ).fetchall()
    closed = closed_sequences(conn, list(TABLES))
    return [row["missing"] for row in rows] + [f"USAGE on {name}" for name in closed]


def closed_sequences(conn: db.Connection, tables: list[str]) -> list[str]:
    """The sequences of those of these tables that exist which this role may not use."""
    rows = conn.execute(
        b"SELECT s.oid::regclass::text AS name FROM pg_class s"
        b" JOIN pg_depend d ON d.objid = s.oid AND d.classid = 'pg_class'::regclass"
        b" AND d.deptype = 'a' AND d.refobjid IN"
        b" (SELECT to_regclass(name) FROM unnest(%s::text[]) AS t (name))"
        b" WHERE CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE')"
        b" ELSE false END",
        (tables,),
    ).fetchall()
    return [row["name"] for row in rows]


def notify(conn: db.Connection, channel: str) -> float:
    """Notify a channel; how full the server's queue of notifications is, 0 to 1."""
    conn.execute("SELECT pg_notify(%s, '')", (channel,))
    return float(_one(conn, b"SELECT pg_notification_queue_usage() AS used")["used"])


def transactions(conn: db.Connection) -> list[Row]:
    """The oldest five transactions of this database but this one: what, age_s, idle_s, hidden.

    `what` names the backend or the prepared transaction; `idle_s` is None unless it is idle inside
    the transaction. Other roles' are seen with the rights of pg_read_all_stats only.
    """
    return conn.execute(
        b"SELECT * FROM (SELECT 'pid ' || pid || coalesce(' of ' || usename, '')"
        b" || coalesce(' (' || nullif(application_name, '') || ')', '') AS what,"
        b" extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s,"
        b" CASE WHEN state LIKE 'idle in transaction%%' THEN"
        b" extract(epoch FROM clock_timestamp() - state_change)::float8 END AS idle_s"
        b" FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        b" AND backend_type = 'client backend' AND xact_start IS NOT NULL"
        b" UNION ALL SELECT 'the prepared transaction ' || gid,"
        b" extract(epoch FROM clock_timestamp() - prepared)::float8, NULL FROM pg_prepared_xacts"
        b" WHERE database = current_database()) t ORDER BY age_s DESC LIMIT 5",
        {},
    ).fetchall()


def connections(conn: db.Connection) -> Row:
    """used (all databases) and allowed (for roles that are no superuser)."""
    return _one(
        conn,
        b"SELECT (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::int AS used,"
        b" current_setting('max_connections')::int"
        b" - current_setting('superuser_reserved_connections')::int AS allowed",
    )


# SQL for the seconds since a time: _SINCE + the time + _NEAREST. An infinite time counts as the
# nearest that the server can subtract.
_SINCE = "extract(epoch FROM now() - greatest(least("
_NEAREST = ", timestamptz '9999-12-31Z'), timestamptz '2000-01-01Z'))::float8"


def outbox(conn: db.Connection) -> Row:
    """lag_s of the oldest event that is due and open (or None) with its run_id and error."""
    row = conn.execute(
        "SELECT " + _SINCE + "greatest(created_at, available_at)" + _NEAREST + " AS lag_s,"
        " run_id, error FROM workflow_dispatch_events WHERE processed_at IS NULL"
        " AND (available_at IS NULL OR available_at <= now()) ORDER BY id LIMIT 1"
    ).fetchone()
    return row or {"lag_s": None, "run_id": None, "error": None}


def waiting_runs(conn: db.Connection) -> Row:
    """The longest wait_s of a run that is due and not started (or None), and its run_id.

    `others`: whether a run that runs now was started within the last minute.
    """
    row = conn.execute(
        "SELECT " + _SINCE + "queued_at" + _NEAREST + " AS wait_s, id AS run_id,"
        " EXISTS (SELECT FROM workflow_runs WHERE status = 'running' AND mode = 'node'"
        " AND started_at BETWEEN now() - interval '60 seconds' AND now()) AS others"
        " FROM workflow_runs WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL"
        " ORDER BY queued_at LIMIT 1"
    ).fetchone()
    return row or {"wait_s": None, "run_id": None, "others": False}


def lapsed(conn: db.Connection) -> Row:
    """How many running jobs have a lapsed lease (n), and since when the oldest (since_s)."""
    return _one(
        conn,
        (
            "SELECT count(*) AS n, max(" + _SINCE + "lease_expires_at" + _NEAREST + ")"
            " AS since_s FROM (SELECT lease_expires_at FROM workflow_node_jobs"
            " WHERE status = 'running' UNION ALL SELECT lease_expires_at FROM ingest_jobs"
            " WHERE status = 'running') r WHERE lease_expires_at < now()"
        ).encode(),
    )


_COUNTED = 10000
_HEADS = b"""
WITH RECURSIVE
  nodes (queue) AS (
    (SELECT queue::text FROM workflow_node_jobs WHERE status = 'queued' AND blocked_reason IS NULL
      ORDER BY workflow_node_jobs.queue LIMIT 1)
    UNION ALL SELECT (SELECT j.queue::text FROM workflow_node_jobs j WHERE j.status = 'queued'
      AND j.blocked_reason IS NULL AND j.queue > n.queue ORDER BY j.queue LIMIT 1)
      FROM nodes n WHERE n.queue IS NOT NULL),
  ingest (queue) AS (
    (SELECT queue FROM ingest_jobs WHERE status = 'queued' AND blocked_reason IS NULL
      ORDER BY queue LIMIT 1)
    UNION ALL SELECT (SELECT j.queue FROM ingest_jobs j WHERE j.status = 'queued'
      AND j.blocked_reason IS NULL AND j.queue > i.queue ORDER BY j.queue LIMIT 1)
      FROM ingest i WHERE i.queue IS NOT NULL),
  heads (queue, n, created_at) AS (
    SELECT q.queue,
      (SELECT count(*) FROM (SELECT FROM workflow_node_jobs j WHERE j.queue = q.queue
        AND j.status = 'queued' AND j.blocked_reason IS NULL LIMIT %(counted)s) c),
      (SELECT j.created_at FROM workflow_node_jobs j WHERE j.queue = q.queue
        AND j.status = 'queued' AND j.blocked_reason IS NULL ORDER BY j.priority, j.seq LIMIT 1)
      FROM nodes q WHERE q.queue IS NOT NULL
    UNION ALL SELECT q.queue,
      (SELECT count(*) FROM (SELECT FROM ingest_jobs j WHERE j.queue = q.queue
        AND j.status = 'queued' AND j.blocked_reason IS NULL LIMIT %(counted)s) c),
      (SELECT j.created_at FROM ingest_jobs j WHERE j.queue = q.queue
        AND j.status = 'queued' AND j.blocked_reason IS NULL ORDER BY j.priority, j.seq LIMIT 1)
      FROM ingest q WHERE q.queue IS NOT NULL)
SELECT h.queue, h.n, extract(epoch FROM now() - greatest(least(h.created_at,
       timestamptz '9999-12-31Z'), timestamptz '2000-01-01Z'))::float8 AS wait_s,
       (SELECT count(*) FROM workers w WHERE w.queue = h.queue
         AND w.state NOT IN ('stopped', 'dead')
         AND w.last_seen > now() - %(stale_s)s * interval '1 second') AS alive
  FROM heads h
 WHERE NOT EXISTS (SELECT FROM workers w WHERE w.queue = h.queue
         AND w.state NOT IN ('stopped', 'dead', 'parked', 'paused', 'draining')
         AND w.last_seen > now() - %(stale_s)s * interval '1 second')
   AND NOT EXISTS (SELECT FROM worker_heartbeats b WHERE b.queue = h.queue
         AND b.last_seen > now() - %(stale_s)s * interval '1 second'
         AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = b.host_label
                            AND w.queue = b.queue))
 ORDER BY h.queue
"""


def unserved(conn: db.Connection, stale_s: float) -> list[Row]:
    """Queues with due jobs that no live worker serves: queue, n (at most 10,000), wait_s, alive.

    `wait_s` is the age of the first in line, `alive` how many workers are there and take no jobs
    (parked, draining, paused). An older engine's worker has a heartbeat only. Reads no more than
    the claim's index.
    """
    return conn.execute(_HEADS, {"stale_s": stale_s, "counted": _COUNTED}).fetchall()


def dead_workers(conn: db.Connection, stale_s: float) -> list[str]:
    """Hosts' queues that are flagged dead, and workers gone silent while they hold jobs."""
    rows = conn.execute(
        b"SELECT host_label || ' ' || queue AS who FROM worker_heartbeats"
        b" WHERE last_flagged_dead_at IS NOT NULL UNION SELECT host_label || ' ' || queue"
        b" FROM workers w WHERE state <> 'stopped'"
        b" AND last_seen < now() - %(stale_s)s * interval '1 second'"
        b" AND (EXISTS (SELECT FROM workflow_node_jobs j WHERE j.worker_id = w.worker_id"
        b" AND j.status = 'running') OR EXISTS (SELECT FROM ingest_jobs j"
        b" WHERE j.worker_id = w.worker_id AND j.status = 'running')) ORDER BY 1",
        {"stale_s": stale_s},
    ).fetchall()
    return [row["who"] for row in rows]


def table_statistics(conn: db.Connection) -> list[Row]:
    """Of each hot table: name, dead, live, updates, hot, inserts, vacuum_off."""
    return conn.execute(
        b"SELECT s.relname::text AS name, s.n_dead_tup AS dead, s.n_live_tup AS live,"
        b" s.n_tup_upd AS updates, s.n_tup_hot_upd AS hot, s.n_tup_ins AS inserts,"
        b" coalesce('autovacuum_enabled=false' = ANY (c.reloptions)"
        b" OR 'autovacuum_enabled=off' = ANY (c.reloptions), false) AS vacuum_off"
        b" FROM unnest(%s::text[]) AS t (name)"
        b" JOIN pg_stat_all_tables s ON s.relid = to_regclass(t.name)"
        b" JOIN pg_class c ON c.oid = s.relid ORDER BY s.relname",
        ([*RENEWED, "workflow_runs", "workflow_dispatch_events", "worker_heartbeats"],),
    ).fetchall()


def indexes_on_renewed(conn: db.Connection) -> list[str]:
    """Indexes over a column that renewals write, which keep them from being HOT."""
    found: list[str] = []
    for table, columns in RENEWED.items():
        rows = conn.execute(
            b"SELECT DISTINCT i.indexrelid::regclass::text AS name FROM pg_index i"
            b" JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid"
            b" AND d.refobjid = i.indrelid JOIN pg_attribute a ON a.attrelid = i.indrelid"
            b" AND a.attnum = d.refobjsubid WHERE i.indrelid = to_regclass(%s)"
            b" AND a.attname = ANY (%s) ORDER BY 1",
            (table, columns),
        ).fetchall()
        found += [row["name"] for row in rows]
    return found
