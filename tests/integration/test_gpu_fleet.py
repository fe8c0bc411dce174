"""Measured times of models, and which worker can take which gpu job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    config,
    gpu_model_cache,
    history,
    model_registry,
    node_queue,
)
from queue_workflows import jobs as jobs_api
from queue_workflows import workers as workers_api
from tests.support import (
    constants,
    factories,
    sweeps,
    timeouts,
    transitions,
    wait,
    worker_reports,
)


def report(conn: Any, worker_id: str = "w1", host: str = "box", **given: Any) -> None:
    """Write the row of a gpu worker: its model, and what it can load."""
    worker_reports.report(conn, transitions.who("gpu", worker_id, host=host), **given)


def claim(conn: Any, worker_id: str = "w1", **more: Any) -> dict[str, Any] | None:
    found = transitions.claim(conn, transitions.who("gpu", worker_id, **more))
    return found[0] if found else None


def learned(conn: Any, model: str, host: str = "box") -> tuple[Any, ...]:
    row = conn.execute(
        "SELECT load_s, loads, run_s, runs FROM gpu_models WHERE model = %s AND host_label = %s",
        (model, host),
    ).fetchone()
    return tuple(row.values()) if row else ()


def gpu_job(conn: Any, model: str | None = "m", **given: Any) -> dict[str, Any]:
    return factories.node(conn, queue="gpu", required_model=model, **given)


# --- what is learned ---------------------------------------------------------------------------


def test_a_completed_job_teaches_the_run_without_the_load(conn: Any) -> None:
    gpu_job(conn)
    job = claim(conn)
    assert job is not None
    node_queue.record_node_event(
        run_id=job["run_id"], node_id=job["node_id"], event_type="model_load_done",
        job_id=job["id"], host_label="box", queue="gpu", model="m", elapsed_s=30.0,
    )  # fmt: skip
    transitions.record(conn, job, seconds=100.0)
    assert learned(conn, "m") == (30.0, 1, 70.0, 1)


def test_the_averages_follow_the_latest(conn: Any) -> None:
    for seconds in (10.0, 20.0, 30.0):
        worker_reports.learn_load(conn, "box", "m", seconds)
    assert learned(conn, "m")[:2] == (pytest.approx(20.0), 3)
    for _ in range(60):
        worker_reports.learn_load(conn, "box", "m", 90.0)
    assert learned(conn, "m")[0] == pytest.approx(90.0, abs=1)


def test_a_lesson_never_waits_for_a_row(conn: Any, db: ModuleType) -> None:
    worker_reports.learn_load(conn, "box", "m", 10.0)
    with db.connect(autocommit=False) as other:
        worker_reports.learn_load(other, "box", "m", 20.0)
        conn.execute("SET lock_timeout = '200ms'")
        worker_reports.learn_load(conn, "box", "m", 30.0)
        other.commit()
    assert learned(conn, "m")[:2] == (15.0, 2)


def test_averages_of_machines_long_gone_are_deleted(conn: Any) -> None:
    report(conn, host="box")
    for host in ("box", "gone", "lately"):
        worker_reports.learn_load(conn, host, "m", 10.0)
    conn.execute(
        "UPDATE gpu_models SET updated_at = now() - interval '31 days' WHERE host_label <> 'lately'"
    )
    assert history.prune()["gpu_models"] == 1
    left = factories.column(conn, "SELECT host_label FROM gpu_models ORDER BY 1")
    assert left == ["box", "lately"]


# --- whom a job fits ---------------------------------------------------------------------------


def test_a_job_too_large_for_the_gpu_is_not_claimed(conn: Any) -> None:
    worker_reports.publish_sizes(conn, "box", {"small": 8.0, "large": 24.0, "unknown": 0.0})
    report(conn, vram_total_mb=12288)
    for model in ("large", "small", "unknown", None):
        gpu_job(conn, model)
    found: list[str | None] = []
    while job := claim(conn):
        found.append(job["required_model"])
    assert found == [None, "small", "unknown"]


def test_a_model_of_24_gb_fits_a_gpu_sold_with_24_gb(conn: Any) -> None:
    worker_reports.publish_sizes(conn, "box", {"large": 24.0})
    report(conn, vram_total_mb=24564)
    gpu_job(conn, "large")
    assert claim(conn, models=["large"]) is not None


def test_the_size_of_a_model_is_known_on_another_machine(conn: Any) -> None:
    worker_reports.publish_sizes(conn, "den", {"large": 24.0})
    report(conn, vram_total_mb=12288)
    gpu_job(conn, "large")
    assert claim(conn, policy="balanced") is None
    assert claim(conn, "w2", policy="balanced") is not None, "a card of unknown size"


def test_a_size_that_changed_is_published_again(conn: Any) -> None:
    for size in (8.0, 16.0, 0.0):
        worker_reports.publish_sizes(conn, "box", {"m": size})
    assert factories.one(conn, "SELECT est_vram_gb IS NULL FROM gpu_models")


def test_a_worker_reports_since_when_it_has_its_model(conn: Any) -> None:
    since: list[Any] = []
    for model in ("m", "m", "n"):
        report(conn, current_model=model, known_models=["m", "n"])
        since.append(factories.one(conn, "SELECT model_since FROM workers"))
    assert since[0] == since[1] < since[2]
    assert factories.one(conn, "SELECT known_models FROM workers") == ["m", "n"]
    report(conn)
    assert factories.one(conn, "SELECT known_models IS NULL FROM workers")


@pytest.mark.parametrize("policy", ["strict", "balanced"])
@pytest.mark.parametrize("newest", [False, True])
def test_a_worker_without_models_leaves_what_others_know(
    conn: Any, policy: str, newest: bool
) -> None:
    run_id = factories.run(conn)
    for model in ("m", "nobody's", None):
        gpu_job(conn, model, run_id=run_id, node_id=str(model))
    who: dict[str, Any] = {"policy": policy, "newest": newest}
    report(conn, "w1")
    report(conn, "knows", "den", known_models=["m"])
    taken = [claim(conn, **who), claim(conn, **who)]
    assert {job["node_id"] for job in taken if job} == {"nobody's", "None"}
    assert claim(conn, **who) is None
    conn.execute("UPDATE workers SET state = 'stopped' WHERE worker_id = 'knows'")
    assert claim(conn, **who) is not None, "now nobody knows it"


def test_a_worker_without_models_leaves_what_a_parked_one_knows(conn: Any) -> None:
    job = gpu_job(conn, "m")
    workers_api.disable("den", "gpu")
    report(conn, "w1")
    report(conn, "knows", "den", known_models=["m"])
    assert claim(conn) is None
    assert unserved(conn) == {"m": "off"}
    explained = jobs_api.explain(job["id"], conn=conn)
    assert explained is not None and not explained["can_run"]
    assert {worker["worker_id"]: worker["detail"] for worker in explained["workers"]} == {
        "w1": "it registers no model, and others know m", "knows": "switched off (hard)",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["strict", "balanced"])
def test_a_claim_that_names_no_models_gets_jobs_of_any_model(
    conn: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_CLAIM_POLICY", policy)
    gpu_job(conn, "m")
    report(conn, "knows", "den", known_models=["m"])
    assert node_queue.claim_next_gpu_job(host="box") is not None


# --- what nobody can take ----------------------------------------------------------------------


class Orchestrator:
    """Sweeps with a clock of their own, after a minute with the database."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 0.0
        self.sweeps = stack.enter_context(sweeps.tasks(lambda: self.now))
        self.after(60)

    def after(self, seconds: float) -> None:
        for _ in range(int(seconds // 5)):
            self.now += 5
            self.sweeps.reclaim()
        self.sweeps.flag_unassignable()


@pytest.fixture
def orchestrators(db: ModuleType) -> Iterator[Callable[[], Orchestrator]]:
    with ExitStack() as stack:
        yield lambda: Orchestrator(stack)


@pytest.fixture
def orchestrator(orchestrators: Callable[[], Orchestrator]) -> Orchestrator:
    return orchestrators()


def flags(conn: Any) -> list[tuple[str, str]]:
    return [(row["reason"], row["detail"]) for row in sweeps.flagged_models(conn)]


def unserved(conn: Any) -> dict[str, str]:
    return {row["model"]: row["reason"] for row in sweeps.unserved_models(conn) if row["reason"]}


def test_why_nobody_takes_it(conn: Any) -> None:
    gpu_job(conn, "m")
    gpu_job(conn, None)
    assert unserved(conn) == {"m": "no_worker", "": "no_worker"}
    report(conn, "w1", "den", known_models=["n"])
    assert unserved(conn) == {"m": "model"}
    worker_reports.publish_sizes(conn, "attic", {"m": 24.0})
    report(conn, "w2", "attic", known_models=["m"], vram_total_mb=12288)
    report(conn, "w1", "den", known_models=["n"], vram_total_mb=49140)
    (row,) = sweeps.unserved_models(conn)
    assert row["reason"] == "vram"
    assert row["detail"] == "it needs 24 GB, and the largest GPU that may load it has 12 GB"
    report(conn, "w3", "box", known_models=["m"], vram_total_mb=81559)
    assert unserved(conn) == {}
    workers_api.disable("box", "gpu")
    report(conn, "w3", "box", known_models=["m"], vram_total_mb=81559)
    (row,) = sweeps.unserved_models(conn)
    assert (row["reason"], row["detail"]) == ("off", "every machine that can take it is off: box")


def test_a_worker_of_an_older_engine_serves_too(conn: Any) -> None:
    gpu_job(conn, "m")
    beat = {"host_label": "old", "queue": "gpu", "concurrency": 1}
    node_queue.upsert_worker_heartbeat(**beat, known_models=["n"])
    assert unserved(conn) == {"m": "model"}
    node_queue.upsert_worker_heartbeat(**beat, known_models=["m"])
    assert unserved(conn) == {}


@pytest.mark.parametrize("change", ["last_seen = now() - interval '1 hour'", "state = 'dead'"])
def test_after_the_way_back_a_machines_heartbeat_counts(conn: Any, change: str) -> None:
    """Its row of `workers` is kept for a day."""
    gpu_job(conn, "m")
    report(conn, "ours", "box", known_models=["n"])
    conn.execute(f"UPDATE workers SET {change}".encode())
    beat = {"host_label": "box", "queue": "gpu", "concurrency": 1}
    node_queue.upsert_worker_heartbeat(**beat, known_models=["m"])
    assert unserved(conn) == {}


def test_a_row_that_a_worker_leaves_is_no_heartbeat_of_its_machine(conn: Any) -> None:
    gpu_job(conn, "m")
    report(conn, "ours", "box", known_models=["m"])
    assert unserved(conn) == {}
    conn.execute("UPDATE workers SET state = 'stopped'")
    assert unserved(conn) == {"m": "no_worker"}


def test_a_job_of_a_run_that_is_over_waits_for_nobody(conn: Any) -> None:
    gpu_job(conn, "m", run_id=factories.run(conn, status="cancelled"))
    assert unserved(conn) == {}


def test_a_flag_is_logged_once_per_reason_and_removed(
    conn: Any, orchestrator: Orchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "queue_workflows.maintenance")
    job = gpu_job(conn, "m")
    orchestrator.after(10)
    assert flags(conn) == [], "a worker that restarts is no reason"
    for _ in range(3):
        orchestrator.after(30)
    assert flags(conn) == [("no_worker", "no gpu worker is alive")]
    report(conn, known_models=["n"])
    for _ in range(3):
        orchestrator.after(30)
    assert [reason for reason, _ in flags(conn)] == ["model"]
    report(conn, known_models=["m"])
    for _ in range(3):
        orchestrator.after(30)
    assert flags(conn) == []
    kinds = "SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id"
    assert factories.column(conn, kinds, job["id"]) == ["unassignable"] * 2 + ["assignable"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_a_model_is_not_flagged_for_the_time_of_an_outage(
    conn: Any, orchestrator: Orchestrator
) -> None:
    gpu_job(conn, "m")
    orchestrator.after(10)
    orchestrator.now += 60
    orchestrator.sweeps.flag_unassignable()
    assert flags(conn) == []
    orchestrator.sweeps.reclaim()
    orchestrator.sweeps.flag_unassignable()
    assert flags(conn) == []
    for _ in range(4):
        orchestrator.after(30)
    assert flags(conn) == [("no_worker", "no gpu worker is alive")]


def test_a_flag_is_not_shown_above_a_worker_that_takes_the_jobs(
    conn: Any, orchestrator: Orchestrator
) -> None:
    gpu_job(conn, "m")
    orchestrator.after(30)
    orchestrator.after(30)
    assert flags(conn) == [("no_worker", "no gpu worker is alive")]
    report(conn, known_models=["n"])
    assert flags(conn) == [("model", "no live gpu worker knows the model")]
    report(conn, known_models=["m"])
    assert flags(conn) == [], "the sweep deletes the flag later"


def test_each_waiting_job_has_the_event_of_its_own_model(
    conn: Any, orchestrator: Orchestrator
) -> None:
    jobs = [gpu_job(conn, "m"), gpu_job(conn, None)]
    orchestrator.after(30)
    orchestrator.after(30)
    logged = factories.column(conn, "SELECT job_id FROM workflow_node_events ORDER BY 1")
    assert logged == sorted(job["id"] for job in jobs)


def test_two_orchestrators_say_it_once(
    conn: Any, orchestrators: Callable[[], Orchestrator], caplog: pytest.LogCaptureFixture
) -> None:
    gpu_job(conn, "m")
    for one in [orchestrators(), orchestrators()] * 2:
        one.after(30)
    assert len(caplog.records) == 1
    assert factories.one(conn, "SELECT count(*) FROM workflow_node_events") == 1


def test_many_waiting_jobs_get_a_hundred_events(conn: Any, orchestrator: Orchestrator) -> None:
    run_id = factories.run(conn)
    conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model)"
        " SELECT %s, i::text, 'm', 'gpu', 'm' FROM generate_series(1, 300) i",
        (run_id,),
    )
    orchestrator.after(0)
    orchestrator.after(30)
    assert factories.one(conn, "SELECT count(*) FROM workflow_node_events") == 100
    assert [row["jobs"] for row in sweeps.flagged_models(conn)] == [300]
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    orchestrator.after(0)
    assert sweeps.flagged_models(conn) == []


# --- who gets what -----------------------------------------------------------------------------


def test_a_cold_worker_leaves_the_jobs_of_a_model_to_the_warm_one(conn: Any) -> None:
    report(conn, "warm", current_model="m")
    gpu_job(conn)
    assert claim(conn, "cold", policy="balanced") is None
    assert claim(conn, "warm", policy="balanced", model="m") is not None


@pytest.mark.parametrize("state", ["silent", "parked"])
def test_nothing_is_left_to_a_worker_that_takes_nothing(conn: Any, state: str) -> None:
    report(conn, "warm", current_model="m")
    change = "state = 'parked'" if state == "parked" else "last_seen = now() - interval '1 minute'"
    conn.execute(f"UPDATE workers SET {change}".encode())
    gpu_job(conn)
    assert claim(conn, "cold", policy="balanced") is not None


@pytest.mark.parametrize("who", [
    {"models": ["b", "d"]},
    {"models": ["b", "d"], "newest": True},
    {"model": "b"},
    {"models": ["b", "d"], "policy": "balanced", "grace_s": 0.0},
    {"models": ["b", "d"], "policy": "balanced", "grace_s": 0.0, "newest": True},
])  # fmt: skip
def test_a_job_of_a_run_that_is_over_is_not_the_first_of_its_model(
    conn: Any, who: dict[str, Any]
) -> None:
    """Nothing but a sweep ends a job that came in beside the end of its run."""
    over, live = factories.run(conn, status="cancelled"), factories.run(conn)
    jobs = (
        (over, "left", "d", 1), (live, "cold", "d", 50), (live, "other", "b", 10),
        (over, "newest", "b", 10),
    )  # fmt: skip
    for run_id, name, model, priority in jobs:
        gpu_job(conn, model, run_id=run_id, node_id=name, priority=priority)
    conn.execute("UPDATE workflow_node_jobs SET created_at = now() - interval '1 minute'")
    claimant = transitions.who("gpu", "w1", **who)
    worker_reports.report(conn, claimant)
    rows = {row["node_id"]: row for row in conn.execute("SELECT * FROM workflow_node_jobs")}
    for name in ("other", "cold"):
        explained = jobs_api.explain(rows[name]["id"], conn=conn)
        assert explained is not None
        assert [worker["clause"] for worker in explained["workers"]] == ["next"], name
        assert transitions.claim_node(conn, claimant)["node_id"] == name
        conn.execute("UPDATE workflow_node_jobs SET worker_id = 'w' WHERE status = 'running'")
    assert transitions.claim(conn, claimant) == []


@pytest.mark.parametrize(("newest", "expected"), [(False, "warm older"), (True, "warm newer")])
@pytest.mark.parametrize("models", [None, ["b", "d"]])
def test_the_best_band_is_that_of_runs_that_are_not_over(
    conn: Any, newest: bool, expected: str, models: list[str] | None
) -> None:
    over, live = factories.run(conn, status="cancelled"), factories.run(conn)
    gpu_job(conn, "d", run_id=over, node_id="left", priority=1)
    for name, model in (("cold", "d"), ("warm older", "b"), ("warm newer", "b"), ("last", "d")):
        gpu_job(conn, model, run_id=live, node_id=name)
    job = claim(conn, model="b", models=models, newest=newest)
    assert job is not None and job["node_id"] == expected


def test_jobs_of_runs_that_are_over_do_not_count_for_their_model(conn: Any) -> None:
    over, live = factories.run(conn, status="cancelled"), factories.run(conn)
    for number in range(20):
        gpu_job(conn, "m", run_id=over, node_id=str(number))
    gpu_job(conn, "m", run_id=live)
    report(conn, "warm", current_model="m")
    assert claim(conn, "cold", policy="balanced") is None, "one job: the warm one gets there sooner"


def test_a_policy_that_is_none_is_the_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.gpu_claim_policy() == "strict"
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_CLAIM_POLICY", "balanced")
    assert config.gpu_claim_policy() == "balanced"
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_CLAIM_POLICY", "fair")
    assert [config.gpu_claim_policy() for _ in range(2)] == ["strict", "strict"]
    assert len(caplog.records) == 1 and "fair" in caplog.text


def test_the_knob_decides_for_apps_that_claim_by_themselves(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(conn, "warm", current_model="m")
    gpu_job(conn)
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_CLAIM_POLICY", "balanced")
    assert node_queue.claim_next_gpu_job(host="box") is None
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_CLAIM_POLICY", "strict")
    assert node_queue.claim_next_gpu_job(host="box") is not None


def test_a_worker_reports_its_gpu_its_models_and_their_sizes(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.gpu_models.vram_total_mb", lambda _: 12000)
    model_registry.register(model_registry.ModelSpec("m", loader=dict, est_vram_gb=3.5))
    worker = claim_worker.ClaimWorker(queue="gpu", host="box", on_exit=lambda _: None)
    explained = (
        "SELECT w.known_models = ARRAY['m'] AND w.vram_total_mb = 12000"
        " AND h.vram_total_mb = 12000 AND g.est_vram_gb = 3.5"
        " AND w.detail -> 'claim' ->> 'policy' = 'strict'"
        " FROM workers w JOIN worker_heartbeats h USING (host_label, queue)"
        " JOIN gpu_models g USING (host_label)"
    )
    thread = threading.Thread(target=worker.run_forever)
    thread.start()
    try:
        wait.until(lambda: factories.column(conn, explained) == [True])
    finally:
        worker.stop()
        thread.join()
        model_registry.clear_for_tests()


def test_the_first_claim_waits_for_the_size_of_the_gpu(
    conn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nPATH=/usr/bin:/bin\nsleep 0.5\necho 0, GPU-aa, 12288\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    timeouts.wait_for_gpu_sizes(monkeypatch, 60.0)
    monkeypatch.setenv("DL_HEARTBEAT_SEC", "0.1")  # it publishes the size
    queue_workflows.register_node("m", lambda: None)
    for name, gb in (("large", 24.0), ("small", 8.0)):
        model_registry.register(model_registry.ModelSpec(name, dict, est_vram_gb=gb))
    large, small = gpu_job(conn, "large"), gpu_job(conn, "small")
    worker = claim_worker.ClaimWorker(queue="gpu", host="box", on_exit=lambda _: None)
    try:
        assert worker.run_once()
        assert not worker.run_once()
    finally:
        model_registry.clear_for_tests()
        gpu_model_cache.reset_for_tests()
    assert [(node_queue.get_node_job(job["id"]) or {})["status"] for job in (large, small)] == [
        "queued", "completed",
    ]  # fmt: skip


def test_a_worker_of_the_version_before_claims_on(conn: Any) -> None:
    """Its call has three arguments less, and means the strict policy."""
    gpu_job(conn, "m")
    row = conn.execute(
        "SELECT queue_workflows_node_step('w', 'box', 'gpu', 600, true, true, true, false, NULL,"
        " NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL) AS job"
    ).fetchone()
    assert row["job"]["required_model"] == "m"
