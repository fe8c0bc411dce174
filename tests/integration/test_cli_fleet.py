"""Which processes a command starts, and which running ones it counts instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, db, errors, run_store, runs, workers
from queue_workflows.cli import command, fleet, run_views
from queue_workflows.runtime import identity, signals
from queue_workflows.scheduler import ScheduleEntry
from queue_workflows.worker import parent, shapes
from tests.support import console
from tests.support.commands import TOYHOST


def with_nodes() -> None:
    config.register_node("n", dict)


def with_tasks() -> None:
    config.register_ingest_task("t", dict)


ONE_OF_EACH = (shapes.Entry("fetch"), shapes.Entry("load"))


def test_an_app_with_everything_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nodes()
    with_tasks()
    config.set_builtin_model_registrar(dict)
    config.set_ingest_schedule([ScheduleEntry("e", minute=0, task_name="t", queue="fetch")])
    assert fleet.roles() == fleet.Roles(5, 1, ONE_OF_EACH, scheduler=True)
    assert fleet.roles(ingest=False) == fleet.Roles(5, 1, (), scheduler=False)
    assert fleet.roles(cpu=0, gpu=2) == fleet.Roles(0, 2, ONE_OF_EACH, scheduler=True)
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS", "3")
    monkeypatch.setenv("AI_LEADS_WORKFLOW_GPU_WORKERS", "2")
    assert fleet.roles()[:2] == (3, 2)


def test_a_gpu_worker_is_started_for_models_or_by_number() -> None:
    with_nodes()
    assert fleet.roles().gpu == 0
    assert fleet.roles(gpu=1).gpu == 1


def test_an_app_gets_no_workers_that_it_has_no_use_for() -> None:
    with pytest.raises(errors.InvalidConfig, match="nothing to start"):
        fleet.roles()
    with_tasks()
    assert fleet.roles() == fleet.Roles(0, 0, ONE_OF_EACH, scheduler=True)
    with pytest.raises(
        errors.InvalidConfig, match="--cpu, --gpu and --cards need an app that knows nodes"
    ):
        fleet.roles(gpu=1)


def test_a_scheduler_is_started_for_rows_of_the_table_that_are_still_to_come() -> None:
    with_nodes()
    assert fleet.roles().scheduler is True
    assert fleet.roles(ingest=False).scheduler is False


def test_each_named_gpu_gets_a_worker_of_its_own() -> None:
    with_nodes()
    wanted = fleet.roles(cpu=1, cards=[0, 3])
    assert (wanted.gpu, wanted.cards) == (0, (0, 3))
    assert wanted.describe() == "orchestrator, 1 cpu, gpu on card 0, gpu on card 3, scheduler"
    found = {spec.name: spec.argv for spec in fleet.specs(wanted, app=None, log_level="info")}
    for card in (0, 3):
        argv = found[f"gpu card {card}"]
        assert argv[2:7] == [parent.WORKER, "--queue", "gpu", "--cards", str(card)]
    config.set_builtin_model_registrar(dict)
    assert (fleet.roles(cards=[0]).gpu, fleet.roles().gpu) == (0, 1)


POOL = (shapes.Entry("load", 2), shapes.Entry("load.new", 5))


def test_more_jobs_of_a_queue_than_in_the_pool_run_only_on_request() -> None:
    with_nodes()
    with pytest.raises(errors.InvalidConfig, match="--workers and WORKERS_JSON need an app that"):
        fleet.roles(pool=POOL)
    with_tasks()
    wanted = fleet.roles(cpu=1, pool=POOL)
    assert wanted == fleet.Roles(1, 0, (*POOL, shapes.Entry("fetch")), scheduler=True)
    assert wanted.describe() == "orchestrator, 1 cpu, 2 load, 5 load.new, 1 fetch, scheduler"
    more = fleet.roles(pool=POOL, beside={"load", "fetch"}).ingest
    assert more == (("load", 3), ("load.new", 5), ("fetch", 1))
    with pytest.raises(
        errors.UnknownQueue, match=r"the app has no ingest queue --ingest load\.new"
    ):
        fleet.roles(pool=POOL, beside={"load.new", "fetch"})
    with pytest.raises(errors.UnknownQueue, match="it has fetch, load; did you mean 'fetch'"):
        fleet.roles(pool=POOL, beside={"fetsh"})


def test_a_pool_is_one_worker_process_that_gets_its_list() -> None:
    wanted = fleet.Roles(0, 0, POOL, scheduler=False)
    found = {spec.name: spec.argv for spec in fleet.specs(wanted, app=None, log_level="info")}
    assert list(found) == ["orchestrator", "worker"]
    module, option, text = found["worker"][2:5]
    assert (module, option) == (parent.WORKER, "--workers")
    assert shapes.option(text) == [*POOL]


def test_the_list_of_a_pool_is_json_or_a_file_or_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pool.json"
    file.write_text(shapes.as_json(POOL))
    assert shapes.option(str(file)) == [*POOL]
    monkeypatch.setenv("WORKERS_JSON", '[{"queue": "q"}]')
    assert shapes.option(None) == shapes.option("") == [shapes.Entry("q")]
    file.write_text('[{"queue": "q"}, {"queue": "cpu"}]')
    with pytest.raises(
        errors.InvalidConfig, match=r"pool\.json\[1\]: queue 'cpu' runs workflow nodes"
    ):
        shapes.option(str(file))
    with pytest.raises(errors.InvalidConfig, match=r"none\.json' cannot be read \(No such"):
        shapes.option(str(tmp_path / "none.json"))
    file.write_bytes(b"\xff")
    with pytest.raises(errors.InvalidConfig, match=r"cannot be read \(it is not UTF-8 text\)"):
        shapes.option(str(file))


def test_children_get_app_level_and_the_embedded_server_only_without_a_dsn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = fleet.Roles(3, 0, (shapes.Entry("fetch"),), scheduler=True)
    found = {spec.name: spec for spec in fleet.specs(wanted, app="a:b", log_level="info")}
    assert list(found) == ["orchestrator", "worker"]
    assert found["orchestrator"].argv[2:4] == [parent.ORCHESTRATOR, "--with-scheduler"]
    assert found["worker"][:3] == (
        "worker",
        [sys.executable, "-m", "queue_workflows.claim_worker", "--queue", "cpu", "--slots", "3",
         "--workers", '[{"queue": "fetch", "concurrency": 1}]', "--log-level", "info",
         "--app", "a:b"],
        {"QUEUE_WORKFLOWS_EMBEDDED": "1"},
    )  # fmt: skip
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql:///x")
    named = fleet.specs(wanted, app=None, log_level="info")[0]
    assert named.env is None
    assert "--app" not in named.argv


def test_which_workers_serve_a_queue(db: ModuleType) -> None:
    here = identity.process_prefix("box", os.getpid())
    gone = identity.process_prefix("box", 2**22 - 1)
    rows = [
        (here + "1", "a", os.getpid(), "idle", 0),
        (gone + "1", "b", 2**22 - 1, "busy", 0),
        ("box:1:otherbox:1", "c", 2**22 - 1, "busy", 0),
        ("box:1:otherbox:2", "d", 1, "busy", 60),
        ("box:1:otherbox:3", "e", 1, "parked", 0),
        ("box:1:otherbox:4", "f", 1, "stopped", 0),
        ("box:1:otherbox:5", "h", 1, "throttled", 0),
    ]
    with db.connect() as conn:
        for worker_id, queue, pid, state, age_s in rows:
            conn.execute(
                "INSERT INTO workers (worker_id, host_label, queue, pid, state, last_seen)"
                " VALUES (%s, 'box', %s, %s, %s, now() - %s * interval '1 second')",
                (worker_id, queue, pid, state, age_s),
            )
        conn.execute(
            "INSERT INTO worker_controls (host_label, queue, desired_state)"
            " VALUES ('other', 'a', 'off')"
        )
    assert fleet.unserved(set("abcdefgh")) == set("bdfg"), "a parked one that is ON again goes on"


def test_while_the_database_is_away_a_run_is_left_to_those_who_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    answers: list[set[str] | Exception] = [set(), db.OperationalError("away"), {"cpu"}]

    def unserved(_: set[str]) -> set[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(fleet, "unserved", unserved)
    monkeypatch.setattr(fleet, "switched_off", lambda _: [])
    helper = fleet.RunProcesses(
        {"cpu"}, None, app=None, stop=signals.StopRequest(), log=None, now_fn=lambda: now[0]
    )
    helper.begin()
    running = run_views.RunSnapshot({"status": "running"}, [], [])
    now[0] += fleet.LOOK_EVERY_S
    helper.tick(running)
    helper.tick(running)
    assert len(answers) == 1, "looked at now and then"
    now[0] += fleet.LOOK_EVERY_S
    with pytest.raises(errors.InvalidConfig, match="no worker serves cpu"):
        helper.tick(running)


def test_a_run_gets_a_worker_once_even_if_up_would_start_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, started = [0.0], list[list[str]]()

    def start(_: fleet.Fleet, children: list[Any], log: object) -> None:
        started.append([each.name for each in children])

    monkeypatch.setattr(fleet, "unserved", set)
    monkeypatch.setattr(fleet, "switched_off", lambda _: [])
    monkeypatch.setattr(fleet.Fleet, "start", start)
    wanted = fleet.Roles(0, 0, (), scheduler=False)
    helper = fleet.RunProcesses(
        {"cpu"}, wanted, app=None, stop=signals.StopRequest(), log=None, now_fn=lambda: now[0]
    )
    helper.begin()
    now[0] += fleet.LOOK_EVERY_S
    helper.tick(run_views.RunSnapshot({"status": "running"}, [], []))
    assert started == [["orchestrator", "worker"]]


def test_unfinished_runs_that_the_provider_does_not_know_are_strangers(db: ModuleType) -> None:
    ids = [run_store.insert_run(workflow_name="theirs")["id"] for _ in range(4)]
    run_store.insert_run(workflow_name="done", status="completed")
    run_store.insert_run(workflow_name="step", mode="step")
    ours = {"mine": {"name": "mine", "steps": []}, "odd": {"name": "odd", "steps": 7}}
    for name in ours:
        run_store.insert_run(workflow_name=name)
    assert fleet.strangers() == "", "nobody can tell without a provider"
    config.set_workflow_provider(ours.__getitem__, dict)
    assert fleet.strangers() == f"4 runs of 'theirs': {' '.join(ids[:3])} ..."
    for run_id in ids:
        run_store.update_run(run_id, status="cancelled")
    assert fleet.strangers() == ""


def test_switches_of_this_machine_are_printed_once_and_only_for_queues_without_workers(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_HOST_LABEL", "box")
    now = [0.0]
    wanted = fleet.Roles(1, 0, (), scheduler=False)
    stop = signals.StopRequest()
    helper = fleet.RunProcesses(
        {"cpu"}, wanted, app=None, stop=stop, log=None, now_fn=lambda: now[0]
    )
    monkeypatch.setattr(helper, "_start", lambda _: None)
    workers.disable("box", "all", by="ops", reason="new disk")
    workers.disable("box", "gpu")
    workers.disable("other", "cpu")
    helper.begin()
    for _ in range(2):
        now[0] += fleet.LOOK_EVERY_S
        helper.tick(run_views.RunSnapshot({"status": "running"}, [], []))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "queue-workflows: box all is switched off by ops (new disk):"
        " `queue-worker-control --queue=all --on --host box` turns it on"
    ]
    workers.disable("box", "cpu")
    monkeypatch.setattr(fleet, "unserved", lambda _: set())
    now[0] += fleet.LOOK_EVERY_S
    helper.tick(run_views.RunSnapshot({"status": "running"}, [], []))
    assert capsys.readouterr().err == ""


# --- stop requests

RUN = ("run", "chain", "--app", TOYHOST, "--input", "folder=/tmp")


@pytest.mark.parametrize("moment", ["database", "processes"])
def test_nothing_is_queued_after_a_stop_request(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    made = list[signals.StopRequest]()
    prepare = command.prepare

    def prepared(stop: signals.StopRequest, **more: Any) -> bool:
        made.append(stop)
        if moment == "database":
            stop.request()
        return prepare(stop, **more)

    began = list[fleet.RunProcesses]()

    def begin(self: fleet.RunProcesses) -> None:
        began.append(self)
        made[0].request()

    monkeypatch.setattr(command, "prepare", prepared)
    monkeypatch.setattr(fleet.RunProcesses, "begin", begin)
    said = console.command(*RUN)
    assert said.code == 130
    assert "queue-workflows: stopped before a run was queued\n" in said.err
    assert "is queued" not in said.err
    assert runs.list() == []
    assert len(began) == (moment == "processes")
    if moment == "database":
        started = list[object]()
        monkeypatch.setattr(fleet, "specs", lambda *a, **k: started.append(a) or [])
        config.reset_for_tests()
        assert console.command("up", "--app", TOYHOST).code == 0
        assert started == []
