"""The command line for new users: ids by prefix, why a run waits, progress, queues."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timezone
from typing import Any

import pytest

import queue_workflows
from queue_workflows import claim_worker, config, node_queue, queues, run_store, scheduler
from tests.support import console, factories, flow, transitions
from tests.support.console import command as invoke
from tests.support.flow import Flow

pytestmark = pytest.mark.usefixtures("db")

IDS = [f"{start}-1b2c-4d5e-8f60-0123456789ab" for start in ("ab000001", "ab000002", "cd000000")]


# --- ids by prefix


def test_cancel_takes_a_unique_prefix_and_lists_the_ids_of_another() -> None:
    for run_id in IDS:
        run_store.insert_run(run_id=run_id, workflow_name="w")
    several = invoke("cancel", "ab00")
    assert (several.code, several.out) == (2, "")
    assert several.err == (
        f"queue-workflows cancel: 'ab00' is the start of several ids: run {IDS[0]}, run {IDS[1]}\n"
    )
    assert {flow.status(run_id) for run_id in IDS} == {"queued"}
    done = invoke("cancel", "ab000002")
    assert (done.code, done.out.startswith(f"run {IDS[1]} (w): cancelled")) == (0, True)
    assert [flow.status(run_id) for run_id in IDS] == ["queued", "cancelled", "queued"]


def test_an_exact_id_wins_over_the_ids_that_begin_with_it() -> None:
    run_store.insert_run(run_id="ab", workflow_name="w")
    run_store.insert_run(run_id=IDS[0], workflow_name="w")
    assert invoke("cancel", "ab").code == 0
    assert (flow.status("ab"), flow.status(IDS[0])) == ("cancelled", "queued")


def test_an_id_of_the_app_has_no_prefix() -> None:
    run_store.insert_run(run_id="nightly-1", workflow_name="w")
    assert invoke("cancel", "nightly").err == (
        "queue-workflows cancel: there is no run or job 'nightly'\n"
    )


def test_retry_takes_a_unique_prefix(conn: Any) -> None:
    job = factories.ingest(conn, id=IDS[2], status="failed", error="broke")
    factories.ingest(conn, id=IDS[1], status="failed", error="broke")
    assert invoke("retry", "cd").out == f"ingest job {job['id']} (t): queued\n"
    assert invoke("retry", "cd", "--from", "a").code == 2


def test_answer_and_inputs_take_a_unique_prefix_of_a_run(conn: Any, toy: Flow) -> None:
    toy.define(flow.ask("q", "confirm", prompt="Go?"))
    run_id = toy.submit(run_id=IDS[0])
    # A job whose id begins alike is no candidate.
    factories.ingest(conn, id=IDS[1])
    toy.go()
    assert f"{run_id} q (" in invoke("inputs", "ab").out
    done = invoke("answer", "ab00", "q", "true")
    assert (done.code, done.out) == (0, f"node q of run {run_id}: answered true\n")
    assert "is the start of several ids" in invoke("cancel", "ab").err


# --- why RUN


def test_why_explains_every_node_of_a_run_that_waits(conn: Any, toy: Flow) -> None:
    toy.define(
        flow.step("s"),
        flow.ask("q", "confirm", prompt="Go?"),
        flow.step("t", depends_on=["q", "s"]),
        s=flow.nodes(a="", b=""),
        t=flow.nodes(c=""),
    )
    run_id = toy.submit()
    assert "no orchestrator has started it yet" in invoke("why", run_id).out
    toy.look()
    conn.execute("UPDATE workflow_node_jobs SET queue = 'gpu' WHERE node_id = 's/b'")
    claim_worker.ClaimWorker(queue="cpu", host="box").run_once()
    toy.look()
    toy.go()
    said = invoke("why", run_id[:8])
    lines = said.out.splitlines()
    assert lines[0] == f"run {run_id} (w): running"
    assert f"node job {flow.job(run_id, 's/b')['id']} (s/b): queued on gpu, priority 100" in lines
    assert "no live worker serves queue gpu" in lines
    assert f"node job {flow.job(run_id, 'q')['id']} (q): it waits for an answer: Go?" in lines
    assert f"  `queue-workflows answer {run_id} q VALUE` answers it" in lines
    assert "t/c: it waits for q (awaiting_input), s/b (queued)" in lines
    assert said.code == 1, "no worker can take s/b"
    assert not [line for line in lines if "s/a" in line]
    explained = json.loads(invoke("why", run_id, "--json").out)
    clauses = {node["name"]: node["clause"] for node in explained["nodes"]}
    assert clauses == {"s/b": "no_worker", "q": "answer", "t/c": "dependencies"}
    assert explained["left_out"] == 0


def test_why_of_a_finished_run_reports_its_status(toy: Flow) -> None:
    toy.dag(a="")
    run_id = toy.started()
    toy.go()
    said = invoke("why", run_id)
    assert (said.code, said.out) == (0, f"run {run_id} (w): completed\n")


def test_why_of_a_large_run_counts_the_nodes_it_leaves_out(toy: Flow) -> None:
    toy.dag(**{f"n{number}": "" for number in range(130)})
    run_id = toy.started()
    lines = invoke("why", run_id).out.splitlines()
    assert sum("queued on cpu" in line for line in lines) == 100
    assert lines[-1] == "and 30 nodes more that wait"


# --- progress


def reporting(value: Any) -> Callable[..., dict[str, Any]]:
    def body(status_callback: Callable[..., object]) -> dict[str, Any]:
        status_callback(value)
        return {}

    return body


@pytest.mark.parametrize(("value", "end"), [(0.4, 1), ({"rows": 7}, {"rows": 7}), (None, 1)])
def test_the_progress_of_a_completed_node_is_1(conn: Any, toy: Flow, value: Any, end: Any) -> None:
    flow.body(reporting(value), name="report")
    toy.define(flow.step("s"), s=[{"id": "a", "node": "report"}])
    run_id = toy.started()
    # As the heartbeat stores it while the handler runs.
    job = transitions.claim_node(conn)
    conn.execute(
        "UPDATE workflow_node_jobs SET progress = %s::jsonb WHERE id = %s",
        (None if value is None else json.dumps(value), job["id"]),
    )
    transitions.complete_node(conn, job)
    toy.look()
    assert flow.job(run_id, "s/a")["progress"] == end
    assert flow.run(run_id)["progress_pct"] == 100


def test_the_progress_of_a_completed_ingest_job_is_1(conn: Any) -> None:
    job = transitions.claim_ingest(conn) if factories.ingest(conn) else {}
    conn.execute("UPDATE ingest_jobs SET progress = '0.4' WHERE id = %s", (job["id"],))
    transitions.complete_ingest(conn, job)
    assert factories.reread(conn, job)["progress"] == 1
    manual = factories.ingest(conn)
    transitions.claim_ingest(conn)
    assert node_queue.mark_ingest_completed(manual["id"])["progress"] == 1  # pyright: ignore


def test_the_progress_of_an_answered_node_and_one_completed_by_an_operator_is_1(toy: Flow) -> None:
    toy.define(flow.ask("q", "confirm"), flow.step("s"), s=flow.nodes(a=""))
    run_id = toy.submit()
    toy.look()
    flow.complete(run_id, "s/a")
    toy.go()
    queue_workflows.submit_input(run_id, "q", True)
    toy.go()
    assert flow.status(run_id) == "completed"
    assert {name: row["progress"] for name, row in flow.jobs(run_id).items()} == {
        "q": 1,
        "s/a": 1,
    }


# --- queues


def listed(*argv: str) -> list[str]:
    return [row["queue"] for row in console.reply("queues", *argv)]


def test_queues_lists_nothing_of_an_app_that_has_none() -> None:
    assert listed() == []
    assert "no queue is in use" in invoke("queues").out
    assert listed("list", "fetch") == ["fetch"], "a queue that is named is shown"


def test_queues_lists_what_the_app_has() -> None:
    queue_workflows.register_node("ok", flow.nothing)
    assert listed() == ["cpu", "gpu"]
    config.register_ingest_task("t", lambda: None, queue="mail")
    config.set_ingest_schedule([scheduler.ScheduleEntry("p", 5, "t", "nightly")])
    assert listed() == ["cpu", "gpu", "mail", "nightly"]
    config.register_ingest_task("u", lambda: None)
    assert listed() == ["cpu", "fetch", "gpu", "load", "mail", "nightly"]


def test_queues_lists_what_an_app_named_without_a_task_of_it() -> None:
    queue_workflows.configure(ingest_queues={"rails"})
    assert listed() == ["rails"]


def test_queues_lists_what_the_database_holds(conn: Any) -> None:
    factories.ingest(conn, queue="rails")
    queues.limit("load", max_running=2)
    assert listed() == ["load", "rails"]


# --- attempts to come


def test_show_prints_when_the_next_attempt_starts(
    toy: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ValueError("no luck")

    flow.body(broken, name="broken")
    toy.define(flow.step("s"), s=[{"id": "a", "node": "broken", "retries": 2, "backoff": 600}])
    run_id = toy.started()
    toy.work()
    job = flow.job(run_id, "s/a")
    due = f"{job['available_at'].astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    again = f"it runs again at {due}"
    assert f"s/a ({job['id']}): attempt 1 of 3 failed, {again}" in caplog.text
    for lines in (
        invoke("show", run_id).out.splitlines(),
        invoke("show", job["id"]).out.splitlines(),
    ):
        assert f"    attempt 1 of 3 failed, {again}" in lines
    assert f"it is not due until {due}" in invoke("why", run_id).out
