"""Workers as processes (`workers`) and as the face of a host and queue (`worker_heartbeats`)."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.types import Row

_BEAT = (
    "INSERT INTO worker_heartbeats AS h"
    " (host_label, queue, concurrency, current_model, known_models)"
    " VALUES (%(host_label)s, %(queue)s, %(concurrency)s, %(current_model)s,"
    " coalesce(%(known_models)s::text[], '{}'))"
    " ON CONFLICT (host_label, queue) DO UPDATE SET concurrency = EXCLUDED.concurrency,"
    " current_model = CASE WHEN %(update_current_model)s::boolean THEN EXCLUDED.current_model"
    " ELSE h.current_model END, known_models = coalesce(%(known_models)s::text[], h.known_models),"
    " last_seen = now(), last_flagged_dead_at = NULL"
)
_OFF = "queue_workflows_off_policy(%(host_label)s, %(queue)s)"
_STATE = (
    "CASE WHEN %(obey)s AND " + _OFF + " IS NOT NULL THEN CASE"
    " WHEN %(job_ids)s::text[] <> '{}' THEN 'draining'"
    " WHEN " + _OFF + " = 'pause' THEN 'paused' ELSE 'parked' END ELSE %(state)s END"
)
_WORKER = (
    "INSERT INTO workers AS w (worker_id, host_label, queue, pid, state, job_ids, detail,"
    " current_model, model_since, known_models, vram_total_mb)"
    " VALUES (%(worker_id)s, %(host_label)s, %(queue)s, %(pid)s, " + _STATE + ","
    " %(job_ids)s::text[], %(detail)s::jsonb, %(current_model)s, now(),"
    " nullif(%(known_models)s::text[], '{}'), %(vram_total_mb)s::integer)"
    " ON CONFLICT (worker_id) DO UPDATE SET state = EXCLUDED.state,"
    " job_ids = EXCLUDED.job_ids, detail = EXCLUDED.detail, last_seen = now(),"
    " model_since = CASE WHEN w.current_model IS DISTINCT FROM EXCLUDED.current_model"
    " THEN now() ELSE w.model_since END, current_model = EXCLUDED.current_model,"
    " known_models = EXCLUDED.known_models, vram_total_mb = EXCLUDED.vram_total_mb"
)
_REPORT = (
    "WITH w AS (" + _WORKER + ")"
    " INSERT INTO worker_heartbeats AS h"
    " (host_label, queue, concurrency, current_model, known_models, vram_total_mb)"
    " SELECT %(host_label)s, %(queue)s, %(concurrency)s, %(current_model)s,"
    " %(known_models)s::text[], %(vram_total_mb)s::integer"
    " WHERE NOT %(obey)s OR %(job_ids)s::text[] <> '{}' OR " + _OFF + " IS NULL"
    " ON CONFLICT (host_label, queue) DO UPDATE SET concurrency = EXCLUDED.concurrency,"
    " current_model = EXCLUDED.current_model, known_models = EXCLUDED.known_models,"
    " vram_total_mb = EXCLUDED.vram_total_mb, last_seen = now(), last_flagged_dead_at = NULL"
)


def beat(conn: db.Connection, values: dict[str, Any]) -> None:
    """Say that this host serves this queue; a fresh beat clears the dead flag."""
    conn.execute(_BEAT, values)


def report(conn: db.Connection, values: dict[str, Any]) -> None:
    """A worker process's own row and its host's heartbeat, in one statement.

    With an OFF row it obeys, a busy worker is `draining`; an idle one is `paused` or `parked`, and
    its host's heartbeat is left to age.
    """
    conn.execute(_REPORT, values, prepare=True)


def leave(conn: db.Connection, worker_id: str) -> None:
    """The worker ended in good order."""
    conn.execute(
        "UPDATE workers SET state = 'stopped', job_ids = '{}', last_seen = now()"
        " WHERE worker_id = %s",
        (worker_id,),
    )


def last_detail(conn: db.Connection, prefix: str) -> Row:
    """What the worker of a process (`worker_id` starts with `prefix`) said of itself last."""
    row = conn.execute(
        "SELECT detail FROM workers WHERE starts_with(worker_id, %s)"
        " ORDER BY last_seen DESC LIMIT 1",
        (prefix,),
    ).fetchone()
    detail: Any = row["detail"] if row else None
    return detail if isinstance(detail, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def bury(conn: db.Connection, prefix: str, detail: str, *, orderly: bool = False) -> None:
    """Mark the workers of a dead process (`worker_id` starts with `prefix`) with how it ended."""
    conn.execute(
        "UPDATE workers SET state = CASE WHEN %s THEN 'stopped' ELSE 'dead' END, job_ids = '{}',"
        " detail = detail || %s::jsonb"
        " WHERE starts_with(worker_id, %s) AND state NOT IN ('stopped', 'dead')",
        (orderly, detail, prefix),
    )


def clear_model(
    conn: db.Connection, host_label: str, queue: str, *, mark_stale: bool
) -> Row | None:
    """Clear the loaded model of a heartbeat; return the changed row, or None.

    `mark_stale` also sets `last_seen` back by an hour.
    """
    return conn.execute(
        "UPDATE worker_heartbeats SET current_model = NULL, last_seen = CASE WHEN %s"
        " THEN now() - interval '1 hour' ELSE last_seen END WHERE host_label = %s AND queue = %s"
        " RETURNING *",
        (mark_stale, host_label, queue),
    ).fetchone()


_LOST = (
    "UPDATE worker_heartbeats h SET current_model = NULL, last_seen = CASE WHEN EXISTS ("
    "SELECT FROM workers w WHERE w.host_label = h.host_label AND w.queue = h.queue"
    " AND NOT starts_with(w.worker_id, %(gone)s) AND w.state NOT IN ('stopped', 'dead')"
    " AND w.last_seen > now() - %(live)s * interval '1 second')"
    " THEN h.last_seen ELSE now() - interval '1 hour' END"
    " WHERE h.host_label = %(host)s AND h.queue = %(queue)s"
)


def lost(conn: db.Connection, host_label: str, queue: str, gone: str, live_s: float) -> None:
    """A worker (its id starts with `gone`) leaves: forget its host's model, age the heartbeat.

    Not while another of that host and queue lives, seen within `live_s`: it would count as dead.
    """
    values = {"host": host_label, "queue": queue, "gone": gone, "live": live_s}
    conn.execute(_LOST, values)


def flag_stale(conn: db.Connection, stale_after_s: float) -> list[Row]:
    """Flag, once each, hosts with a stale heartbeat that own running jobs; return the flagged.

    Each row has `running_jobs`, the number of jobs that run under its label and queue.
    """
    return conn.execute(
        "WITH stale AS MATERIALIZED (SELECT w.host_label, w.queue,"
        " (SELECT count(*) FROM workflow_node_jobs j WHERE j.status = 'running'"
        " AND j.claimed_by = w.host_label AND j.queue = w.queue)"
        " + (SELECT count(*) FROM ingest_jobs i WHERE i.status = 'running'"
        " AND i.claimed_by = w.host_label AND i.queue = w.queue) AS running_jobs"
        " FROM worker_heartbeats w WHERE w.last_seen < now() - %(after)s * interval '1 second'"
        " AND w.last_flagged_dead_at IS NULL)"
        " UPDATE worker_heartbeats h SET last_flagged_dead_at = now() FROM stale s"
        " WHERE s.running_jobs > 0 AND h.host_label = s.host_label AND h.queue = s.queue"
        " AND h.last_seen < now() - %(after)s * interval '1 second'"
        " AND h.last_flagged_dead_at IS NULL"
        " RETURNING h.*, s.running_jobs",
        {"after": stale_after_s},
    ).fetchall()


_SWITCHED_OFF = (
    "SELECT c.host_label, c.queue, c.stop_policy, c.requested_by, c.reason, c.until_at,"
    " c.updated_at AS switched_at, extract(epoch FROM c.until_at)::float8"
    " - extract(epoch FROM now())::float8 AS until_s"
    " FROM worker_controls c WHERE c.desired_state = 'off'"
    " AND (c.until_at IS NULL OR c.until_at > now())"
)
# Of the two rows that may say OFF the one that counts: see queue_workflows_off_policy().
_LISTING = (
    "SELECT w.worker_id, w.host_label, w.queue, w.pid, CASE WHEN w.state <> 'stopped'"
    " AND w.last_seen < now() - %s * interval '1 second' THEN 'dead' ELSE w.state END AS state,"
    " w.job_ids, w.detail, w.started_at, w.last_seen,"
    " extract(epoch FROM now())::float8"
    " - extract(epoch FROM w.last_seen)::float8 AS age_s,"
    " CASE WHEN c.queue IS NULL THEN 'on' ELSE 'off' END AS desired_state, c.stop_policy,"
    " c.requested_by, c.reason, c.until_at, c.until_s, c.switched_at, h.current_model,"
    " h.last_flagged_dead_at"
    " FROM workers w LEFT JOIN LATERAL (" + _SWITCHED_OFF + " AND c.host_label = w.host_label"
    " AND c.queue IN (w.queue, 'all') ORDER BY c.stop_policy <> 'hard', c.queue = 'all' LIMIT 1"
    ") c ON true LEFT JOIN worker_heartbeats h"
    " ON h.host_label = w.host_label AND h.queue = w.queue"
    " WHERE w.last_seen > now() - interval '1 day' AND w.state NOT IN ('stopped')"
    " ORDER BY w.host_label, w.queue, w.started_at"
)


def listing(conn: db.Connection, stale_after_s: float) -> list[Row]:
    """Worker processes seen within a day, each with age, model and the OFF row that it is under.

    `dead` are those gone stale. `desired_state` is what is in force now: an OFF row counts until
    its `until_at`, one of queue `all` for every queue. `until_s`: seconds until it ends, or None.
    """
    return conn.execute(_LISTING, (stale_after_s,)).fetchall()


def switched_off(conn: db.Connection) -> list[Row]:
    """The OFF rows in force, whether or not they have a worker; queue `all` is one of its own."""
    return conn.execute(_SWITCHED_OFF + " ORDER BY c.host_label, c.queue").fetchall()


def flagged(conn: db.Connection, host_label: str) -> list[Row]:
    """A host's queues that are flagged dead and not OFF: queue, flagged_at, age_s of the beat."""
    return conn.execute(
        "SELECT h.queue, h.last_flagged_dead_at AS flagged_at,"
        " extract(epoch FROM now())::float8"
        " - extract(epoch FROM h.last_seen)::float8 AS age_s FROM worker_heartbeats h"
        " WHERE h.host_label = %s AND h.last_flagged_dead_at IS NOT NULL"
        " AND queue_workflows_off_policy(h.host_label, h.queue) IS NULL ORDER BY h.queue",
        (host_label,),
    ).fetchall()


def prune(conn: db.Connection) -> int:
    """Delete worker rows that ended or were last seen over a day ago; how many."""
    return conn.execute("DELETE FROM workers WHERE last_seen < now() - interval '1 day'").rowcount
