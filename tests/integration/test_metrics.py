"""The page for Prometheus: what each counter counts, that none falls, and hostile names."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db, errors, history, jobs
from tests.hostile import roles
from tests.support import console, factories, sweeps, transitions
from tests.support.metrics_page import falls, read, value
from tests.support.wait import until

COUNT = "SELECT queue_workflows_count_events(%s)"
"""Count the events of so many transactions; return whether there are more, None: another counts."""


def test_ends_of_jobs_are_counted_by_queue_and_outcome(conn: Any) -> None:
    transitions.run_ingest(conn)
    transitions.run_ingest(conn, "load")
    factories.node(conn)
    transitions.complete_node(conn, transitions.claim_node(conn))
    factories.ingest(conn)
    job = transitions.claim_ingest(conn, transitions.who("fetch"))
    assert transitions.record(conn, job, "failed", error="no") == "failed"
    jobs.cancel(factories.ingest(conn)["id"])
    found = read()
    assert value(found, "jobs_total", queue="fetch", outcome="completed") == 1
    assert value(found, "jobs_total", queue="load", outcome="completed") == 1
    assert value(found, "jobs_total", queue="cpu", outcome="completed") == 1
    assert value(found, "jobs_total", queue="fetch", outcome="failed") == 1
    assert value(found, "jobs_total", queue="fetch", outcome="cancelled") == 1
    assert value(found, "jobs_total") == 5
    assert value(found, "job_claims_total") == 4
    assert value(read(), "jobs_total") == 5


def test_plain_sql_counts_when_its_transaction_commits(conn: Any) -> None:
    ids = [factories.ingest(conn)["id"] for _ in range(3)]
    with db.connect() as app:
        app.autocommit = False
        app.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE id = %s", (ids[0],))
        transitions.run_ingest(conn)
        # What came later is counted while the app's transaction is open, and that one afterwards.
        before = read()
        assert value(before, "jobs_total") == 1
        app.commit()
        app.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE id = %s", (ids[2],))
        app.rollback()
    after = read()
    assert value(after, "jobs_total", outcome="cancelled") == 1
    assert value(after, "jobs_total") == 2
    assert not falls(before, after)


def test_each_event_is_counted_once_in_small_steps(conn: Any) -> None:
    for n in range(20):
        transitions.run_ingest(conn, f"q{n % 3}")
    # What a running transaction may precede is not counted, also one of another test's database.
    last = factories.one(conn, "SELECT pg_current_xact_id()::text::bigint")
    oldest = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    until(lambda: factories.one(conn, oldest) > last)
    steps = 1
    while factories.one(conn, COUNT, 7):
        steps += 1
    assert steps > 3
    found = read()
    assert value(found, "jobs_total") == 20
    assert value(found, "job_run_seconds_count") == 20
    assert value(read(), "jobs_total") == 20


def test_histograms_are_cumulative_and_a_bound_belongs_to_its_bucket(conn: Any) -> None:
    for seconds in (0.0, 1.0, 1.5, 20_000.0):
        transitions.run_ingest(conn, seconds=seconds)
    found = read()
    bucket = {
        dict(labels)["le"]: number
        for (name, labels), number in found.items()
        if name == "queue_workflows_job_run_seconds_bucket"
    }
    assert [bucket["0.01"], bucket["0.5"], bucket["1"], bucket["2.5"]] == [1, 1, 2, 3]
    assert [bucket["14400"], bucket["+Inf"]] == [3, 4]
    assert value(found, "job_run_seconds_sum") == 20_002.5
    assert value(found, "job_wait_seconds_count", queue="fetch", why="new") == 4


def test_a_wait_after_a_return_to_the_queue_has_its_reason(conn: Any) -> None:
    who = transitions.who("fetch")
    factories.ingest(conn, max_attempts=9)
    job = transitions.claim_ingest(conn, who)
    assert transitions.fail(conn, job, "x", retry=True, after_s=0, most=9, seconds=1.0)
    assert transitions.hand_back(conn, transitions.claim_ingest(conn, who), "OFF")
    job = transitions.claim_ingest(conn, who)
    transitions.expire(conn, job)
    assert transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    transitions.claim_ingest(conn, who)
    found = read()
    for why in ("new", "retry", "handed_back", "crash"):
        assert value(found, "job_wait_seconds_count", why=why) == 1, why
    assert value(found, "job_retries_total", cause="failure") == 1
    assert value(found, "jobs_requeued_total", cause="handed_back") == 1
    assert value(found, "leases_reclaimed_total", cause="lease_lapsed") == 1
    assert value(found, "job_crashes_total") == 0


@pytest.mark.parametrize("evidence", [None, "killed by SIGKILL"])
def test_the_crash_or_lapse_that_ends_a_job_counts_too(conn: Any, evidence: str | None) -> None:
    factories.node(conn, crash_count=2, lapse_count=9)
    job = transitions.claim_node(conn)
    if evidence is None:
        transitions.expire(conn, job)
        assert transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    else:
        assert transitions.charge(conn, job, evidence=evidence)
    found = read()
    cause = "lease_lapsed" if evidence is None else "process_died"
    assert value(found, "job_crashes_total", queue="cpu") == (evidence is not None)
    assert value(found, "leases_reclaimed_total", cause=cause) == 1
    assert value(found, "jobs_total", outcome="failed") == 1


def test_prune_counts_first_and_no_counter_falls(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transitions.run_ingest(conn)
    factories.node(conn)
    transitions.complete_node(conn, transitions.claim_node(conn))
    before = read()
    transitions.run_ingest(conn)
    for table in ("ingest_job_events", "workflow_node_events"):
        with factories.unguarded(conn, table):
            conn.execute(f"UPDATE {table} SET created_at = now() - interval '99 days'")
    conn.execute("UPDATE ingest_jobs SET finished_at = now() - interval '999 days'")
    gone = history.prune()
    assert gone["ingest_job_events"] == 4 and gone["node_events"] == 2 and gone["jobs"] == 2
    after = read()
    assert not falls(before, after)
    assert value(after, "jobs_total") == 3


def test_a_dump_in_a_server_of_fewer_transactions_counts_on(conn: Any) -> None:
    transitions.run_ingest(conn)
    before = read()
    high = (1 << 40) + 3
    # As after a restore: what is stored names transactions that this server has not made.
    conn.execute("UPDATE metric_position SET counted = %s::text::pg_snapshot", (f"{high}:{high}:",))
    assert not falls(before, read())
    transitions.run_ingest(conn)
    after = read()
    assert value(after, "jobs_total") == 2
    assert not falls(before, after)


def test_a_downgrade_drops_the_counters_and_no_event(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with db.connect() as conn:
        transitions.run_ingest(conn)
        conn.execute("DELETE FROM ingest_jobs")
        assert value(read(), "jobs_total") == 1
        with pytest.raises(errors.DataLossRefused, match="metric_totals with"):
            db.downgrade(to_version=16)
        reverted = [*range(db.REQUIRED_VERSION, 16, -1)]
        assert db.downgrade(to_version=16, allow_data_loss=True) == reverted
        events = "SELECT count(*) FROM ingest_job_events"
        assert factories.one(conn, events) == 3
        db.bootstrap()
        # Events of before are not counted, as they carry no transaction.
        assert value(read(), "jobs_total") == 0
        transitions.run_ingest(conn)
        assert value(read(), "jobs_total") == 1
        conn.execute("DELETE FROM metric_totals; DELETE FROM metric_position")
        conn.execute("DELETE FROM workers; DELETE FROM ingest_jobs")
        # The numbers of transactions alone are nobody's data.
        assert db.downgrade(to_version=16) == reverted


HOSTILE = {
    'a"b\\c\nd{e="f"} 1\n# HELP x': r'a"b\c\nd{e="f"} 1\n# HELP x',
    "\r\n\x85\u2028\u202e\x1b[31m": r"\r\n\x85\u2028\u202e\x1b[31m",
    "é" * 100: "é" * 100,
    "}": "}",
    "": "",
}
"""Names, and how the page shows them."""


def test_hostile_names_stay_values_of_labels(conn: Any) -> None:
    for name in HOSTILE:
        if name:
            transitions.run_ingest(conn, name)
            factories.ingest(conn, queue=name)
        conn.execute(
            "INSERT INTO workflow_node_events (run_id, node_id, event_type, queue, model)"
            " VALUES ('r', 'n', 'model_load_done', %s, %s)",
            (name, name),
        )
    text = console.printed("metrics")
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    found = read(text)
    for name, shown in HOSTILE.items():
        if name:
            assert value(found, "jobs_total", queue=shown) == 1
            assert value(found, "jobs", queue=shown, state="queued") == 1
        assert value(found, "model_loads_total", model=shown) == 1
    assert {name for name, _ in found if not name.startswith("queue_workflows_")} == set()


def test_queues_and_models_beyond_a_hundred_are_one_series(conn: Any) -> None:
    for n in range(130):
        conn.execute(
            "INSERT INTO ingest_job_events (job_id, event_type, queue)"
            " VALUES ('x', 'completed', %s)",
            (f"q{n:03}",),
        )
        conn.execute(
            "INSERT INTO workflow_node_events (run_id, node_id, event_type, model, elapsed_s)"
            " VALUES ('r', 'n', 'model_load_done', %s, 2)",
            (f"m{n}",),
        )
        if n == 60:
            before = read()
    for n in range(150):
        factories.ingest(conn, queue=f"q{n:03}")
    found = read()
    assert value(found, "jobs_total") == 130
    assert value(found, "jobs_total", queue="(other)") == 30
    assert value(found, "model_loads_total", model="(other)") == 30
    assert value(found, "jobs", state="queued") == 150
    assert value(found, "jobs", state="queued", queue="(other)") == 50
    assert not falls(before, found)


def test_hostile_events_neither_stop_the_count_nor_spoil_a_sum(conn: Any) -> None:
    transitions.run_ingest(conn)
    for seconds in ("NaN", "Infinity", "-Infinity", "-5", "1e308"):
        conn.execute(
            "INSERT INTO workflow_node_events"
            " (run_id, node_id, event_type, queue, model, elapsed_s, worker_id, created_at)"
            " VALUES ('r', 'n', 'completed', repeat('q', 100000), repeat('m', 100000),"
            " %s::float8, 'w', 'infinity')",
            (seconds,),
        )
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, xid) VALUES ('x', 'completed', -1),"
        " ('x', 'completed', 9223372036854775807)"
    )
    found = read()
    assert value(found, "jobs_total") == 6
    assert value(found, "jobs_total", queue="q" * 200) == 5
    assert value(found, "job_run_seconds_sum", queue="q" * 200) < 1e10


def test_an_orchestrator_without_the_new_rights_reports_that_once(
    conn: Any, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transitions.run_ingest(conn)
    with roles.role(dsn, "work") as name, monkeypatch.context() as patched:
        conn.execute(f"REVOKE INSERT ON metric_totals FROM {name}")
        patched.setenv("QUEUE_WORKFLOWS_DB_URL", roles.as_role(dsn, name))
        with sweeps.tasks() as tasks:
            for _ in range(3):
                tasks.count_events()
            assert caplog.text.count("no events are counted") == 1
            assert history.prune()["jobs"] == 0
            assert "events are deleted uncounted" in caplog.text
            assert factories.one(conn, "SELECT count(*) FROM metric_totals") == 0
            conn.execute(f"GRANT INSERT ON metric_totals TO {name}")
            tasks.count_events()
            assert factories.one(conn, "SELECT count(*) FROM metric_totals") > 0
        db.close_pool()


def test_the_gauges_describe_the_tables(conn: Any) -> None:
    for n in range(3):
        factories.ingest(conn, priority=n, created_at=f"2026-01-0{n + 1}")
    factories.ingest(conn, available_at="2099-01-01")
    transitions.claim_ingest(conn, transitions.who("fetch"))
    factories.node(conn, status="awaiting_input", node_module="__input__x")
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, state, last_seen) VALUES"
        " ('a', 'h', 'fetch', 1, 'busy', now()), ('b', 'h', 'fetch', 2, 'parked', now()),"
        " ('c', 'h', 'fetch', 3, 'idle', now() - interval '1 hour'),"
        " ('d', 'h', 'fetch', 4, 'stopped', now())"
    )
    conn.execute(
        "INSERT INTO worker_heartbeats (host_label, queue, concurrency) VALUES ('h', 'fetch', 4)"
    )
    conn.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, created_at)"
        " SELECT id, 'n', 'completed', now() - interval '90 s' FROM workflow_runs"
    )
    conn.execute("INSERT INTO queue_settings (queue, paused_at) VALUES ('fetch', now())")
    conn.execute(
        "INSERT INTO schedules (name, expression, task_name) VALUES ('late', '* * * * *', 't')"
    )
    conn.execute("UPDATE schedules SET wake_at = now() - interval '2 minutes'")
    found = read()
    jobs_by = {state: value(found, "jobs", state=state) for state in ("queued", "running")}
    assert jobs_by == {"queued": 3, "running": 1}
    assert value(found, "jobs", queue="cpu", state="awaiting_input") == 1
    assert value(found, "jobs_waiting", queue="fetch", why="ready") == 2
    assert value(found, "jobs_waiting", queue="fetch", why="not_due") == 1
    assert value(found, "workers", state="busy") == value(found, "workers", state="dead") == 1
    slots = {state: value(found, "worker_slots", state=state) for state in ("busy", "free", "off")}
    assert slots == {"busy": 1, "free": 3, "off": 4}
    assert value(found, "outbox_events") == 1 and 89 < value(found, "outbox_lag_seconds") < 200
    assert value(found, "queue_paused", queue="fetch") == 1
    assert value(found, "runs", state="running") == 1
    assert 119 < value(found, "schedule_lateness_seconds", schedule="late") < 300
    oldest = value(found, "oldest_ready_job_age_seconds", queue="fetch")
    expected = factories.one(
        conn,
        "SELECT extract(epoch FROM now() - min(created_at))::float8 FROM ingest_jobs"
        " WHERE status = 'queued' AND blocked_reason IS NULL",
    )
    assert abs(oldest - expected) < 60


def test_the_last_sample_of_each_machine(conn: Any) -> None:
    sample = (
        '{"cpu_percent": 50, "ram_used_mb": 2, "ram_total_mb": 4, "swap_used_mb": null,'
        ' "gpus": [{"id": 0, "use_pct": 25, "vram_used_mb": 1, "vram_total_mb": "x"}, 7]}'
    )
    for host in ("box", 'b"2', "old"):
        conn.execute("SELECT queue_workflows_put_sample(%s, 2, %s::jsonb, false)", (host, sample))
    conn.execute(
        "UPDATE hw_samples SET sampled_at = now() - interval '2 minutes' WHERE host_label = 'old'"
    )
    found = read()
    for host in ("box", 'b"2'):
        assert value(found, "machine_cpu_ratio", host=host) == 0.5
        assert value(found, "machine_memory_used_bytes", host=host) == 2 * 1024 * 1024
        assert value(found, "gpu_utilization_ratio", host=host, gpu="0") == 0.25
    assert not [key for key in found if key[0].endswith("swap_used_bytes")]
    assert not [key for key in found if "old" in dict(key[1]).values()]


def test_two_counts_at_once_count_once(conn: Any) -> None:
    transitions.run_ingest(conn)
    with db.connect() as other, other.transaction():
        assert factories.one(other, COUNT, 1000) is False
        assert factories.one(conn, COUNT, 1000) is None
        assert value(read(), "jobs_total") == 0
    assert value(read(), "jobs_total") == 1
