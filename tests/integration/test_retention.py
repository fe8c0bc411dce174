"""Old finished rows are deleted in batches, and other rows stay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows import events, history, node_pool, node_queue, run_store
from queue_workflows.engine import job_events, logs, models, row_isolation, schedules
from queue_workflows.engine import retention as statements
from queue_workflows.operations import retention
from tests.support import factories, invariants, transitions, wait


def finished_run(conn: Any, days: float, node: str = "completed", **columns: Any) -> str:
    """A run that ended so long ago, with a node, an answer, an event and an outbox row."""
    run_id = factories.run(conn, **{"status": "completed"} | columns)
    factories.node(conn, run_id, status=node)
    node_queue.record_node_event(run_id=run_id, node_id="n", event_type="completed")
    conn.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, processed_at)"
        " VALUES (%s, 'n', 'completed', now())",
        (run_id,),
    )
    conn.execute(
        "INSERT INTO workflow_input_submissions (run_id, node_id, value, status)"
        " VALUES (%s, 'q', '1', 'processed')",
        (run_id,),
    )
    conn.execute(
        "UPDATE workflow_runs SET finished_at = now() - %s * interval '1 day' WHERE id = %s",
        (days, run_id),
    )
    return run_id


def finished_job(conn: Any, days: float, **columns: Any) -> str:
    """An ingest job that ended so long ago."""
    job = factories.ingest(conn, **{"status": "completed"} | columns)
    conn.execute(
        "UPDATE ingest_jobs SET finished_at = now() - %s * interval '1 day' WHERE id = %s",
        (days, job["id"]),
    )
    return job["id"]


def jobs(conn: Any) -> set[str]:
    return set(factories.column(conn, "SELECT id FROM ingest_jobs"))


def runs(conn: Any) -> set[str]:
    return set(factories.column(conn, "SELECT id FROM workflow_runs"))


def test_runs_go_with_all_that_is_theirs(conn: Any) -> None:
    old = [finished_run(conn, 366, status=s) for s in ("completed", "failed", "cancelled")]
    kept = finished_run(conn, 364)
    assert history.prunable()["runs"] == 3
    assert history.prune()["runs"] == 3
    assert runs(conn) == {kept}
    for table in ("workflow_node_jobs", "workflow_dispatch_events", "workflow_input_submissions"):
        assert factories.column(conn, f"SELECT run_id FROM {table}") == [kept], table
    assert [history.get_run(run_id) for run_id in old] == [None] * 3
    assert history.prunable()["runs"] == history.prune()["runs"] == 0


def test_an_unfinished_row_stays_at_any_age(conn: Any) -> None:
    for status in ("queued", "running", "awaiting_input"):
        finished_run(conn, 8000, status=status)
    unsent = finished_run(conn, 8000)
    conn.execute(
        "UPDATE workflow_dispatch_events SET processed_at = NULL WHERE run_id = %s", (unsent,)
    )
    half = finished_run(conn, 8000, status="cancelled")
    factories.node(conn, half, "still", status="awaiting_input")
    factories.ingest(conn)
    factories.ingest(conn)
    transitions.claim_ingest(conn)
    conn.execute("UPDATE ingest_jobs SET created_at = now() - interval '8000 days'")
    before = runs(conn), jobs(conn)
    assert history.prunable() == {"runs": 0, "jobs": 0}
    assert set(history.prune().values()) == {0}
    assert (runs(conn), jobs(conn)) == before


def test_a_queue_has_its_own_time_or_that_of_all(conn: Any, monkeypatch: Any) -> None:
    conn.execute(
        "INSERT INTO queue_settings (queue, retention_days)"
        " VALUES ('load', 2), ('fetch', 0), ('notes', NULL)"
    )
    kept = {
        finished_job(conn, 1, queue="load"),
        finished_job(conn, 8000, queue="fetch"),
        finished_job(conn, 89, queue="notes"),
        finished_job(conn, 89, queue="bare"),
    }
    for queue, days in (("load", 3), ("notes", 91), ("bare", 91)):
        finished_job(conn, days, queue=queue, status="failed")
    assert history.prunable()["jobs"] == 3
    assert history.prune()["jobs"] == 3
    assert jobs(conn) == kept
    monkeypatch.setenv("QUEUE_WORKFLOWS_JOB_RETENTION_DAYS", "0")
    finished_job(conn, 8000, queue="bare")
    finished_job(conn, 3, queue="load")
    assert history.prune()["jobs"] == 1


def test_the_knobs_of_runs_and_of_events(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(conn, 8000)
    conn.execute("UPDATE workflow_dispatch_events SET processed_at = now() - interval '99 days'")
    monkeypatch.setenv("QUEUE_WORKFLOWS_RUN_RETENTION_DAYS", "0")
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS", "0")
    assert history.prunable()["runs"] == 0
    assert set(history.prune().values()) == {0}
    monkeypatch.delenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS")
    assert history.prune()["outbox"] == 1
    monkeypatch.setenv("QUEUE_WORKFLOWS_RUN_RETENTION_DAYS", "0.5")
    assert history.prune()["runs"] == 1


def age(conn: Any, table: str, column: str = "created_at") -> None:
    """All rows but the last written get 31 days old."""
    with factories.unguarded(conn, table):
        conn.execute(
            f"UPDATE {table} SET {column} = now() - interval '31 days'"
            f" WHERE ctid <> (SELECT max(ctid) FROM {table})"
        )


def test_all_that_is_only_history_goes_by_its_age(conn: Any) -> None:
    run_id = factories.run(conn)
    for n in range(2):
        node_queue.record_node_event(run_id=run_id, node_id="n", event_type="claimed")
        conn.execute(
            "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, processed_at)"
            " VALUES (%s, 'n', 'completed', now())",
            (run_id,),
        )
        conn.execute("INSERT INTO ingest_job_events (job_id, event_type) VALUES ('x', 'claimed')")
        conn.execute(
            "INSERT INTO job_attempt_logs (job_table, job_id, claim_no)"
            " VALUES ('ingest_jobs', 'x', %s)",
            (n,),
        )
        conn.execute(
            "INSERT INTO schedule_fires (name, fire_at)"
            " VALUES ('a', now() + %s * interval '1 second')",
            (n,),
        )
        node_queue.upsert_worker_heartbeat(host_label=f"box{n}", queue="cpu", concurrency=1)
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES (%s, 'b', 'cpu', 1)",
            (f"w{n}",),
        )
        conn.execute(
            "INSERT INTO hw_samples (host_label, every_s, slot, sample) VALUES ('b', 2, %s, '{}')",
            (n,),
        )
        models.learn_load(conn, f"gone{n}", "m", 1.0)
        conn.execute(
            "INSERT INTO failure_alerts (kind, subject, occurrence, reason)"
            " VALUES ('job', %s, '1', 'failed')",
            (f"x{n}",),
        )
        events.send("approved", key=n)
    tables = {
        "workflow_node_events": "created_at",
        "workflow_dispatch_events": "processed_at",
        "ingest_job_events": "created_at",
        "job_attempt_logs": "created_at",
        "schedule_fires": "created_at",
        "worker_heartbeats": "last_seen",
        "workers": "last_seen",
        "hw_samples": "sampled_at",
        "gpu_models": "updated_at",
        "failure_alerts": "failed_at",
        "events": "created_at",
    }
    for table, column in tables.items():
        age(conn, table, column)
    assert history.prune() == dict.fromkeys(retention.KINDS, 1) | {"runs": 0, "jobs": 0}
    for table in tables:
        assert factories.one(conn, f"SELECT count(*) FROM {table}") == 1, table


def test_a_batch_is_quick_where_the_statistics_say_that_the_table_is_empty(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with engine.connect() as conn:
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
            assert statements.delete_outbox(conn, 30) == 5000
            assert job_events.prune_nodes(conn, older_than_days=30, batch=5000) == 5000
            assert statements.delete_ingest_events(conn, 30) == 5000
            assert logs.prune(conn, older_than_days=30, batch=5000) == 5000
            assert schedules.prune(conn, batch=5000) == 5000
            assert statements.due(conn, run_days=30, job_days=30) == {"runs": 5000, "jobs": 0}
            assert statements.delete_runs(conn, 0, 30, row_isolation.Isolation()) == statements.RUNS


def test_large_tables_go_batch_by_batch(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "BLOCKS", 2)
    monkeypatch.setattr(statements, "RUNS", 3)
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, reason, status, finished_at)"
        " SELECT 'note', 'load', 'x', 'completed', now() - interval '100 days'"
        " FROM generate_series(1, 500)"
    )
    for _ in range(8):
        finished_run(conn, 400)
    kept = finished_job(conn, 1), finished_run(conn, 1)
    found = list(retention.batches())
    of_jobs = [count for kind, count in found if kind == "jobs"]
    of_runs = [count for kind, count in found if kind == "runs"]
    assert (sum(of_jobs), sum(of_runs)) == (500, 8)
    assert len(of_jobs) > 3
    assert max(of_jobs) < 250
    assert max(of_runs) == 3
    assert (jobs(conn), runs(conn)) == ({kept[0]}, {kept[1]})


def test_nobody_waits_and_nothing_is_lost_that_another_transaction_has(conn: Any) -> None:
    held, run_id = finished_job(conn, 100), finished_run(conn, 400)
    gone = finished_job(conn, 100)
    with engine.connect(autocommit=False) as host:
        host.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (held,))
        host.execute("UPDATE workflow_runs SET parcel_id = 'x' WHERE id = %s", (run_id,))
        assert history.prune()["jobs"] == 1
        assert jobs(conn) == {held}
        assert gone not in jobs(conn)
        host.rollback()
    found = history.prune()
    assert (found["jobs"], found["runs"]) == (1, 1)


def test_a_run_that_is_reopened_beside_the_pruning_stays(conn: Any) -> None:
    run_id = finished_run(conn, 400, node="failed", status="failed")
    with engine.connect(autocommit=False) as host:
        host.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", (run_id,))
        assert history.prune()["runs"] == 0
        host.commit()
    assert history.prune()["runs"] == 0
    assert run_store.get_run(run_id) is not None


def test_the_orchestrator_prunes_and_stops_between_batches(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_job(conn, 100)
    pool = node_pool.NodePool()
    pool.start()
    try:
        wait.until(lambda: not jobs(conn))
    finally:
        pool.stop()
    begun, stopped = threading.Event(), threading.Event()

    def endless(*_: object) -> Iterator[tuple[str, int]]:
        try:
            while True:
                begun.set()
                yield "jobs", 1
        finally:
            stopped.set()

    monkeypatch.setattr(retention, "batches", endless)
    pool = node_pool.NodePool()
    pool.start()
    assert begun.wait(30)
    pool.stop()
    assert stopped.wait(30)


def test_the_invariants_hold_after_it(conn: Any) -> None:
    finished_run(conn, 400)
    finished_job(conn, 400)
    history.prune()
    assert invariants.broken(conn) == []
