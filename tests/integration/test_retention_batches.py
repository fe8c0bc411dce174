"""Pruning goes batch by batch, each is quick, and a stop comes between two of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db, history, node_pool
from queue_workflows.claim import row_isolation
from queue_workflows.db import statements
from tests.support import factories

OLD = "2001-01-01"


def test_a_batch_is_quick_where_the_statistics_say_that_the_table_is_empty(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with db.connect() as conn:
        old = "'2001-01-01' FROM generate_series(1, 20000) AS n"
        fills = {
            "workflow_runs": "(workflow_name, status, finished_at) SELECT 'w', 'completed',"
            " '2001-01-01' FROM generate_series(1, 5000) AS n",
            "workflow_node_jobs": "(run_id, node_id, node_module, queue, status, finished_at)"
            f" SELECT (SELECT min(id) FROM workflow_runs), n, 'm', 'cpu', 'completed', {old}",
            "workflow_dispatch_events": "(run_id, node_id, kind, processed_at)"
            f" SELECT (SELECT min(id) FROM workflow_runs), 'n', 'completed', {old}",
            "workflow_node_events": "(run_id, node_id, event_type, created_at)"
            f" SELECT gen_random_uuid(), 'n', 'claimed', {old}",
            "ingest_job_events": f"(job_id, event_type, created_at) SELECT 'x', 'claimed', {old}",
            "job_attempt_logs": "(job_table, job_id, claim_no, created_at)"
            f" SELECT 'ingest_jobs', 'x', n, {old}",
            "schedule_fires": "(name, fire_at, created_at)"
            f" SELECT 'a', now() + n * interval '1 second', {old}",
        }
        for table, fill in fills.items():
            conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            conn.execute(f"INSERT INTO {table} {fill}")
            with factories.unguarded(conn, table):
                conn.execute(f"DELETE FROM {table}")
            conn.execute(f"VACUUM (ANALYZE, TRUNCATE false) {table}")
            conn.execute(f"INSERT INTO {table} {fill}")
            estimate = "SELECT reltuples FROM pg_class WHERE relname = %s"
            assert factories.one(conn, estimate, table) == 0, table
        conn.execute("SET statement_timeout = '5s'")  # by key it is 100 million comparisons
        with conn.transaction():
            assert statements.retention.delete_outbox(conn, days=30, batch=5000) == 5000
            delete_events = statements.retention.delete_events
            assert delete_events["workflow_node_jobs"](conn, days=30, batch=5000) == 5000
            db.set_local(conn, {"queue_workflows.retention": "on"})
            assert delete_events["ingest_jobs"](conn, days=30, batch=5000) == 5000
            assert statements.logs.prune(conn, days=30, batch=5000) == 5000
            assert statements.schedules.prune(conn, days=30, batch=5000) == 5000
            assert statements.retention.count_runs(conn, days=30) == 5000
            assert statements.retention.count_jobs(conn, days=30) == 0
            deleted = row_isolation.Isolation().batch(conn, history.deletion("runs", 0, 30))
            assert len(deleted) == history.RUNS


def test_large_tables_go_batch_by_batch(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BLOCKS", 2)
    monkeypatch.setattr(history, "RUNS", 3)
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, reason, status, finished_at)"
        " SELECT 'note', 'load', 'x', 'completed', now() - interval '100 days'"
        " FROM generate_series(1, 500)"
    )
    for _ in range(8):
        factories.run(conn, status="completed", finished_at=OLD)
    kept = factories.ingest(conn, status="completed")["id"], factories.run(conn, status="completed")
    found = list(history.prune_batches())
    of_jobs = [count for kind, count in found if kind == "jobs"]
    of_runs = [count for kind, count in found if kind == "runs"]
    assert (sum(of_jobs), sum(of_runs)) == (500, 8)
    assert len(of_jobs) > 3
    assert max(of_jobs) < 250
    assert max(of_runs) == 3
    assert factories.column(conn, "SELECT id FROM ingest_jobs") == [kept[0]]
    assert factories.column(conn, "SELECT id FROM workflow_runs") == [kept[1]]


def test_the_orchestrator_stops_between_batches(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def endless(*_: object) -> Iterator[tuple[str, int]]:
        try:
            while True:
                begun.set()
                yield "jobs", 1
        finally:
            stopped.set()

    monkeypatch.setattr(history, "prune_batches", endless)
    pool = node_pool.NodePool()
    pool.start()
    assert begun.wait(30)
    pool.stop()
    assert stopped.wait(30)
