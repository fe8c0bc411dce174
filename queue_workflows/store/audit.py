"""The laws as queries: each returns what breaks it, so that an empty answer is the proof."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import config, db
from queue_workflows.engine import job_tables

STATEMENT_TIMEOUT_S = 60.0
"""For one law: three times what a million jobs took, and no longer does its snapshot hold vacuum
back."""
COMMIT_S = 15.0
"""How long what is acknowledged may still meet a transaction under way: three times the 5 s that
an engine transaction may take."""
SWEEP_S = 120.0
"""Two rounds of the orchestrator's slowest sweep, that of jobs whose run is over."""


class Offender(NamedTuple):
    """What breaks a law: the id of a job, run or schedule entry, and how."""

    id: str
    text: str


class Law(NamedTuple):
    """One law; without a statement it is not checkable here, for the reason in `elsewhere`."""

    number: int
    name: str
    sentence: str
    statement: bytes | None
    params: tuple[str, ...] = ()
    """What the statement takes, out of `parameters()`."""
    elsewhere: str = ""


# `touched`: the jobs that left an event in the window, and those that wait or run. `runs` likewise.
# UNION, as a condition with OR would keep the planner from looking jobs up by id.
_TOUCHED = sql.SQL(
    "(SELECT id FROM {jobs} WHERE %(whole)s::boolean"
    " UNION SELECT job_id FROM {events} WHERE NOT %(whole)s::boolean AND job_id IS NOT NULL"
    " AND created_at >= %(since)s::timestamptz"
    " UNION SELECT id FROM {jobs} WHERE status = 'running'"
    " UNION SELECT id FROM {jobs} WHERE status = 'queued' AND blocked_reason IS NULL"
    " UNION SELECT id FROM {jobs} WHERE status = 'queued' AND blocked_reason IS NOT NULL)"
)
_RUNS = sql.SQL(
    "(SELECT id FROM workflow_runs WHERE %(whole)s::boolean"
    " UNION SELECT run_id FROM workflow_node_events WHERE NOT %(whole)s::boolean"
    " AND created_at >= %(since)s::timestamptz"
    " UNION SELECT run_id FROM workflow_node_jobs WHERE status = 'running'"
    " UNION SELECT run_id FROM workflow_node_jobs"
    " WHERE status = 'queued' AND blocked_reason IS NULL"
    " UNION SELECT run_id FROM workflow_node_jobs"
    " WHERE status = 'queued' AND blocked_reason IS NOT NULL)"
)
# No index knows the age of an outbox row, but ids rise with it: walk back to the first that is too
# old. The hour more is for rows of long transactions, whose `created_at` is that of their start.
_SENT = sql.SQL(
    "(SELECT * FROM workflow_dispatch_events WHERE id > coalesce("
    "(SELECT id FROM workflow_dispatch_events"
    " WHERE created_at < %(since)s::timestamptz - interval '1 hour' ORDER BY id DESC LIMIT 1), 0))"
)


def _parts(table: job_tables.JobTable) -> dict[str, sql.Composable]:
    names = {"jobs": sql.Identifier(table.name), "events": sql.Identifier(table.events)}
    same = (
        "x.run_id = e.run_id AND x.node_id = e.node_id AND x.job_id = e.job_id"
        if table.in_run
        else "x.job_id = e.job_id"
    )
    return {
        **names,
        "touched": _TOUCHED.format(**names),
        "runs": _RUNS,
        "sent": _SENT,
        "same": sql.SQL(same),
    }


def _nodes(query: sql.SQL) -> sql.Composed:
    return query.format(**_parts(job_tables.NODE_JOBS))


def _ingest(query: sql.SQL) -> sql.Composed:
    return query.format(**_parts(job_tables.INGEST_JOBS))


def _both(query: sql.SQL) -> sql.Composed:
    return sql.SQL(" UNION ALL ").join([_nodes(query), _ingest(query)])


def _statement(*queries: sql.Composed) -> bytes:
    # Materialized: the plan is made for all rows, as mostly there are none and a plan for the first
    # few would be slow to say so. It still ends at the limit.
    return (
        sql.SQL(
            "WITH found (id, text) AS MATERIALIZED ({}) SELECT id, text FROM found LIMIT %(limit)s"
        )
        .format(sql.SQL(" UNION ALL ").join(queries))
        .as_bytes(None)
    )


# A reopened job has a history of several lives, which its events do not tell apart. What a host
# records by `record_node_event` carries no claim.
_TERMINAL_STAYS = _statement(
    _both(
        sql.SQL(
            "SELECT e.job_id, e.event_type || ' after ' || x.event_type"
            " FROM {events} e JOIN {events} x ON {same} AND x.id < e.id"
            " JOIN {jobs} j ON j.id = e.job_id AND j.generation = 0"
            " WHERE e.created_at >= %(since)s::timestamptz AND x.claim_no IS NOT NULL"
            " AND x.event_type IN ('completed', 'failed', 'cancelled')"
            " AND (e.event_type = 'claimed' OR e.claim_no IS NOT NULL AND e.event_type IN"
            " ('completed', 'failed', 'cancelled', 'requeued', 'reclaimed', 'retried', 'parked'))"
        )
    )
)
_ONE_FINALISATION = _statement(
    _nodes(
        sql.SQL(
            "SELECT job_id, count(*) || ' finalisations in the outbox' FROM {sent} d"
            " WHERE kind IN ('completed', 'failed') AND job_id IS NOT NULL"
            " GROUP BY job_id, generation HAVING count(*) > 1"
            " UNION ALL SELECT j.id, 'finalised by claim ' || d.claim_no || ' of ' || j.claim_no"
            " FROM {sent} d JOIN {jobs} j ON j.id = d.job_id AND j.generation = d.generation"
            " WHERE d.kind IN ('completed', 'failed') AND d.claim_no <> j.claim_no"
        )
    ),
    _both(
        sql.SQL(
            "SELECT j.id, 'finalised ' || count(*) || ' times, last by claim '"
            " || max(e.claim_no) || ' of ' || j.claim_no"
            " FROM {events} e JOIN {jobs} j ON j.id = e.job_id AND j.generation = 0"
            " WHERE e.created_at >= %(since)s::timestamptz AND e.claim_no IS NOT NULL"
            " AND e.event_type IN ('completed', 'failed')"
            " GROUP BY j.id, j.claim_no HAVING count(*) > 1 OR max(e.claim_no) <> j.claim_no"
        )
    ),
)
# A claim by a plain UPDATE leaves no event, but whoever takes it back does, in nobody's name.
_CLAIMS_COUNTED = _statement(
    _both(
        sql.SQL(
            "SELECT e.job_id, 'claim ' || e.claim_no || ' after ' || e.before FROM"
            " (SELECT c.*, lag(claim_no) OVER (PARTITION BY job_id ORDER BY id) AS before"
            " FROM {events} c WHERE event_type = 'claimed' AND claim_no IS NOT NULL"
            " AND created_at >= %(since)s::timestamptz) e WHERE e.claim_no <> e.before + 1"
            " AND (SELECT count(DISTINCT x.claim_no) FROM {events} x WHERE {same}"
            " AND x.worker_id IS NULL AND x.claim_no > e.before AND x.claim_no < e.claim_no)"
            " <> e.claim_no - e.before - 1"
            " UNION ALL SELECT j.id, 'claim ' || j.claim_no || ', its last event '"
            " || max(e.claim_no) FROM {events} e JOIN {jobs} j ON j.id = e.job_id"
            " WHERE e.event_type = 'claimed' AND e.created_at >= %(since)s::timestamptz"
            " GROUP BY j.id, j.claim_no, j.status, j.worker_id HAVING max(e.claim_no) > j.claim_no"
            " OR max(e.claim_no) < j.claim_no AND j.status = 'running'"
            " AND NOT starts_with(j.worker_id, 'legacy:')"
        )
    )
)
_OWN_CLAIM_ONLY = _statement(
    _both(
        sql.SQL(
            "SELECT e.job_id, e.event_type || ' by ' || e.worker_id || ' under claim '"
            " || x.claim_no || ' of ' || x.worker_id FROM {events} e JOIN {events} x ON {same}"
            " AND x.claim_no = e.claim_no AND x.event_type = 'claimed'"
            " WHERE e.created_at >= %(since)s::timestamptz AND e.worker_id <> x.worker_id"
        )
    )
)
_RUNNING_IS_HELD = _statement(
    _both(
        sql.SQL(
            "SELECT j.id, j.status || ', worker ' || coalesce(j.worker_id, '-') || ', claim '"
            " || j.claim_no || ', lease ' || coalesce(j.lease_expires_at::text, '-')"
            " FROM {touched} t JOIN {jobs} j ON j.id = t.id WHERE j.status = 'running'"
            " AND (j.worker_id IS NULL OR j.lease_expires_at IS NULL OR j.claim_no < 1)"
            " OR j.status <> 'running'"
            " AND (j.worker_id IS NOT NULL OR j.lease_expires_at IS NOT NULL)"
        )
    )
)
# A dependency of a later generation was reopened beside a job that ran before. OFFSET 0 has each
# run looked at by itself: the planner guesses a hundred nodes, and as many dependencies of each.
_DEPENDENCIES_FIRST = _statement(
    _nodes(
        sql.SQL(
            "SELECT x.id, x.node_id || ' of ' || t.id || ' is ' || x.status || ' before ' || x.dep"
            " FROM {runs} t CROSS JOIN LATERAL (SELECT j.id, j.node_id, j.status, dep.id AS dep"
            # A definition may be forged: what is no array has no elements.
            " FROM workflow_runs r, jsonb_array_elements(CASE jsonb_typeof(r.definition -> 'nodes')"
            " WHEN 'array' THEN r.definition -> 'nodes' END) AS n (node),"
            " jsonb_array_elements_text(CASE jsonb_typeof(n.node -> 'deps') WHEN 'array'"
            " THEN n.node -> 'deps' END) AS dep (id), {jobs} j"
            " WHERE r.id = t.id AND j.run_id = t.id AND j.node_id = n.node ->> 'id'"
            " AND j.status IN ('queued', 'running', 'awaiting_input', 'completed', 'failed')"
            " AND NOT EXISTS (SELECT FROM {jobs} d WHERE d.run_id = t.id AND d.node_id = dep.id"
            " AND (d.status IN ('completed', 'skipped') OR d.generation > j.generation))"
            " OFFSET 0) x UNION ALL SELECT x.id, x.node_id || ' of ' || t.id || ' has ' || x.n"
            " || ' jobs' FROM {runs} t CROSS JOIN LATERAL (SELECT max(j.id) AS id, j.node_id,"
            " count(*) AS n FROM {jobs} j WHERE j.run_id = t.id GROUP BY j.node_id"
            " HAVING count(*) > 1 OFFSET 0) x"
        )
    )
)
# `created_at` and `finished_at` are their transactions' now(): equal in the same commit.
_OUTBOX_AGREES = _statement(
    _nodes(
        sql.SQL(
            "SELECT j.id, j.status || ' with ' || count(d.id) || ' such outbox rows'"
            " FROM {touched} t JOIN {jobs} j ON j.id = t.id LEFT JOIN {sent} d"
            " ON d.run_id = j.run_id AND d.node_id = j.node_id AND d.kind = j.status"
            " AND (d.job_id IS NULL OR d.generation = j.generation)"
            " WHERE j.status IN ('completed', 'failed')"
            " AND j.finished_at >= greatest(%(since)s::timestamptz, %(kept)s::timestamptz)"
            " GROUP BY j.id, j.status HAVING count(d.id) <> 1"
            " UNION ALL SELECT j.id, j.status || ' with an outbox row ' || d.kind || CASE"
            " WHEN j.status = d.kind THEN ' of another commit' ELSE '' END"
            " FROM {sent} d JOIN {jobs} j ON j.id = d.job_id AND j.generation = d.generation"
            " WHERE d.kind IN ('completed', 'failed')"
            " AND (j.status <> d.kind OR j.finished_at <> d.created_at)"
        )
    )
)
_RUN_AGREES = _statement(
    _nodes(
        sql.SQL(
            "SELECT r.id, r.status || ' with node ' || j.node_id || ' ' || j.status"
            " FROM {runs} t JOIN workflow_runs r ON r.id = t.id JOIN {jobs} j ON j.run_id = r.id"
            " WHERE r.mode = 'node' AND (r.status = 'completed'"
            " AND j.status NOT IN ('completed', 'skipped')"
            " OR r.status IN ('failed', 'cancelled') AND j.status IN ('queued', 'awaiting_input')"
            " AND greatest(r.finished_at, j.created_at)"
            " <= now() - %(sweep_s)s * interval '1 second')"
            " UNION ALL SELECT r.id, 'completed with nodes missing'"
            " FROM {runs} t JOIN workflow_runs r ON r.id = t.id WHERE r.mode = 'node'"
            " AND r.status = 'completed' AND r.definition IS NOT NULL"
            " AND (SELECT count(*) FROM {jobs} j WHERE j.run_id = r.id)"
            " < CASE jsonb_typeof(r.definition -> 'nodes') WHEN 'array'"
            " THEN jsonb_array_length(r.definition -> 'nodes') END"
        )
    )
)
_CANCEL_HOLDS = _statement(
    _nodes(
        sql.SQL(
            "SELECT e.job_id, 'claimed at ' || e.created_at::text"
            " || ' after its run ' || r.id || ' was cancelled at ' || r.finished_at::text"
            " FROM {events} e JOIN workflow_runs r ON r.id = e.run_id"
            " WHERE e.event_type = 'claimed' AND e.created_at >= %(since)s::timestamptz"
            " AND r.mode = 'node' AND r.status = 'cancelled'"
            " AND e.created_at > r.finished_at + %(commit_s)s * interval '1 second'"
        )
    )
)
_ONE_ID_A_KEY = _statement(
    _ingest(
        sql.SQL(
            "SELECT max(j.id), count(*) || ' jobs have the key ' || j.idempotency_key"
            " FROM {touched} t JOIN {jobs} j ON j.id = t.id"
            " WHERE j.idempotency_key IS NOT NULL"
            " AND (NOT j.idempotency_released OR j.status IN ('queued', 'running'))"
            " GROUP BY j.idempotency_key HAVING count(*) > 1"
        )
    )
)
_ONE_FIRE = _statement(
    sql.Composed(
        [
            sql.SQL(
                "SELECT name, count(*) || ' fires at ' || fire_at FROM schedule_fires"
                " GROUP BY name, fire_at HAVING count(*) > 1"
                " UNION ALL SELECT min(name), count(*) || ' fires made the one job ' || job_id"
                " FROM schedule_fires WHERE job_id IS NOT NULL GROUP BY job_id HAVING count(*) > 1"
            )
        ]
    )
)
_BOUNDED = _statement(
    _both(
        sql.SQL(
            "SELECT j.id, j.status || ' after ' || j.attempts || ' attempts (of '"
            " || j.max_attempts || ') and ' || j.crash_count || ' crashes'"
            " FROM {touched} t JOIN {jobs} j ON j.id = t.id"
            " WHERE j.attempts > greatest(j.max_attempts, 1)"
            " OR j.crash_count > %(max_crashes)s::integer"
            " OR j.status IN ('queued', 'running') AND (j.attempts >= greatest(j.max_attempts, 1)"
            " OR j.crash_count >= %(max_crashes)s::integer)"
        )
    )
)
_OFF_HOLDS = _statement(
    _both(
        sql.SQL(
            "SELECT e.job_id, 'claimed on ' || e.host_label || ' ' || e.queue || ' at '"
            " || e.created_at::text || ', OFF since ' || c.updated_at::text"
            " FROM worker_controls c JOIN {events} e ON e.host_label = c.host_label"
            " AND c.queue IN (e.queue, 'all') AND e.event_type = 'claimed'"
            " AND e.created_at >= %(since)s::timestamptz"
            " AND e.created_at > c.updated_at + %(commit_s)s * interval '1 second'"
            " AND (c.until_at IS NULL OR e.created_at < c.until_at)"
            " WHERE c.desired_state = 'off'"
        )
    )
)
# Nothing is left that could ever move such a run: no node that waits or runs, no event, no answer.
_LIVENESS = _statement(
    _nodes(
        sql.SQL(
            "SELECT r.id, 'running, but nothing of it is queued, running, waiting for input or"
            " to be dispatched' FROM workflow_runs r WHERE r.mode = 'node'"
            " AND r.status = 'running' AND r.definition IS NOT NULL"
            " AND greatest(r.started_at, r.updated_at)"
            " <= now() - %(sweep_s)s * interval '1 second'"
            " AND NOT EXISTS (SELECT FROM {jobs} j WHERE j.run_id = r.id"
            " AND (j.status IN ('queued', 'running', 'awaiting_input')"
            " OR j.finished_at > now() - %(sweep_s)s * interval '1 second'))"
            " AND NOT EXISTS (SELECT FROM workflow_dispatch_events d WHERE d.run_id = r.id"
            " AND d.processed_at IS NULL)"
            " AND NOT EXISTS (SELECT FROM workflow_input_submissions s WHERE s.run_id = r.id"
            " AND s.status IN ('pending', 'processing'))"
        )
    )
)
_WINDOW = ("since", "whole")

LAWS = (
    Law(1, "terminal stays", "A terminal row never changes status within its generation.",
        _TERMINAL_STAYS, ("since",)),
    Law(2, "one finalisation", "One finalisation per job, by its highest claim.",
        _ONE_FINALISATION, ("since",)),
    Law(3, "claims counted", "claim_no rises by one per claim.", _CLAIMS_COUNTED, ("since",)),
    Law(4, "own claim only", "No accepted write carries another claim.",
        _OWN_CLAIM_ONLY, ("since",)),
    Law(5, "running is held", "Running if and only if claim, lease and worker are all set.",
        _RUNNING_IS_HELD, _WINDOW),
    Law(6, "dependencies first",
        "A node is queued only when every dependency is completed or skipped, once per run.",
        _DEPENDENCIES_FIRST, _WINDOW),
    Law(7, "outbox agrees",
        "A completed or failed node has exactly one outbox event of that kind, from its commit.",
        _OUTBOX_AGREES, (*_WINDOW, "kept")),
    Law(8, "run agrees",
        "A completed run has only completed or skipped nodes; no node waits under a finished run.",
        _RUN_AGREES, (*_WINDOW, "sweep_s")),
    Law(9, "cancel holds", "After a cancel is acknowledged, nothing of the run is claimed.",
        _CANCEL_HOLDS, ("since", "commit_s")),
    Law(10, "one id a key", "The same idempotency key gives the same job.",
        _ONE_ID_A_KEY, _WINDOW),
    Law(11, "one fire", "One fire per schedule entry and instant.", _ONE_FIRE),
    Law(12, "bounded", "Attempts and crashes are bounded.", _BOUNDED, (*_WINDOW, "max_crashes")),
    Law(13, "off holds", "A worker that is OFF claims nothing.",
        _OFF_HOLDS, ("since", "commit_s")),
    Law(14, "short transactions",
        "No engine transaction is open over 5 s, and none spans host code.", None,
        elsewhere="the database cannot tell a host's transactions from the engine's; doctor shows "
        "the oldest one"),
    Law(15, "liveness", "A running run has a node, an event or an answer that will move it.",
        _LIVENESS, ("sweep_s",)),
)  # fmt: skip
"""That every acknowledged submit exists (law 10), and that all ends in time once faults stop (law
15), needs a journal kept outside the database."""


def parameters(
    conn: db.Connection,
    *,
    since_s: float | None,
    limit: int | None,
    commit_s: float = COMMIT_S,
    sweep_s: float = SWEEP_S,
) -> dict[str, Any]:
    """What the statements take, for the last `since_s` seconds; None: all that is retained.

    `limit`: most offenders per law. `since` is text, as it may be `-infinity`.
    """
    row = conn.execute(
        "SELECT coalesce(now() - %s::float8 * interval '1 second', '-infinity')::text AS since,"
        " (now() - %s * interval '1 day')::text AS kept",
        (since_s, config.NODE_EVENT_RETENTION_DAYS.read()),
    ).fetchone()
    assert row is not None
    return row | {
        "whole": since_s is None,
        "commit_s": commit_s,
        "sweep_s": sweep_s,
        "max_crashes": config.MAX_CRASHES.read(),
        "limit": limit,
    }


def offenders(conn: db.Connection, law: Law, values: dict[str, Any]) -> list[Offender]:
    """What breaks a law that has a statement, seen in one snapshot of the database."""
    assert law.statement is not None
    given = {name: values[name] for name in (*law.params, "limit")}
    rows = conn.execute(law.statement, given).fetchall()
    return [Offender(row["id"] or "-", row["text"] or "") for row in rows]


def check(conn: db.Connection, law: Law, values: dict[str, Any]) -> list[Offender] | str:
    """`offenders` in a read-only transaction of its own; why not, if it could not be finished.

    It is held to STATEMENT_TIMEOUT_S and one core. Raises when the connection is lost.
    """
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            conn.execute(
                "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true),"
                " set_config('max_parallel_workers_per_gather', '0', true)",
                (str(int(STATEMENT_TIMEOUT_S * 1000)),),
            )
            return offenders(conn, law, values)
    except psycopg.errors.QueryCanceled:
        return f"not finished within {STATEMENT_TIMEOUT_S:g} s"
    except psycopg.Error as error:
        if conn.closed or conn.broken:
            raise
        return error.diag.message_primary or str(error)
