"""The laws 1 to 10 as queries: each gives what breaks it, so that an empty answer is the proof."""

from __future__ import annotations

from queue_workflows import db

_NODE = "workflow_node_events", "workflow_node_jobs"
_INGEST = "ingest_job_events", "ingest_jobs"


def _both(query: str) -> str:
    halves = [query.format(events=events, jobs=jobs) for events, jobs in (_NODE, _INGEST)]
    return " UNION ALL ".join(halves)


# A reopened job has a history of several lives; its events do not tell them apart.
_LAW_1 = _both(
    "SELECT later.job_id || ': ' || later.event_type || ' after ' || ended.event_type"
    " FROM {events} ended JOIN {jobs} j ON j.id = ended.job_id AND j.generation = 0"
    " JOIN {events} later ON later.job_id = ended.job_id AND later.id > ended.id"
    " WHERE ended.event_type IN ('completed', 'failed', 'cancelled') AND later.event_type IN ("
    "'claimed', 'completed', 'failed', 'cancelled', 'requeued', 'reclaimed', 'retried', 'parked')"
)
_LAW_2 = (
    "SELECT job_id || ': ' || count(*) || ' finalisations' FROM workflow_dispatch_events"
    " WHERE kind IN ('completed', 'failed') AND job_id IS NOT NULL"
    " GROUP BY job_id, generation HAVING count(*) > 1"
    " UNION ALL SELECT j.id || ': finalised by claim ' || e.claim_no || ' of ' || j.claim_no"
    " FROM workflow_dispatch_events e JOIN workflow_node_jobs j ON j.id = e.job_id"
    " AND j.generation = e.generation WHERE e.kind IN ('completed', 'failed')"
    " AND e.claim_no <> j.claim_no UNION ALL "
    + _both(
        "SELECT j.id || ': finalised ' || count(*) || ' times, last by claim ' || max(e.claim_no)"
        " FROM {jobs} j JOIN {events} e ON e.job_id = j.id AND e.claim_no IS NOT NULL"
        " AND e.event_type IN ('completed', 'failed') WHERE j.generation = 0"
        " GROUP BY j.id, j.claim_no HAVING count(*) > 1 OR max(e.claim_no) <> j.claim_no"
    )
)
_LAW_3 = _both(
    "SELECT job_id || ': claim ' || claim_no || ' after ' || before FROM (SELECT job_id, claim_no,"
    " lag(claim_no) OVER (PARTITION BY job_id ORDER BY id) AS before FROM {events}"
    " WHERE event_type = 'claimed' AND claim_no IS NOT NULL) c WHERE claim_no <> before + 1"
    " UNION ALL SELECT j.id || ': claim ' || j.claim_no || ', its last event ' || max(e.claim_no)"
    " FROM {jobs} j JOIN {events} e ON e.job_id = j.id AND e.event_type = 'claimed'"
    " WHERE NOT starts_with(coalesce(j.worker_id, ''), 'legacy:') GROUP BY j.id, j.claim_no"
    " HAVING max(e.claim_no) <> j.claim_no"
)
_LAW_4 = _both(
    "SELECT e.job_id || ': ' || e.event_type || ' by ' || e.worker_id || ' under claim '"
    " || c.claim_no || ' of ' || c.worker_id FROM {events} e JOIN {events} c"
    " ON c.job_id = e.job_id AND c.claim_no = e.claim_no AND c.event_type = 'claimed'"
    " WHERE e.worker_id IS NOT NULL AND e.worker_id <> c.worker_id"
)
_LAW_5 = _both(
    "SELECT id || ': ' || status || ', worker ' || coalesce(worker_id, '-') || ', claim '"
    " || claim_no || ', lease ' || coalesce(lease_expires_at::text, '-') FROM {jobs}"
    " WHERE (status = 'running'"
    " AND (worker_id IS NULL OR lease_expires_at IS NULL OR claim_no < 1))"
    " OR (status <> 'running' AND (worker_id IS NOT NULL OR lease_expires_at IS NOT NULL))"
)
_LAW_6 = (
    "SELECT j.run_id || ' ' || j.node_id || ': ' || j.status || ' before ' || dep.id"
    " FROM workflow_runs r, jsonb_array_elements(r.definition -> 'nodes') AS n (node),"
    " jsonb_array_elements_text(n.node -> 'deps') AS dep (id), workflow_node_jobs j"
    " WHERE j.run_id = r.id AND j.node_id = n.node ->> 'id'"
    " AND j.status IN ('queued', 'running', 'awaiting_input', 'completed', 'failed')"
    " AND NOT EXISTS (SELECT FROM workflow_node_jobs d WHERE d.run_id = r.id AND d.node_id = dep.id"
    " AND d.status IN ('completed', 'skipped'))"
    " UNION ALL SELECT run_id || ' ' || node_id || ': twice' FROM workflow_node_jobs"
    " GROUP BY run_id, node_id HAVING count(*) > 1"
)
# `created_at` and `finished_at` are their transactions' now(): equal in the same commit.
_LAW_7 = (
    "SELECT j.id || ': ' || j.status || ' with ' || count(e.id) || ' events'"
    " FROM workflow_node_jobs j LEFT JOIN workflow_dispatch_events e"
    " ON e.run_id = j.run_id AND e.node_id = j.node_id"
    " AND e.kind = j.status AND (e.job_id IS NULL OR e.generation = j.generation)"
    " WHERE j.status IN ('completed', 'failed') GROUP BY j.id, j.status HAVING count(e.id) <> 1"
    " UNION ALL SELECT j.id || ': ' || j.status || ' with an event ' || e.kind"
    " FROM workflow_dispatch_events e JOIN workflow_node_jobs j ON j.id = e.job_id"
    " AND j.generation = e.generation WHERE e.kind IN ('completed', 'failed')"
    " AND (j.status <> e.kind OR j.finished_at <> e.created_at)"
)
_LAW_8 = (
    "SELECT r.id || ': ' || r.status || ' with ' || j.node_id || ' ' || j.status"
    " FROM workflow_runs r JOIN workflow_node_jobs j ON j.run_id = r.id WHERE r.mode = 'node'"
    " AND ((r.status = 'completed' AND j.status NOT IN ('completed', 'skipped'))"
    " OR (r.status IN ('failed', 'cancelled') AND j.status IN ('queued', 'awaiting_input')))"
    " UNION ALL SELECT r.id || ': completed with nodes missing' FROM workflow_runs r"
    " WHERE r.mode = 'node' AND r.status = 'completed' AND r.definition IS NOT NULL"
    " AND (SELECT count(*) FROM workflow_node_jobs j WHERE j.run_id = r.id)"
    " < jsonb_array_length(r.definition -> 'nodes')"
)
_LAW_9 = (
    "SELECT e.job_id || ': claimed after its run was cancelled' FROM workflow_node_events e"
    " JOIN workflow_runs r ON r.id = e.run_id WHERE e.event_type = 'claimed'"
    " AND r.status = 'cancelled'"
    " AND e.created_at > r.finished_at + %(slack_s)s * interval '1 second'"
)
_LAW_10 = (
    "SELECT idempotency_key || ': ' || count(*) || ' jobs' FROM ingest_jobs"
    " WHERE idempotency_key IS NOT NULL GROUP BY queue, idempotency_key HAVING count(*) > 1"
)
LAWS = {
    1: _LAW_1, 2: _LAW_2, 3: _LAW_3, 4: _LAW_4, 5: _LAW_5,
    6: _LAW_6, 7: _LAW_7, 8: _LAW_8, 9: _LAW_9, 10: _LAW_10,
}  # fmt: skip


def broken(conn: db.Connection, *, slack_s: float = 0.0) -> list[str]:
    """What breaks a law right now, one line each, within the retention of events.

    Law 8's waiting nodes under a terminal run are broken only after a sweep. `slack_s`: how long a
    cancel's transaction may have been open when its `finished_at` is no moment of acknowledgement.
    """
    found: list[str] = []
    for number, query in LAWS.items():
        values = {"slack_s": slack_s} if number == 9 else None
        rows = conn.execute(query.encode(), values).fetchall()
        found += [f"law {number}: {text}" for row in rows for text in row.values()]
    return found
