"""What apps that were written for version 0.3.0 call and read, where it was once different here."""

from __future__ import annotations

from types import ModuleType

import pytest

from queue_workflows import config, model_cache, model_registry, node_queue
from queue_workflows.dag import answers, widgets
from tests.support import factories


def test_none_is_not_passed_to_configure() -> None:
    config.configure(
        db_url_env="APP_DB",
        node_module_package="app.nodes",
        ingest_queues={"x"},
        host_label_env="H",
    )
    found = config.configure(
        db_url_env=None,
        video_model_ids=None,
        node_module_package=None,
        host_label_env=None,
        host_priority_env=None,
        container_prefix=None,
        ingest_queues=None,
        ingest_default_budget_s=None,
    )
    assert (found.db_url_env, found.node_module_package) == ("APP_DB", "app.nodes")
    assert (found.ingest_queues, found.host_label_env) == ({"x"}, "H")
    assert found.container_prefix == "ai_leads-"


@pytest.fixture(autouse=True)
def no_models() -> None:
    model_registry.clear_for_tests()


def test_there_is_always_a_registrar_of_models() -> None:
    config.get_config().builtin_model_registrar()
    assert not model_registry.known_ids()


@pytest.mark.parametrize("key", ["options", "turnout_options"])
def test_turnout_offers_what_either_key_names(key: str) -> None:
    step = {"id": "ask", "widget": "turnout", key: ["left", {"label": "Right", "value": "r"}]}
    spec = widgets.build_spec(step, context={}, out_dir=None)
    assert spec["turnout_options"] == [
        {"label": "left", "value": "left"},
        {"label": "Right", "value": "r"},
    ]
    answers.check(spec, "r", "it")


def test_an_upload_without_accept_takes_any_file_and_a_missing_prompt_is_empty() -> None:
    spec = widgets.build_spec({"id": "up", "widget": "file_upload"}, context={}, out_dir=None)
    assert (spec["accept"], spec["prompt"]) == ("*/*", "")
    answers.check(spec, "any.bin", "it")


def test_a_skipped_job_needs_no_module(db: ModuleType) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    job = node_queue.get_node_job(node_queue.insert_skipped_job(run_id="r", node_id="a/b"))
    assert job is not None
    assert (job["status"], job["node_module"]) == ("skipped", "a/b")


def test_an_event_has_an_id_and_none_where_it_was_not_recorded(db: ModuleType) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    first = node_queue.record_node_event(run_id="r", node_id="n", event_type="error")
    second = node_queue.record_node_event(run_id="r", node_id="n", event_type="error")
    assert first is not None
    assert second is not None
    assert second > first
    assert node_queue.record_node_event(run_id="r", node_id="n", event_type="no such type") is None


def test_clearing_a_model_returns_the_row_or_none(db: ModuleType) -> None:
    assert node_queue.clear_worker_current_model("box", "gpu") is None
    node_queue.upsert_worker_heartbeat(
        host_label="box", queue="gpu", concurrency=1, current_model="sd"
    )
    row = node_queue.clear_worker_current_model("box", "gpu", mark_stale=False)
    assert row is not None
    assert (row["host_label"], row["current_model"]) == ("box", None)


def test_flagged_workers_say_how_many_jobs_they_run(db: ModuleType) -> None:
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO worker_heartbeats (host_label, queue, concurrency, last_seen)"
            " VALUES ('box', 'fetch', 1, now() - interval '1 hour'),"
            " ('idle', 'fetch', 1, now() - interval '1 hour')"
        )
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, status, claimed_by, worker_id, claim_no,"
            " lease_expires_at) SELECT 't', 'fetch', 'running', 'box', 'w', 1, now()"
            " + interval '1 minute' FROM generate_series(1, 2)"
        )
    (row,) = node_queue.flag_stale_workers_holding_running_jobs()
    assert (row["host_label"], row["running_jobs"]) == ("box", 2)
    assert row["last_flagged_dead_at"] is not None
    assert node_queue.flag_stale_workers_holding_running_jobs() == []


def test_reap_idle_once_works_while_the_reaper_thread_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    model_registry.register(model_registry.ModelSpec("a", object))
    cache = model_cache.ModelCache(idle_ttl_s=1, now_fn=lambda: now)
    cache.require_model("a")
    now = 100.0
    monkeypatch.setenv("AI_LEADS_DISABLE_GPU_IDLE_REAPER", "1")
    assert cache.reap_idle_once() is True
    assert cache.current_model is None
