"""What an orchestrator asks at each poll reads few rows of large tables."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db
from tests.support import database, factories, flow, named_statements

ALL_RAN_OR_WAITED = """
SET session_replication_role = replica;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, worker_id,
       lease_expires_at, heartbeat_at, blocked_reason, lock_key)
SELECT 'r', i::text, 'm', 'cpu', CASE WHEN i <= 5000 THEN 'running' ELSE 'queued' END, 'w', now(),
       now(), CASE WHEN i > 5000 THEN 'locked' END, 'k' || i FROM generate_series(1, 10000) i;
INSERT INTO ingest_jobs (task_name, queue, status, worker_id, lease_expires_at, heartbeat_at,
       blocked_reason, lock_key, partition_key)
SELECT 't', 'q', CASE WHEN i <= 5000 THEN 'running' ELSE 'queued' END, 'w', now(), now(),
       CASE WHEN i > 7500 THEN 'limited' WHEN i > 5000 THEN 'locked' END, 'k' || i, 'p'
  FROM generate_series(1, 10000) i;
ANALYZE workflow_node_jobs, ingest_jobs;
UPDATE workflow_node_jobs SET status = 'completed', worker_id = NULL, blocked_reason = NULL;
UPDATE ingest_jobs SET status = 'completed', worker_id = NULL, blocked_reason = NULL;
SET session_replication_role = origin;
"""


def test_a_poll_reads_no_finished_job_for_any_statistics(conn: Any) -> None:
    conn.execute(ALL_RAN_OR_WAITED)
    for name in ("pending.sweeps", "pending.silent_jobs"):
        found = conn.execute(b"EXPLAIN " + named_statements.texts()[name], {"silent_s": 30})
        plan = "\n".join(row["QUERY PLAN"] for row in found)
        assert "Seq Scan on workflow_node_jobs" not in plan
        assert "Seq Scan on ingest_jobs" not in plan


GROWN = """
SET session_replication_role = replica;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status)
SELECT 'r' || i, 'n', 'm', 'cpu', 'completed' FROM generate_series(1, 2000) i;
INSERT INTO workflow_runs (id, workflow_name, status, mode, definition)
SELECT 'r' || i, 'w', 'running', 'node', '{}' FROM generate_series(1, 2000) i;
INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
SELECT 'r' || i, 'n', 'completed', 'j', 1, 0 FROM generate_series(1, 2000) i;
SET session_replication_role = origin;
"""


def test_a_session_of_the_time_when_tables_were_empty_reads_no_whole_table(
    toy: flow.Flow, conn: Any
) -> None:
    """A plan that a session keeps is not made again as the table grows, but by an ANALYZE."""
    toy.define(flow.step("kid", "one"), name="kid")
    toy.define({"id": "c", "kind": "run", "workflow": "kid"}, one=flow.nodes(n=""))
    runs_of_kids = [flow.job(toy.started(), "c")["child_run_id"] for _ in range(9)]
    conn.execute("ANALYZE")
    conn.execute("SET plan_cache_mode = force_generic_plan")
    end = "UPDATE workflow_runs SET status = 'completed', finished_at = now() WHERE id = %s"
    for run_id in runs_of_kids[:8]:
        conn.execute(end, (run_id,), prepare=False)
    with db.connect() as other:  # SET session_replication_role drops a session's plans
        other.execute(GROWN)
    with conn.transaction():
        before = factories.one(conn, READ)
        assert conn.execute(end, (runs_of_kids[8],), prepare=False).rowcount == 1
        assert factories.one(conn, READ) - before < 100


ONE_RUN_HAD_ALL = """
SET session_replication_role = replica;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, finished_at)
SELECT 'r', i::text, 'm', 'cpu', 'completed', now() - interval '1 h' FROM generate_series(1, 500) i;
INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
SELECT 'r', i::text, 'completed', 'j', 1, 0 FROM generate_series(1, 500) i;
INSERT INTO workflow_input_submissions (run_id, node_id, status, value)
SELECT 'r', i::text, 'pending', '1' FROM generate_series(1, 500) i;
ANALYZE workflow_node_jobs, workflow_dispatch_events, workflow_input_submissions;
INSERT INTO workflow_runs (id, workflow_name, status, mode, definition)
SELECT 'r' || i, 'w', 'running', 'node', '{}' FROM generate_series(1, 500) i;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status)
SELECT 'r' || i, 'n', 'm', 'cpu', 'queued' FROM generate_series(1, 500) i;
SET session_replication_role = origin;
"""
READ = (
    "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint"
    " FROM pg_stat_xact_user_tables WHERE schemaname = current_schema()"
)


@pytest.mark.parametrize("name", ["audit.runs_advance", "runs.stalled"])
def test_runs_are_checked_by_their_own_rows_for_any_statistics(conn: Any, name: str) -> None:
    conn.execute(ONE_RUN_HAD_ALL)
    ids = [f"r{i}" for i in range(1, 501)]
    given = {"quiet_s": 10, "sweep_s": 10, "limit": 9, "ids": ids}
    with conn.transaction():
        before = factories.one(conn, READ)
        conn.execute(named_statements.texts()[name], given)
        assert factories.one(conn, READ) - before < 10 * len(ids)


FEW_LIVE_JOBS = """
SET session_replication_role = replica;
INSERT INTO ingest_jobs (id, task_name, queue, status, finished_at)
SELECT i::text, 't', 'q', 'completed', now() FROM generate_series(1, 5000) i;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, finished_at)
SELECT 'r', i::text, 'm', 'cpu', 'completed', now() FROM generate_series(1, 5000) i;
INSERT INTO ingest_jobs (id, task_name, queue, blocked_reason, available_at)
VALUES ('a', 't', 'q', NULL, NULL), ('b', 't', 'q', 'not_due', '2100-01-01');
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue) VALUES ('r', 'n', 'm', 'cpu');
SET session_replication_role = origin;
ANALYZE ingest_jobs, workflow_node_jobs;
"""


def test_live_jobs_are_counted_without_reading_the_finished_ones(conn: Any) -> None:
    conn.execute(FEW_LIVE_JOBS)
    with conn.transaction():
        before = factories.one(conn, READ)
        given = {"window": 0.0, "stale_s": 30.0, "served": False, "queue": None, "most": 9}
        counted = conn.execute(named_statements.texts()["queues.list"], given)
        found = [(row["queue"], row["ready"], row["blocked"]) for row in counted]
        assert factories.one(conn, READ) - before < 100
    assert found == [("cpu", 1, 0), ("q", 1, 1)]


OLD_RUNS = """
SET session_replication_role = replica;
INSERT INTO workflow_runs (id, workflow_name, status, mode, definition, queued_at)
SELECT 'r' || i, 'w', 'completed', 'node', '{}', now() - interval '1 day'
  FROM generate_series(1, 20000) i;
INSERT INTO workflow_node_events (run_id, node_id, event_type) VALUES ('r7', 'a', 'completed');
SET session_replication_role = origin;
"""


FEW_RUNS = "INSERT INTO workflow_runs (workflow_name) VALUES ('w'), ('w'); ANALYZE;"


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("", "ANALYZE"), (FEW_RUNS + "DELETE FROM workflow_runs;", "")],
    ids=["none", "up to date", "of a few queued runs"],
)
def test_the_feed_reads_the_runs_that_may_have_changed(conn: Any, before: str, after: str) -> None:
    conn.execute(before)
    conn.execute(OLD_RUNS + after)
    place = dict.fromkeys(("since", "at", "kind", "id"))
    given = place | {"late_s": 6, "runs": ["r8", "r9"], "limit": 9, "most": 9}
    with conn.transaction():
        read = factories.one(conn, READ)
        found = conn.execute(named_statements.texts()["history_rows.feed"], given).fetchall()
        assert {row["run_id"] for row in found if row["kind"] == "run"} == {"r7", "r8", "r9"}
        assert factories.one(conn, READ) - read < 20


LATER_EVENTS = """
SET session_replication_role = replica;
INSERT INTO workflow_runs (id, workflow_name, status, mode, definition)
VALUES ('a', 'w', 'running', 'node', '{}');
INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
SELECT 'b', i::text, 'completed', 'j', 1, 0 FROM generate_series(1, 20000) i;
UPDATE workflow_dispatch_events SET processed_at = now();
"""


@pytest.mark.parametrize("known", [False, True], ids=["no statistics", "no event is open"])
def test_a_check_of_a_run_reads_no_closed_events_of_later_runs(
    own_database: database.Database, known: bool
) -> None:
    """Their entries stay in the index of open events until a vacuum."""
    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    check = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT queue_workflows_stalled_runs(0, '{a}')"
    with (
        database.environment(QUEUE_WORKFLOWS_DB_URL=dsn),
        db.connect(limited=False) as conn,
    ):
        conn.execute("ALTER TABLE workflow_dispatch_events SET (autovacuum_enabled = off)")
        with conn.transaction():
            for statement in LATER_EVENTS.split(";")[:-1]:
                conn.execute(statement.encode())
            if known:
                conn.execute("ANALYZE workflow_dispatch_events")
            plans = [factories.one(conn, check)[0]["Plan"] for _ in range(2)]
    own_database.drop(name)
    assert {plan["Actual Rows"] for plan in plans} == {1}
    # The first reads the catalog too.
    assert plans[1]["Shared Hit Blocks"] + plans[1]["Shared Read Blocks"] < 100


FILL = """
SET session_replication_role = replica;
INSERT INTO workflow_runs (workflow_name, status, available_at)
    SELECT 'w', CASE WHEN i % 2 = 0 THEN 'queued' ELSE 'completed' END, now() + i * interval '1 s'
      FROM generate_series(1, 20000) i;
SET session_replication_role = origin;
"""


@pytest.mark.parametrize("fill", [[FILL], [FILL, "ANALYZE workflow_runs"]], ids=["new", "known"])
def test_the_check_reads_one_entry_of_the_index_of_delayed_runs(
    own_database: database.Database, fill: list[str]
) -> None:
    # In a database of its own: the other one may have statistics of a time when it was empty.
    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    explain = b"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) "
    explain += named_statements.texts()["pending.work"]
    with (
        database.environment(QUEUE_WORKFLOWS_DB_URL=dsn),
        db.connect(limited=False) as conn,
    ):
        conn.execute("ALTER TABLE workflow_runs SET (autovacuum_enabled = off)")
        for statement in fill:
            conn.execute(statement.encode())
        plan = [row["QUERY PLAN"] for row in conn.execute(explain, {"within_s": 30.0})]
    own_database.drop(name)
    assert not [line for line in plan if "Seq Scan on workflow_runs" in line]
    (limit,) = [n for n, line in enumerate(plan) if "Limit" in line]
    assert "rows=1" in plan[limit]
    (scan,) = [line for line in plan[limit + 1 :] if "workflow_runs_delayed_idx" in line]
    assert "rows=1" in scan
