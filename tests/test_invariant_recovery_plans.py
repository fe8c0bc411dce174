"""Crash recovery reads little of the history, however long that is and whatever the statistics."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.support import database, factories, transitions

ROWS = 100_000
READS = 1_000
"""The ten crashes below and what belongs to them, with room."""
WORKER, JOB = "machine:7:boot:random", "j500"
FILL = f"""
ALTER TABLE ingest_job_events SET (autovacuum_enabled = off);
ALTER TABLE workflow_node_events SET (autovacuum_enabled = off);
SET session_replication_role = replica;
INSERT INTO ingest_job_events
       (job_id, event_type, claim_no, worker_id, host_label, queue, created_at)
    SELECT 'j' || i / 2, CASE WHEN i % 2 = 0 THEN 'claimed' ELSE 'completed' END, 1, 'w' || i % 50,
           'machine', 'fetch', now() - ({ROWS} - i) * interval '2 milliseconds'
      FROM generate_series(1, {ROWS}) i;
INSERT INTO workflow_node_events
       (run_id, node_id, job_id, event_type, claim_no, worker_id, host_label, queue, created_at)
    SELECT 'r' || i / 100, 'n' || i / 2, e.job_id, e.event_type, e.claim_no, e.worker_id,
           e.host_label, e.queue, e.created_at
      FROM (SELECT row_number() OVER (ORDER BY id) AS i, * FROM ingest_job_events) e;
SET session_replication_role = origin;
"""
CRASHES = f"""
SET session_replication_role = replica;
INSERT INTO ingest_job_events (job_id, event_type, claim_no, worker_id)
    SELECT 'j' || n, kind, 7, CASE kind WHEN 'claimed' THEN
               CASE n WHEN 500 THEN '{WORKER}' ELSE 'other' END END
      FROM generate_series(500, 509) n, unnest('{{claimed,reclaimed}}'::text[]) kind;
INSERT INTO workflow_node_events (run_id, node_id, job_id, event_type, claim_no, worker_id)
    SELECT 'r' || job_id, 'n', job_id, event_type, claim_no, worker_id
      FROM ingest_job_events WHERE claim_no = 7;
INSERT INTO ingest_jobs (id, task_name, queue, claim_no, crash_count)
    VALUES ('{JOB}', 't', 'fetch', 7, 1);
INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('r{JOB}', 'w', 'running');
INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, claim_no, crash_count)
    VALUES ('{JOB}', 'r{JOB}', 'n', 'm', 'cpu', 7, 1);
SET session_replication_role = origin;
"""
STATES = {
    "no statistics": [],
    "statistics of empty tables": ["ANALYZE ingest_job_events, workflow_node_events"],
    "statistics": [],
}
READ = (
    "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables"
    " WHERE relname IN ('ingest_job_events', 'workflow_node_events')"
)
"""The rows of the history that this process has read; it grows during one transaction alone."""


@pytest.fixture(scope="module", params=STATES)
def history(own_database: database.Database, request: pytest.FixtureRequest) -> Generator[Any]:
    """A connection to a database with a long history, ten crashes in it, and such statistics."""
    from queue_workflows import db

    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn), db.connect(limited=False) as conn:
        for statement in [*STATES[request.param], FILL, CRASHES]:
            conn.execute(statement.encode())
        if request.param == "statistics":
            conn.execute("ANALYZE ingest_job_events, workflow_node_events")
        else:
            # As with ten times the rows: any plan other than an index scan seems cheaper.
            conn.execute("SET random_page_cost = 100")
        yield conn
    own_database.drop(name)


@pytest.mark.parametrize("kind", transitions.KINDS)
def test_the_search_for_claims_without_a_reply_reads_what_crashed_only(
    history: Any, kind: transitions.Kind
) -> None:
    with history.transaction(force_rollback=True):
        before = factories.one(history, READ)
        assert transitions.excuse_unanswered(history, kind, WORKER, 58.0) == 1
        assert 0 < factories.one(history, READ) - before < READS


def test_the_bound_detects_a_scan_of_the_history(history: Any) -> None:
    with history.transaction():
        before = factories.one(history, READ)
        history.execute("SELECT count(*) FROM ingest_job_events")
        assert factories.one(history, READ) - before > 5 * READS
