"""`queue_workflows.testing` runs workflows of test apps to their end."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    config,
    db,
    errors,
    jobs,
    model_registry,
    node_queue,
    run_store,
    testing,
)
from queue_workflows.scheduler import ScheduleEntry
from tests.support import factories, flow, invariants, task_app

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ScheduleEntry("nightly", minute=30, task_name="note", queue="notes", hours={3})
TURNOUT = [{"label": "Left", "value": "l"}, {"label": "Right", "value": "r"}]
Flows = testing.Harness


def host() -> None:
    """Every kind of thing that an app registers."""
    steps = [
        flow.step("s"),
        flow.ask("q", "turnout", prompt="?", turnout_options=TURNOUT, depends_on=["s"]),
        flow.step("g", depends_on=["q"]),
    ]
    made = {
        "asking": steps,
        "plain": steps[:1],
        "keyed": [flow.step("k")],
        "patient": [flow.ask("q", "any", timeout_s=60, default="none")],
    }
    pipelines = {
        "s": [
            {"id": "a", "node": "give"},
            {"id": "b", "node": "ok", "depends_on": ["a"]},
        ],
        "k": [{"id": "a", "node": "give", "retries": 1, "lock_key": "one"}],
        "g": [{"id": "m", "node": "predict", "gpu": True, "model": "tiny"}],
    }
    queue_workflows.configure(ingest_queues={"notes"}, db_url_env="OWN_VARIABLE")
    queue_workflows.register_node("give", lambda: {"v": 1})
    queue_workflows.register_node("ok", flow.nothing)
    queue_workflows.register_node("predict", lambda model_handle: {"size": model_handle})
    queue_workflows.set_workflow_provider(
        lambda name: {"name": name, "steps": made[name]},
        lambda name: {"name": name, "nodes": pipelines[name]},
    )
    spec = model_registry.ModelSpec("tiny", lambda: 7)
    queue_workflows.set_builtin_model_registrar(lambda: model_registry.register(spec))
    queue_workflows.register_ingest_task("note", lambda reason, args: {"why": reason, **args})
    queue_workflows.set_ingest_schedule([ENTRY])


@pytest.fixture
def flows(db: ModuleType, dsn: str, tmp_path: Path) -> Iterator[Flows]:
    with testing.harness(app=host, dsn=dsn, own=True, out=tmp_path) as made:
        yield made
        with db.connect() as conn:
            assert invariants.broken(conn, slack_s=5) == []


# --- runs


def test_a_run_goes_to_its_end_through_every_role_without_thread_or_sleep(
    flows: Flows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a test of a host waits for nothing and starts no thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(time, "sleep", refused)
    threads = list[threading.Thread]()
    queue_workflows.register_node("give", lambda: threads.append(threading.current_thread()))
    flows.crash("s/b", times=2)
    done = flows.run_workflow("asking", {"x": 1}, answers={"q": "r"}).completed()
    assert threads == [threading.main_thread()]
    assert done.outputs == {"s/a": {}, "s/b": {}, "q": {"answer": "r"}, "g/m": {"size": 7}}
    assert (run_store.get_run(done.run_id) or {})["context"] == {"x": 1}


def test_a_run_without_its_answer_waits_and_goes_on_when_it_comes(flows: Flows) -> None:
    waits = flows.run_workflow("asking")
    assert (waits.status, list(waits.waiting)) == ("running", ["q"])
    assert waits.waiting["q"]["turnout_options"] == TURNOUT
    with pytest.raises(AssertionError, match="node q waits for an answer"):
        waits.completed()
    with pytest.raises(errors.InputRefused, match="one of"):
        flows.answer(waits.run_id, "q", "up")
    asked = list[Any]()

    def choose(spec: Any) -> str:
        asked.append(spec["prompt"])
        return spec["turnout_options"][0]["value"]

    done = flows.finish(waits.run_id, answers={"q": choose}).completed()
    assert (asked, done.outputs["q"]) == (["?"], {"answer": "l"})


def test_the_clock_moves_to_a_job_that_is_not_due(flows: Flows) -> None:
    run_id = flows.submit("plain")
    flows.work()
    assert flows.result(run_id).completed()
    job = jobs.enqueue(task_name="note", queue="notes")
    with db.connect() as conn:
        conn.execute("UPDATE ingest_jobs SET available_at = now() + interval '2 hours'")
    assert flows.work() == 0
    flows.advance(7100)
    assert flows.work() == 0
    flows.advance(101)
    assert flows.work() == 1
    assert (node_queue.get_ingest_job(job) or {})["status"] == "completed"


# --- time


def test_the_schedule_is_fired_by_the_clock_that_is_moved(flows: Flows) -> None:
    flows.advance_to(ENTRY.next_fire_at(flows.now()))
    (job_id,) = flows.tick()
    assert flows.tick() == []
    flows.work()
    assert (node_queue.get_ingest_job(job_id) or {})["result"] == {"why": "tick"}


def test_a_lease_lapses_by_the_clock_that_is_moved(flows: Flows) -> None:
    run_id = flows.submit("plain")
    flow.start_queued()
    held = node_queue.claim_next_cpu_job(lease_s=600)
    assert held is not None
    flows.advance(599)
    assert flows.work() == 0
    flows.advance(2)
    found = flows.finish(run_id).completed().nodes["s/a"]
    assert (found.claims, found.crashes) == (2, 0)


def test_a_question_times_out_by_the_clock_that_is_moved(flows: Flows) -> None:
    waits = flows.run_workflow("patient")
    flows.advance(59)
    assert flows.finish(waits.run_id).status == "running"
    flows.advance(2)
    assert flows.finish(waits.run_id).completed().outputs["q"] == {"answer": "none"}


def test_a_retried_job_is_admitted_with_its_lock_key(flows: Flows) -> None:
    flows.fail("k/a")
    done = flows.run_workflow("keyed").completed()
    assert (done.nodes["k/a"].attempts, done.nodes["k/a"].claims) == (1, 2)


def test_time_does_not_go_back(flows: Flows) -> None:
    with pytest.raises(ValueError, match="does not go back"):
        flows.advance(-1)


# --- trouble


def test_a_failure_at_a_node_is_that_nodes(flows: Flows) -> None:
    struck = flows.fail("s/b", KeyError("lost"))
    failed = flows.run_workflow("plain")
    assert (failed.status, failed.failures) == ("failed", {"s/b": "KeyError: 'lost'"})
    assert "KeyError: 'lost'" in (failed.nodes["s/b"].traceback or "")
    assert failed.outputs == {"s/a": {"v": 1}}
    with pytest.raises(AssertionError, match=r"node s/b failed: KeyError(?s:.*)Traceback"):
        failed.completed()
    done = flows.retry(failed.run_id).completed()
    assert (struck.met, done.nodes["s/b"].claims, done.nodes["s/a"].claims) == (1, 2, 1)


def test_crashes_are_survived_and_the_third_is_poison(flows: Flows) -> None:
    flows.crash("s/*", times=2)
    done = flows.run_workflow("plain").completed()
    assert (done.nodes["s/a"].crashes, done.nodes["s/a"].claims) == (2, 3)
    flows.crash("s/b", times=None)
    assert "poison" in (flows.run_workflow("plain").nodes["s/b"].error or "")


def test_a_hanging_handler_ends_by_cancel_or_by_the_watchdog(flows: Flows) -> None:
    flows.hang("s/a")
    cancelled = flows.run_workflow("plain")
    assert (cancelled.status, cancelled.nodes["s/a"].status) == ("cancelled", "cancelled")
    flows.hang("s/b", until="budget")
    done = flows.run_workflow("plain").completed()
    assert (done.nodes["s/b"].trips, done.nodes["s/b"].claims) == (1, 2)
    with pytest.raises(ValueError, match="cancelled, budget"):
        flows.hang("s/a", until="later")


@pytest.mark.parametrize(
    ("fault", "status"), [("fail", "failed"), ("crash", "completed"), ("hang", "cancelled")]
)
def test_a_task_meets_the_same_trouble(flows: Flows, fault: str, status: str) -> None:
    getattr(flows, fault)("note")
    assert flows.run_task("note", {"box": "in"}, queue="notes")["status"] == status
    again = flows.run_task("note", {"box": "in"}, queue="notes")
    assert again["result"] == {"why": "tick", "box": "in"}


# --- tasks of every kind


@pytest.mark.parametrize("kind", task_app.KINDS)
def test_a_task_of_any_kind_runs_and_is_cancelled(flows: Flows, tmp_path: Path, kind: str) -> None:
    task_app.setup()
    args = {"folder": str(tmp_path)}
    flows.hang(kind)
    assert flows.run_task(kind, args, queue=task_app.QUEUE)["status"] == "cancelled"
    ended = kind in task_app.ENDS_BY_ITSELF
    assert task_app.lines(tmp_path) == ([f"{kind} begins", f"{kind} tidies"] if ended else [])
    (tmp_path / "go").touch()
    assert flows.run_task(kind, args, queue=task_app.QUEUE)["result"] == {"kind": kind}


def test_an_async_task_runs_in_an_async_test(flows: Flows, tmp_path: Path) -> None:
    task_app.setup()
    (tmp_path / "go").touch()

    async def a_test_of_a_host() -> dict[str, Any]:
        return flows.run_task("async", {"folder": str(tmp_path)}, queue=task_app.QUEUE)

    assert asyncio.run(a_test_of_a_host())["result"] == {"kind": "async"}


def test_tasks_that_a_decorator_registered_at_import_are_there_in_every_test(
    db: ModuleType, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prices.py").write_text(
        "import queue_workflows\n"
        "@queue_workflows.register_ingest_task('load', retries=1)\n"
        "def load(*, day): return {'day': day}\n"
        "def setup(): queue_workflows.configure(ingest_queues={'prices'})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with testing.harness(app="prices:setup", dsn=dsn, own=True) as flows:
            flows.fail("load")
            row = flows.run_task("load", {"day": 1}, queue="prices")
            assert (row["result"], row["attempts"]) == ({"day": 1}, 1)
    sys.modules.pop("prices")


# --- what is left behind


def test_a_harness_leaves_configuration_models_and_environment_as_they_were(
    db: ModuleType, dsn: str
) -> None:
    queue_workflows.register_node("mine", flow.nothing)
    spec = model_registry.ModelSpec("own", lambda: 1)
    model_registry.register(spec)
    before, environment = vars(config.get_config()).copy(), dict(os.environ)
    with testing.harness(app=host, dsn=dsn, own=True) as flows:
        assert set(config.get_config().node_map) == {"give", "ok", "predict"}
        assert config.database_url() == dsn
        folder = flows.out
        flows.run_workflow("plain").completed()
    assert vars(config.get_config()) == before
    assert (model_registry.known_ids(), dict(os.environ)) == (("own",), environment)
    assert not folder.exists()
    model_registry.clear_for_tests()


def test_an_app_that_wires_itself_in_by_its_import_may_come_twice(
    db: ModuleType, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once_only.py").write_text(
        "import queue_workflows\nqueue_workflows.register_node('n', dict)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with testing.harness(app="once_only", dsn=dsn, own=True):
            assert set(config.get_config().node_map) == {"n"}
    del sys.modules["once_only"]


def test_a_harness_begins_with_an_empty_database(db: ModuleType, dsn: str) -> None:
    with db.connect() as conn:
        factories.node(conn)
        factories.ingest(conn)
    with testing.harness(app=host, dsn=dsn, own=True), db.connect() as conn:
        for table in ("workflow_runs", "workflow_node_jobs", "ingest_jobs", "ingest_job_events"):
            assert factories.one(conn, f"SELECT count(*) FROM {table}") == 0
        assert db.current_schema_version() == db.REQUIRED_VERSION


# --- databases


def test_a_scratch_database_is_new_has_the_schema_and_goes(db: ModuleType, dsn: str) -> None:
    with testing.database(dsn) as made, psycopg.connect(made) as conn:
        name = conn.info.dbname
        assert name.endswith("_test")
        assert name != psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        assert conn.execute("SELECT count(*) FROM workflow_runs").fetchone() == (0,)
        conn.close()
        with testing.database(dsn) as other:
            assert other != made
            psycopg.connect(made).close()  # the sweep of the other left it alone
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(made)


def test_the_embedded_server_of_tests_is_not_the_one_of_work(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="qw-") as folder:
        # As root the server runs under another account, which has to pass.
        Path(folder).chmod(0o711)
        monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", f"{folder}/pg18")
        with testing.database() as made, psycopg.connect(made) as conn:
            assert conn.execute("SHOW fsync").fetchone() == ("off",)
            assert re.fullmatch(r"queue_workflows_[0-9a-f]{8}_test", conn.info.dbname)
        assert os.listdir(folder) == ["pg18_test"]  # noqa: PTH208


def test_databases_of_a_killed_test_run_are_dropped_by_the_next(db: ModuleType, dsn: str) -> None:
    stem = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]).removesuffix("_test")
    left = f"{stem}_0123abcd_test"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {left}")
        with testing.database(dsn):
            found = conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", (left,)).fetchone()
    assert found is None


def test_a_dsn_that_cannot_be_read_is_refused_without_its_password(db: ModuleType) -> None:
    with (
        pytest.raises(ValueError, match="the DSN cannot be read") as refused,
        testing.database("postgresql://u:canary/word@h/x_test"),
    ):
        pass
    assert "canary" not in str(refused.value)


def test_no_database_but_a_test_one_is_come_near(db: ModuleType) -> None:
    with (
        pytest.raises(ValueError, match="does not end in _test"),
        testing.database("postgresql://someone@/production"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="does not end in _test"),
        testing.harness(dsn="postgresql://someone@/production", own=True),
    ):
        pass


# --- pytest


def test_examples_are_tested_by_the_fixtures(dsn: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_hello.py"],
        cwd=ROOT / "examples",
        # A second pytest in the folder of this one would close it to the account of a server.
        env={
            **os.environ,
            "QUEUE_WORKFLOWS_TEST_DB_URL": dsn,
            "PYTEST_DEBUG_TEMPROOT": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_pytest_is_not_imported_by_what_it_drives() -> None:
    code = "import sys, queue_workflows.testing; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "False\n"
