"""Old finished rows are deleted in batches, and other rows stay."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db, events, history, node_pool, node_queue, queues, run_store
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
        factories.insert(conn, "gpu_models", host_label=f"gone{n}", model="m")
        conn.execute(
            "INSERT INTO failure_alerts (kind, subject, occurrence, reason)"
            " VALUES ('job', %s, '1', 'failed')",
            (f"x{n}",),
        )
        events.send("approved", key=n)
        queues.pause("load", by=f"who {n}")
        conn.execute("INSERT INTO partition_starts VALUES ('load', 'k', %s, now())", (n,))
        factories.insert(conn, "event_exports", name=f"metric log pod{n}")
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
        "operator_acts": "at",
        "partition_starts": "started_at",
        "event_exports": "updated_at",
    }
    for table, column in tables.items():
        age(conn, table, column)
    gone = history.prune()
    assert (gone.pop("runs"), gone.pop("jobs")) == (0, 0)
    assert [*gone.values()] == [1] * len(tables)
    for table in tables:
        assert factories.one(conn, f"SELECT count(*) FROM {table}") == 1, table


def test_a_start_stays_for_the_period_of_its_rate(conn: Any) -> None:
    queues.limit("load", partition_rate="1/90d")
    queues.limit("load", partition="short", rate="1/d")
    conn.execute(
        "INSERT INTO partition_starts"
        " SELECT 'load', unnest(ARRAY['long', 'short']), 1, now() - interval '60 days'"
    )
    assert history.prune()["starts"] == 1
    assert factories.one(conn, "SELECT partition_key FROM partition_starts") == "long"


def test_an_error_of_one_kind_is_raised_after_the_others_are_pruned(conn: Any) -> None:
    conn.execute("INSERT INTO events (name, created_at) VALUES ('old', now() - interval '40 days')")
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, last_seen)"
        " VALUES ('old', 'b', 'cpu', 1, now() - interval '40 days')"
    )
    conn.execute(
        "CREATE FUNCTION test_refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'it stays'; END $$;"
        " CREATE TRIGGER zz_refuse BEFORE DELETE ON events"
        " FOR EACH STATEMENT EXECUTE FUNCTION test_refuse()"
    )
    try:
        with pytest.raises(db.Error, match="it stays"):
            history.prune()
    finally:
        conn.execute("DROP FUNCTION test_refuse CASCADE")
    assert factories.column(conn, "SELECT worker_id FROM workers") == []
    assert history.prune()["events"] == 1


def test_nobody_waits_and_nothing_is_lost_that_another_transaction_has(conn: Any) -> None:
    held, run_id = finished_job(conn, 100), finished_run(conn, 400)
    gone = finished_job(conn, 100)
    with db.connect(autocommit=False) as host:
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
    with db.connect(autocommit=False) as host:
        host.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", (run_id,))
        assert history.prune()["runs"] == 0
        host.commit()
    assert history.prune()["runs"] == 0
    assert run_store.get_run(run_id) is not None


def test_the_orchestrator_prunes(conn: Any) -> None:
    finished_job(conn, 100)
    pool = node_pool.NodePool()
    pool.start()
    try:
        wait.until(lambda: not jobs(conn))
    finally:
        pool.stop()


def test_the_invariants_hold_after_it(conn: Any) -> None:
    finished_run(conn, 400)
    finished_job(conn, 400)
    history.prune()
    assert invariants.broken(conn) == []
