"""Each function of 0.3.0 takes what its apps pass: names, order, keywords and defaults."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    client,
    config,
    declare,
    model_registry,
    node_queue,
    worker_control,
)
from tests.support import tabled

CONTRACT = """
queue_workflows.configure(*, db_url_env=..., video_model_ids=..., node_module_package=...,
    host_label_env=..., host_priority_env=..., container_prefix=..., ingest_queues=...,
    ingest_default_budget_s=..., embedded=None)
queue_workflows.set_node_module_package(_, /)
queue_workflows.set_node_resolver(_, /)
queue_workflows.set_builtin_model_registrar(_, /)
queue_workflows.set_workflow_provider(load_workflow, pipeline_schema, *, resolve_ref=None)
queue_workflows.set_invoke_context(_, /)
queue_workflows.register_ingest_task(name, callable_)
queue_workflows.set_ingest_schedule(schedule)
queue_workflows.get_config()
queue_workflows.register_node(name, module_or_callable)
queue_workflows.register_input_widget(name, _, /)
queue_workflows.set_on_node_completed(_, /)
queue_workflows.submit_input(run_id, node_id, value, *, conn=None)
queue_workflows.cancel_run(_, /)
queue_workflows.cancel_job(_, /)
queue_workflows.retry_run(run_id, *, from_node=None)
queue_workflows.retry_job(_, /)
orchestrator.main(argv=None)
claim_worker.main(argv=None)
scheduler.main(argv=None)
worker_control.main(argv=None)
db.db_url()
db.get_pool()
db.close_pool()
db.connection()
db.cursor()
db.bootstrap(*, migrations_dir=..., version_table="queue_schema_version")
db.downgrade(*, to_version=0, migrations_dir=..., version_table="queue_schema_version",
    allow_data_loss=False)
db.current_schema_version(*, version_table="queue_schema_version")
db.wait_for_schema(min_version, *, version_table="queue_schema_version", timeout_s=120,
    poll_s=0.5, sleep_fn=None)
migrations.dir()
run_store.insert_run(*, run_id, workflow_name, parcel_id=None, out_dir=None, status="queued",
    priority=100, mode="node", context=None, conn=None)
run_store.get_run(run_id)
run_store.update_run(run_id, **columns)
run_store.delete_run(run_id)
run_store.reenqueue_running_for_resume()
node_queue.enqueue_node_job(*, run_id, node_id, node_module, queue, required_model=None,
    inputs=None, priority=100, pipeline_name=None)
node_queue.insert_skipped_job(*, run_id, node_id)
node_queue.get_node_job(job_id)
node_queue.list_jobs_for_run(run_id)
node_queue.claim_next_cpu_job(worker_lane=0, *, host=None, lease_s=600, host_priority=0)
node_queue.claim_next_gpu_job(worker_lane=0, current_model=None, *, host=None, lease_s=600,
    host_priority=0, known_models=None)
node_queue.mark_completed(job_id, *, context_delta, seconds, vm_rss_mb_peak=None)
node_queue.mark_failed(job_id, *, error, seconds=None)
node_queue.mark_awaiting_input(job_id)
node_queue.set_resolved_inputs(job_id, resolved_inputs)
node_queue.set_input_spec(run_id, node_id, spec)
node_queue.reclaim_expired_leases()
node_queue.requeue_job_for_retry(job_id)
node_queue.reclaim_all_running_for_resume()
node_queue.requeue_running_for_worker(host_label, queue)
node_queue.cancel_queued_jobs_for_run(run_id)
node_queue.list_unprocessed_dispatch_events(*, limit=50)
node_queue.count_unprocessed_dispatch_events()
node_queue.record_node_event(*, run_id, node_id, event_type, job_id=None, attempt=0,
    host_label=None, queue=None, model=None, elapsed_s=None, error=None, detail=None)
node_queue.prune_node_events(older_than_days=30)
node_queue.snapshot()
node_queue.upsert_worker_heartbeat(*, host_label, queue, concurrency, current_model=None,
    known_models=None, update_current_model=True)
node_queue.clear_worker_current_model(host_label, queue, *, mark_stale=True)
node_queue.flag_stale_workers_holding_running_jobs(*, stale_after_s=None)
node_queue.enqueue_ingest_job(*, task_name, queue, reason="tick", priority=100, args=None,
    conn=None)
node_queue.get_ingest_job(job_id)
node_queue.claim_next_ingest_job(queue, *, host=None, lease_s=600)
node_queue.mark_ingest_completed(job_id, *, result=None, seconds=None)
node_queue.mark_ingest_failed(job_id, *, error, seconds=None)
node_queue.reclaim_expired_ingest_leases()
node_queue.ingest_snapshot()
dispatcher.start_run(run_id)
dispatcher.on_node_completed(run_id, node_id)
dispatcher.on_node_failed(run_id, node_id)
dispatcher.on_node_awaiting_input(run_id, node_id)
dispatcher.resume_after_input(run_id, node_id, value=None)
dispatcher.resolve_inputs_for_job(job_id, *, job=None)
node_executor.execute_node(job, *, model_cache=None, cancel_event=None, status_callback=None)
ingest_executor.execute_ingest_job(job)
node_pool.NodePool(register_builtins=None, *, cpu_workers=..., gpu_workers=...)
node_pool.NodePool.start(self)
node_pool.NodePool.stop(self)
input_listener.InputListener()
claim_worker.ClaimWorker(*, queue, host=None, host_priority=None, lease_s=600, model_cache=None)
claim_worker.ClaimWorker.run_once(self)
claim_worker.ClaimWorker.run_forever(self)
claim_worker.ClaimWorker.stop(self)
claim_worker.ClaimWorker.requeue_inflight_for_control(self)
claim_worker.budget_for(job)
scheduler.ScheduleEntry(name, minute, task_name, queue, hours=None)
scheduler.ScheduleEntry.next_fire_at(self, now)
scheduler.enqueue_due(due, *, reason="tick")
scheduler.enqueue_boot_kick(schedule=None)
scheduler.Ticker(*, schedule=None, now_fn=..., sleep_fn=None)
worker_control.set_worker_control(host_label, queue, *, desired_state, stop_policy="hard",
    requested_by=None, conn=None)
worker_control.get_worker_control(host_label, queue)
worker_control.desired_state_for(host_label, queue)
worker_control.enable_worker(host_label, queue)
worker_control.disable_worker(host_label, queue)
worker_control.WorkerControlWatcher(_, /)
model_registry.ModelSpec(id, loader, unloader=None, est_vram_gb=0.0)
model_registry.register(_, /)
model_registry.get(_, /)
model_registry.known_ids()
model_registry.clear_for_tests()
model_cache.ModelCache(*, publish_current_model=None, idle_ttl_s=None, register_builtins=None)
model_cache.ModelCache.require_model(self, _, /)
model_cache.ModelCache.drop_cache(self)
model_cache.ModelCache.mark_busy(self)
model_cache.ModelCache.mark_idle(self)
model_cache.ModelCache.reap_idle_once(self)
model_cache.gpu_should_unload(handle_present, active, idle_s, ttl_s)
gpu_model_cache.gpu_model_cache()
refs.resolve_ref(value, context)
"""
"""A default `...` is any. `_` is a name that the contract leaves open."""
CALLS = [line for line in CONTRACT.replace("\n    ", " ").splitlines() if line]


def called(line: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """Return the function that a line names, and the signature of 0.3.0."""
    path, _, parameters = line.partition("(")
    found: Any = queue_workflows
    for name in path.removeprefix("queue_workflows.").split("."):
        found = getattr(found, name)
    made: dict[str, Any] = {}
    exec(f"def f({parameters}: ...", made)
    return found, inspect.signature(made["f"])


def differences(ours: inspect.Signature, theirs: inspect.Signature) -> Iterator[str]:
    given = [p for p in theirs.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    places = [p for p in ours.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    for index, name in enumerate(p.name for p in given):
        if index >= len(places) or name not in ("_", places[index].name):
            yield f"argument {index} is not {name}"
    for name, wanted in theirs.parameters.items():
        found = ours.parameters.get(name)
        if name == "_":
            continue
        if found is None or found.kind is found.POSITIONAL_ONLY:
            yield f"{name} cannot be passed by its name"
        elif wanted.default not in (..., wanted.empty) and found.default != wanted.default:
            yield f"{name} is {found.default!r}, not {wanted.default!r}"
    known = {*theirs.parameters, *(p.name for p in places[: len(given)])}
    for name, found in ours.parameters.items():
        variable = found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD)
        if name not in known and found.default is found.empty and not variable:
            yield f"{name} has to be passed"


def test_a_call_of_0_3_0_is_a_call_of_ours() -> None:
    for line in CALLS:
        with tabled.case(line):
            function, theirs = called(line)
            assert [*differences(inspect.signature(function), theirs)] == []


def test_the_modules_of_0_3_0_are_attributes_and_commands() -> None:
    for name in {line.partition(".")[0] for line in CALLS} - {"queue_workflows"}:
        assert importlib.import_module(f"queue_workflows.{name}") is getattr(queue_workflows, name)
    for name in ("hw_metrics", "cgroup_attribution"):
        assert getattr(queue_workflows, name)


def test_what_an_app_reads_of_the_configuration_is_there() -> None:
    found = queue_workflows.get_config()
    assert isinstance(found, queue_workflows.EngineConfig)
    names = (
        "node_resolver", "builtin_model_registrar", "workflow_loader", "pipeline_schema_loader",
        "resolve_ref", "invoke_context", "ingest_task_map", "ingest_schedule",
        "resolve_node_module", "get_resolve_ref",
    )  # fmt: skip
    assert [name for name in names if not hasattr(found, name)] == []


def test_the_hooks_of_0_3_0_keep_the_names_of_their_arguments() -> None:
    def load(reason: str) -> dict[str, str]:
        return {"reason": reason}

    entry = queue_workflows.scheduler.ScheduleEntry("hourly", 5, "load", "fetch")
    queue_workflows.register_ingest_task(name="load", callable_=load)
    queue_workflows.set_ingest_schedule(schedule=[entry])
    assert config.get_config().ingest_task_map["load"] is load
    assert config.get_config().ingest_schedule == [entry]


@pytest.mark.parametrize("queue", ["cpu", "gpu", "fetch"])
def test_a_worker_has_the_attributes_of_0_3_0(queue: str) -> None:
    own = SimpleNamespace(require_model=lambda name: json.dumps(name))
    worker = claim_worker.ClaimWorker(
        queue=queue, host="box", host_priority=-1, lease_s=30, model_cache=own
    )
    found = (worker.queue, worker.host, worker.host_priority, worker.lease_s)
    assert found == (queue, "box", -1, 30)
    assert worker.model_cache is own
    assert worker.heartbeat is not None


def test_a_gpu_worker_without_a_cache_of_its_own_has_that_of_the_process() -> None:
    worker = claim_worker.ClaimWorker(queue="gpu")
    assert worker.model_cache is queue_workflows.gpu_model_cache.gpu_model_cache()
    assert claim_worker.ClaimWorker(queue="cpu").model_cache is None


def test_the_exit_code_and_the_policies_are_those_of_0_3_0() -> None:
    assert worker_control.EXIT_CONTROL_HARD_STOP == 79
    assert "hard" in worker_control.STOP_POLICIES
    assert all(
        [*inspect.signature(each).parameters] == ["worker", "on_exit"]
        for each in worker_control.STOP_POLICIES.values()
    )


def test_the_inputs_of_a_run_are_called_context_by_functions_of_0_3_0_alone() -> None:
    named = {
        f"{module.__name__}.{name}"
        for module in public_modules()
        if module.__name__ != "queue_workflows.refs"  # there it is what refs are resolved in
        for name, function in vars(module).items()
        if inspect.isfunction(function) and not name.startswith("_")
        if "context" in inspect.signature(function).parameters
    }
    assert named == {"queue_workflows.run_store.insert_run"}
    assert "context" not in vars(declare.Workflow)
    for submit in (client.Client, client.AsyncClient):
        assert "inputs" in inspect.signature(submit("http://x").runs.submit).parameters


def public_modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(queue_workflows.__path__, "queue_workflows."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(found.name)


@pytest.mark.parametrize("name", [None, 5])
def test_a_name_that_is_no_text_raises_what_a_wrong_name_raises(name: Any) -> None:
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: worker_control.set_worker_control(
            "h", "gpu", desired_state="off", stop_policy=name)),
        (ValueError, lambda: node_queue.enqueue_node_job(
            run_id="r", node_id="n", node_module="m", queue=name)),
        (ValueError, lambda: node_queue.enqueue_ingest_job(task_name=name, queue="fetch")),
        (KeyError, lambda: model_registry.get(name)),
    ]  # fmt: skip
    for error, call in refused:
        with pytest.raises(error):
            call()
