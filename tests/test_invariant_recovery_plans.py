"""Crash recovery reads little of the history, however long that is and whatever the statistics."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from queue_workflows.db import statements
from tests.support import database

ROWS = 100_000
BLOCKS = 200
"""Of 8 kB: the index, and a few claims; the history below has about 2,000."""
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
SET session_replication_role = origin;
"""
STATES = {
    "no statistics": [],
    "statistics of empty tables": ["ANALYZE ingest_job_events, workflow_node_events"],
    "statistics": [],
}
ASKED = {"worker": WORKER, "keep": [], "ago_s": 60.0, "within_s": 62.0}


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


def blocks_read(conn: Any, statement: bytes, given: dict[str, Any]) -> int:
    """What the execution of a statement reads, from memory or disk, without its planning."""
    explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
    (row,) = conn.execute(explain + statement, given).fetchall()
    plan = row["QUERY PLAN"][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.mark.parametrize("family", ["ingest", "node"])
def test_the_search_for_claims_without_a_reply_reads_what_crashed_only(
    history: Any, family: str
) -> None:
    statement = getattr(statements.recovery, f"charged_unanswered_{family}")
    with history.transaction():
        history.execute(statements.recovery.by_index)
        (found,) = history.execute(statement, ASKED).fetchall()
        assert found == {"id": JOB, "worker_id": WORKER, "claim_no": 7}
        assert blocks_read(history, statement, ASKED) < BLOCKS


def test_the_bound_detects_a_scan_of_the_history(history: Any) -> None:
    assert blocks_read(history, b"SELECT count(*) FROM ingest_job_events", {}) > 5 * BLOCKS
