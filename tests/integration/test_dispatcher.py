"""The DAG walk: what is queued when, with which inputs, and how a run ends."""

from __future__ import annotations

import re
import threading
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import (
    claim_worker,
    config,
    db,
    dispatcher,
    jobs,
    node_queue,
    run_store,
    runs,
)
from tests.support import constants, counting_cursor, factories, flow, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")


def read(key: str) -> dict[str, str]:
    return {"$from": key}


# --- expanding and queueing


def test_a_start_queues_the_first_nodes_and_flips_the_run(toy: flow.Flow) -> None:
    toy.dag(a="", b="a", c="")
    run_id = toy.submit()
    assert dispatcher.start_run(run_id) == 2
    assert flow.states(run_id) == {"s/a": "queued", "s/c": "queued"}
    row = flow.run(run_id)
    assert (row["status"], row["started_at"] is not None) == ("running", True)
    assert (row["definition"]["workflow"], len(row["definition_hash"])) == ("w", 64)


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_records_a_node_and_what_follows_in_one_transaction(
    toy: flow.Flow, known: bool
) -> None:
    """Also if it does not know the run yet: then it reads the definition before."""
    later = {"id": "b", "node": "ok", "gpu": True, "model": "m", "depends_on": ["a"]}
    toy.dag({"id": "a", "node": "ok"}, later)
    toy.define(flow.step("t"), name="short", t=[{"id": "a", "node": "ok"}])
    longer, shorter = toy.started(), toy.started(workflow_name="short")
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    for run_id in (longer, shorter):
        if not known:
            flow.forget(run_id)
        assert worker.run_once()
    assert flow.states(longer) == {"s/a": "completed", "s/b": "queued"}
    assert flow.status(shorter) == "completed"
    by_run = (
        "SELECT run_id, xmin::text AS xid FROM workflow_node_jobs UNION ALL"
        " SELECT run_id, xmin::text FROM workflow_dispatch_events WHERE processed_at IS NOT NULL"
    )
    found = factories.execute(
        f"{by_run} UNION ALL SELECT id, xmin::text FROM workflow_runs WHERE id = %s", shorter
    )
    assert [
        len({row["xid"] for row in found if row["run_id"] == each}) for each in (longer, shorter)
    ] == [1, 1]
    assert len(found) == 6


def test_a_second_start_changes_nothing(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    assert dispatcher.start_run(run_id) == 0
    flow.finish(run_id, "s/a")
    assert dispatcher.start_run(run_id) == 0
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


def test_a_run_that_an_app_inserted_as_running_is_started_once(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.submit(status="running")
    assert dispatcher.start_run(run_id) == 1
    assert flow.states(run_id) == {"s/a": "queued"}
    flow.finish(run_id, "s/a")
    assert dispatcher.start_run(run_id) == 0
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


@pytest.mark.parametrize("status", ["paused", "cancelled", "completed", "failed"])
def test_only_a_queued_run_is_started(toy: flow.Flow, status: str) -> None:
    toy.dag(a="")
    run_id = toy.submit(status=status)
    toy.look()
    assert (dispatcher.start_run(run_id), flow.status(run_id)) == (0, status)


def test_a_run_of_mode_step_belongs_to_the_app(toy: flow.Flow) -> None:
    toy.dag(a="")
    run_id = toy.submit(mode="step")
    toy.look()
    assert (dispatcher.start_run(run_id), flow.status(run_id)) == (0, "queued")


def test_an_unknown_run_is_not_started(toy: flow.Flow) -> None:
    assert dispatcher.start_run("nope") == 0


def test_a_step_waits_for_every_leaf_of_the_steps_before_it(toy: flow.Flow) -> None:
    toy.define(
        flow.step("one"),
        flow.step("two", depends_on=["one"]),
        one=flow.nodes(a="", b="a", c="a"),
        two=flow.nodes(x="", y="x"),
    )
    run_id = toy.started()
    assert flow.finish(run_id, "one/a") == 2
    assert flow.finish(run_id, "one/b") == 0
    assert flow.finish(run_id, "one/c") == 1
    assert [*flow.jobs(run_id)] == ["one/a", "one/b", "one/c", "two/x"]
    assert flow.finish(run_id, "two/x") == 1
    flow.finish(run_id, "two/y")
    assert flow.status(run_id) == "completed"


def test_a_job_has_the_settings_of_its_node(toy: flow.Flow) -> None:
    toy.dag({"id": "plain"}, {"id": "big", "node": "draw", "gpu": True, "model": "m"})
    run_id = toy.started(priority=7)
    columns = ("node_module", "queue", "required_model", "pipeline_name", "priority", "status")
    plain, big = flow.job(run_id, "s/plain"), flow.job(run_id, "s/big")
    assert [plain[c] for c in columns] == ["plain", "cpu", None, "s", 7, "queued"]
    assert [big[c] for c in columns] == ["draw", "gpu", "m", "s", 7, "queued"]


def test_nodes_that_become_ready_later_inherit_the_runs_priority_too(
    toy: flow.Flow,
) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started(priority=3)
    flow.finish(run_id, "s/a")
    assert flow.job(run_id, "s/b")["priority"] == 3


# --- skipping


def test_skip_if_makes_a_skipped_row_that_satisfies_what_depends_on_it(
    toy: flow.Flow,
) -> None:
    toy.dag({"id": "a", "skip_if": read("skip_a")}, b="a")
    run_id = toy.started(context={"skip_a": True})
    assert flow.states(run_id) == {"s/b": "queued", "s/a": "skipped"}
    flow.finish(run_id, "s/b")
    assert flow.status(run_id) == "completed"


def test_a_skip_is_decided_by_a_result_before_it(toy: flow.Flow) -> None:
    skip = {"id": "b", "depends_on": ["a"], "skip_if": {"$from": "s/a.found", "$eq": 0}}
    toy.dag(*flow.nodes(a="", c=""), skip, {"id": "d", "node": "ok", "depends_on": ["b", "c"]})
    run_id = toy.started()
    flow.finish(run_id, "s/c")
    flow.finish(run_id, "s/a", found=0)
    assert flow.states(run_id)["s/b"] == "skipped"
    assert flow.states(run_id)["s/d"] == "queued"


def test_an_input_step_may_be_skipped(toy: flow.Flow) -> None:
    toy.define(
        flow.ask("q", skip_if=True),
        flow.step("s", depends_on=["q"]),
        s=flow.nodes(a=""),
    )
    run_id = toy.started()
    assert flow.states(run_id) == {"s/a": "queued", "q": "skipped"}


def test_a_run_with_everything_skipped_is_completed(toy: flow.Flow) -> None:
    toy.define(flow.step("s", skip_if=True), s=flow.nodes(a="", b="a", c=""))
    run_id = toy.started()
    assert {*flow.states(run_id).values()} == {"skipped"}
    row = flow.run(run_id)
    assert (row["status"], row["progress_pct"]) == ("completed", 100)


# --- inputs


def test_inputs_hold_what_was_resolved_and_the_template_what_was_written(
    toy: flow.Flow,
) -> None:
    wanted = [{"name": "x", "from": "pipeline.x"}, {"name": "y", "from": "pipeline.y"}]
    toy.define(
        flow.step("one"),
        flow.step("two", depends_on=["one"], inputs={"x": read("one/a.size"), "y": [1, read("k")]}),
        one=flow.nodes(a=""),
        two=[{"id": "b", "inputs": wanted}],
    )
    run_id = toy.started(context={"k": "v"})
    flow.finish(run_id, "one/a", size=3)
    job = flow.job(run_id, "two/b")
    assert job["input_template"] == {"x": {"$from": "one/a.size"}, "y": [1, {"$from": "k"}]}
    assert job["inputs"] == {"x": 3, "y": [1, {"$from": "k"}]}


def test_refs_read_the_runs_context_and_each_result_under_its_node_id(
    toy: flow.Flow,
) -> None:
    refs = {"own": read("run_key.0"), "first": read("s/a.v"), "second": read("s/b.deep.1")}
    members = flow.nodes(a="", b="", c="a b")
    members[2]["inputs"] = [{"name": name, "from": f"pipeline.{name}"} for name in refs]
    toy.define(flow.step("s", inputs=refs), s=members)
    run_id = toy.started(context={"run_key": [9], "s/a": {"v": "hidden by the result"}})
    flow.finish(run_id, "s/a", v=1)
    flow.finish(run_id, "s/b", deep=[0, 2])
    assert flow.job(run_id, "s/c")["inputs"] == {"own": 9, "first": 1, "second": 2}


def one_input(toy: flow.Flow, template: Any, **columns: Any) -> str:
    """A started run of one node `s/b` whose input `x` has this template."""
    wanted = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": template}), s=[{"id": "b", "inputs": wanted}])
    return toy.started(**columns)


def received(run_id: str, node_id: str = "s/b") -> dict[str, Any]:
    return dispatcher.resolve_inputs_for_job(flow.job(run_id, node_id)["id"])


def test_the_template_is_resolved_against_the_context_as_it_is_when_executed(
    toy: flow.Flow,
) -> None:
    run_id = one_input(toy, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={"k": "now"})
    assert flow.job(run_id, "s/b")["inputs"] == {"x": "then"}
    assert received(run_id) == {"x": "now"}


def test_a_ref_that_has_stopped_resolving_keeps_its_first_value(toy: flow.Flow) -> None:
    run_id = one_input(toy, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={})
    assert received(run_id) == {"x": "then"}


def test_data_that_looks_like_a_ref_stays_data(toy: flow.Flow) -> None:
    data = {"$from": "secret"}
    run_id = one_input(toy, read("k"), context={"k": data, "secret": "told"})
    assert flow.job(run_id, "s/b")["inputs"] == {"x": data}
    assert received(run_id) == {"x": data}
    quoted = one_input(toy, {"$value": data}, context={"secret": "told"})
    assert flow.job(quoted, "s/b")["inputs"] == {"x": data}
    assert received(quoted) == {"x": data}


def test_a_worker_hands_over_the_late_value_and_stores_what_it_was(
    toy: flow.Flow,
) -> None:
    seen: list[Any] = []
    flow.body(seen.append, "b")
    config.register_node("b", lambda x: seen.append(x) or {"got": x})
    run_id = one_input(toy, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={"k": {"$from": "k2"}, "k2": "never"})
    toy.work()
    job = flow.job(run_id, "s/b")
    assert seen == [{"$from": "k2"}]
    assert (job["inputs"], job["resolved_inputs"]) == ({"x": "then"}, {"x": {"$from": "k2"}})
    assert flow.status(run_id) == "completed"


def test_the_inputs_of_a_job_that_an_app_queued_are_its_template(toy: flow.Flow) -> None:
    run_id = run_store.insert_run(workflow_name="w", status="running", context={"k": 1})["id"]
    job_id = node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module="m", queue="cpu",
        inputs={"x": read("k"), "y": {"deep": read("k")}, "z": 2},
    )  # fmt: skip
    assert node_queue.get_node_job(job_id)["input_template"] is None  # type: ignore[index]
    assert dispatcher.resolve_inputs_for_job(job_id) == {"x": 1, "y": {"deep": 1}, "z": 2}


def test_an_input_of_an_apps_job_that_does_not_resolve_is_passed_as_it_stands(
    toy: flow.Flow,
) -> None:
    run_id = run_store.insert_run(workflow_name="w", status="running")["id"]
    job_id = node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module="ok", queue="cpu", inputs={"x": read("k.v")}
    )
    assert dispatcher.resolve_inputs_for_job(job_id) == {"x": read("k.v")}


def test_the_inputs_of_an_unknown_job_are_a_key_error(db: ModuleType) -> None:
    with pytest.raises(KeyError, match="nope"):
        dispatcher.resolve_inputs_for_job("nope")


def test_a_ref_that_does_not_resolve_when_queued_fails_the_run_with_its_name(
    toy: flow.Flow,
) -> None:
    members = flow.nodes(a="", b="a", c="")
    members[1]["inputs"] = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": read("s/a.size")}), s=members)
    run_id = toy.started()
    flow.finish(run_id, "s/a", width=3)
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"] == "node 's/b': input 'x': $from 's/a.size': there is no 'size'"
    assert flow.states(run_id) == {"s/a": "completed", "s/c": "cancelled"}


def test_a_path_in_a_run_without_out_dir_is_in_the_folder_that_it_got(
    toy: flow.Flow,
) -> None:
    members = flow.nodes(a="", b="a")
    members[1]["inputs"] = [{"name": "x", "from": "a"}]
    toy.dag(*members)
    run_id = toy.started()
    flow.finish(run_id, "s/a")
    assert flow.job(run_id, "s/b")["inputs"] == {"x": f"{flow.run(run_id)['out_dir']}/s/a"}


def test_inputs_too_large_to_store_fail_the_run_at_once(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "2")
    wanted = [{"name": name, "from": f"pipeline.{name}"} for name in "xy"]
    half = "h" * 1100
    toy.define(
        flow.step("s", inputs={"x": read("half"), "y": read("half")}),
        s=[{"id": "b", "inputs": wanted}],
    )
    run_id = toy.submit(context={"half": half})
    toy.look()
    row = flow.run(run_id)
    assert (row["status"], row["start_attempts"]) == ("failed", 0)
    assert "inputs of node 's/b'" in row["error"]


# --- how runs end


def test_a_run_is_completed_by_its_last_node(toy: flow.Flow) -> None:
    toy.dag(a="", b="a", c="a")
    run_id = toy.started()
    for name in "abc":
        assert flow.status(run_id) == "running"
        flow.finish(run_id, f"s/{name}")
    row = flow.run(run_id)
    assert (row["status"], row["error"], row["finished_at"] is not None) == (
        "completed",
        None,
        True,
    )
    assert node_queue.count_unprocessed_dispatch_events() == 0


def test_a_failed_node_fails_the_run_and_cancels_its_queued_siblings(
    toy: flow.Flow,
) -> None:
    toy.dag(a="", b="", c="", d="a")
    run_id = toy.started()
    flow.finish(run_id, "s/c")
    flow.fail(run_id, "s/a", "it broke")
    assert flow.states(run_id) == {"s/a": "failed", "s/b": "cancelled", "s/c": "completed"}
    row = flow.run(run_id)
    assert (row["status"], row["error"]) == ("failed", "node s/a failed: it broke")
    assert row["finished_at"] is not None


def test_a_failure_beside_results_of_the_same_batch_wins(toy: flow.Flow) -> None:
    toy.dag(a="", b="", c="a")
    run_id = toy.started()
    flow.complete(run_id, "s/a")
    node_queue.mark_failed(flow.job(run_id, "s/b")["id"], error="broke")
    assert flow.dispatch(run_id) == 0
    assert flow.status(run_id) == "failed"
    assert "s/c" not in flow.jobs(run_id)


def test_nothing_changes_a_cancelled_run(toy: flow.Flow) -> None:
    toy.define(
        flow.step("s"), flow.ask("q"), flow.step("t", depends_on=["q", "s"]),
        s=flow.nodes(a="", b="a"), t=flow.nodes(c=""),
    )  # fmt: skip
    run_id = toy.started()
    with db.connect() as conn:
        running = transitions.claim_node(conn)
        assert running["node_id"] == "s/a"
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
        factories.execute(
            "UPDATE workflow_runs SET status = 'cancelled', finished_at = now() WHERE id = %s",
            run_id,
        )
        transitions.complete_node(conn, running)
    assert flow.dispatch(run_id) == 0
    assert dispatcher.on_node_completed(run_id, "s/a") == 0
    assert dispatcher.on_node_failed(run_id, "s/a") == 0
    assert dispatcher.on_node_awaiting_input(run_id, "q") == 0
    assert dispatcher.resume_after_input(run_id, "q", 1) == 0
    assert dispatcher.start_run(run_id) == 0
    toy.go()
    assert flow.status(run_id) == "cancelled"
    assert flow.states(run_id) == {"s/a": "completed", "q": "cancelled"}
    assert node_queue.count_unprocessed_dispatch_events() == 0


@pytest.mark.parametrize("late", ["completed", "failed"])
def test_late_results_do_not_change_a_failed_run(toy: flow.Flow, late: str) -> None:
    toy.dag(a="", b="", c="b")
    run_id = toy.started()
    with db.connect() as conn:
        claimed = [transitions.claim_node(conn), transitions.claim_node(conn)]
    flow.fail(run_id, "s/a", "first")
    (other,) = [job for job in claimed if job["node_id"] == "s/b"]
    if late == "completed":
        node_queue.mark_completed(other["id"], context_delta={})
    else:
        node_queue.mark_failed(other["id"], error="second")
    flow.dispatch(run_id)
    assert flow.run(run_id)["error"] == "node s/a failed: first"
    assert flow.states(run_id) == {"s/a": "failed", "s/b": late}


def test_the_callbacks_do_what_the_drain_does(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    assert dispatcher.on_node_completed(run_id, "s/a") == 0
    flow.complete(run_id, "s/a")
    assert dispatcher.on_node_completed(run_id, "s/a") == 1
    assert dispatcher.on_node_completed(run_id, "s/a") == 0
    assert dispatcher.on_node_failed(run_id, "s/b") == 0
    assert flow.status(run_id) == "running"
    node_queue.mark_failed(flow.job(run_id, "s/b")["id"], error="broke")
    dispatcher.on_node_failed(run_id, "s/b")
    assert flow.run(run_id)["error"] == "node s/b failed: broke"
    assert flow.dispatch(run_id) == 0


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([], r"step 's': pipeline 's': it has no nodes"),
        (flow.nodes(a="b", b="a"), r"a cycle of nodes: (a -> b -> a|b -> a -> b)"),
        ([3], r"node 1: an object is needed"),
    ],
)
def test_a_workflow_that_cannot_run_fails_its_run_at_once_with_the_reason(
    toy: flow.Flow, members: list[Any], reason: str
) -> None:
    toy.define(flow.step("s"), s=members)
    run_id = toy.submit()
    toy.look()
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert re.search(reason, row["error"]), row["error"]
    assert flow.states(run_id) == {}


@pytest.mark.parametrize("error", [KeyError("w"), FileNotFoundError("w.yml"), LookupError()])
def test_a_workflow_that_the_provider_does_not_know_fails_its_run_at_once(
    toy: flow.Flow, error: Exception
) -> None:
    def load(name: str) -> Any:
        raise error

    config.set_workflow_provider(load, load)
    run_id = toy.submit(workflow_name="nope")
    toy.look()
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"].startswith("the provider knows no workflow 'nope'")


def test_more_nodes_than_a_run_may_have_are_refused(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 2)
    toy.dag(a="", b="", c="")
    run_id = toy.started()
    assert "more than 2 nodes" in flow.run(run_id)["error"]


def test_a_run_that_failed_for_its_workflow_runs_once_that_is_fixed(
    toy: flow.Flow,
) -> None:
    toy.dag(a="a")
    run_id = toy.started()
    toy.dag(a="")
    run_store.update_run(run_id, status="queued")
    toy.go()
    assert flow.status(run_id) == "completed"


# --- from beginning to end, by real workers


def test_workers_and_orchestrator_bring_a_diamond_to_its_end(toy: flow.Flow) -> None:
    members = flow.nodes(a="", b="a", c="a", d="b c")
    for member, name in zip(members, "abcd", strict=True):
        flow.body({name: 1}, name)
        member["node"] = name
    toy.dag(*members)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed"
    assert {n: j["context_delta"] for n, j in flow.jobs(run_id).items()} == {
        "s/a": {"a": 1}, "s/b": {"b": 1}, "s/c": {"c": 1}, "s/d": {"d": 1},
    }  # fmt: skip
    assert {j["claim_no"] for j in flow.jobs(run_id).values()} == {1}


def test_a_handler_that_raises_ends_its_run(toy: flow.Flow) -> None:
    def boom() -> None:
        raise ValueError("no")

    flow.body(boom, "boom")
    toy.dag({"id": "a", "node": "boom"}, b="a", c="")
    run_id = toy.submit()
    toy.go()
    assert flow.run(run_id)["error"] == "node s/a failed: ValueError: no"
    assert flow.states(run_id)["s/c"] in ("completed", "cancelled")


# --- many at once


COMPLETE = b"""
WITH done AS (UPDATE workflow_node_jobs SET status = 'completed', finished_at = now()
               WHERE id = ANY (%s) RETURNING *)
INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, generation)
SELECT run_id, node_id, 'completed', id, generation FROM done ORDER BY seq
"""


def cost_of_a_fan(toy: flow.Flow, size: int, batch: int) -> tuple[float, float]:
    """Statements and rows a node when so many are completed between two drains."""
    middle = {f"n{i}": "src" for i in range(size)}
    toy.dag(**{"src": "", **middle, "join": " ".join(middle)})
    run_id = toy.submit()
    with db.connect() as counted, db.connect() as other:
        asked = counting_cursor.Counter(counted)
        assert flow.start_on(counted, run_id) == 1
        flow.complete(run_id, "s/src")
        assert flow.dispatch_on(counted, run_id) == size
        queued = [job["id"] for job in flow.jobs(run_id).values() if job["status"] == "queued"]
        made: list[int] = []
        for at in range(0, size, batch):
            other.execute(COMPLETE, (queued[at : at + batch],), prepare=True)
            made.append(flow.dispatch_on(counted, run_id))
        assert made == [0] * (len(made) - 1) + [1]
    flow.finish(run_id, "s/join")
    assert flow.status(run_id) == "completed"
    return asked.statements / size, asked.rows / size


@pytest.mark.parametrize("batch", [1, 100])
def test_the_cost_of_a_fan_grows_with_its_nodes_and_not_with_their_square(
    toy: flow.Flow, batch: int
) -> None:
    few_statements, few_rows = cost_of_a_fan(toy, 100, batch)
    many_statements, many_rows = cost_of_a_fan(toy, 400, batch)
    assert many_statements <= few_statements * 1.1
    assert many_rows <= few_rows * 1.1


def test_two_dispatchers_on_one_run_make_no_error_and_no_double(toy: flow.Flow) -> None:
    toy.dag(
        src="", **{f"n{i}": "src" for i in range(12)}, join=" ".join(f"n{i}" for i in range(12))
    )
    run_ids = [toy.submit() for _ in range(3)]
    problems: list[BaseException] = []
    over = threading.Event()

    def dispatch() -> None:
        pool = flow.node_pool.NodePool()
        try:
            while not over.is_set():
                pool.check()
        except BaseException as error:
            problems.append(error)
        finally:
            pool.stop()

    threads = [threading.Thread(target=dispatch) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        ended = ("completed", "failed", "cancelled")
        for _ in range(1000):
            toy.work()
            if problems or all(flow.status(run_id) in ended for run_id in run_ids):
                break
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert problems == []
    assert [flow.status(run_id) for run_id in run_ids] == ["completed"] * 3
    for run_id in run_ids:
        assert len(flow.jobs(run_id)) == 14
        assert {job["claim_no"] for job in flow.jobs(run_id).values()} == {1}


def test_a_start_raced_by_many_queues_each_node_once(toy: flow.Flow) -> None:
    toy.dag(a="", b="", c="a b")
    run_id = toy.submit()
    barrier = threading.Barrier(4)
    made: list[Any] = []

    def start() -> None:
        with db.connect() as conn:
            barrier.wait(30)
            try:
                made.append(flow.start_on(conn, run_id))
            except BaseException as error:
                made.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(made) == [0, 0, 0, 2]


def test_an_engine_pool_of_one_connection_is_enough(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.close_pool()
    monkeypatch.setattr(config.get_config(), "engine_pool_max", 1)
    custom = [None, lambda value, context: value]
    for resolve in custom:
        toy.define(
            flow.step("s"), flow.ask("q", depends_on=["s"]), flow.step("t", depends_on=["q"]),
            s=flow.nodes(a="", b="a"), t=flow.nodes(c=""),
        )  # fmt: skip
        toy.provide(resolve_ref=resolve)
        run_id = toy.submit()
        assert flow.start_queued() == 1
        for node_id in ("s/a", "s/b"):
            flow.complete(run_id, node_id)
            flow.dispatch_all()
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
        flow.dispatch_all()
        assert flow.job(run_id, "q")["input_spec"]["widget"] == "file_upload"
        assert dispatcher.resume_after_input(run_id, "q", 1) == 1
        flow.fail(run_id, "t/c")
        runs.retry(run_id, from_node="s/b")
        assert dispatcher.start_run(run_id) == 1
        assert jobs.cancel(flow.job(run_id, "s/b")["id"]) is not None
        assert flow.status(run_id) == "cancelled"


def test_sixty_parked_runs_do_not_keep_a_new_one_from_starting(toy: flow.Flow) -> None:
    toy.define(flow.ask("q"))
    parked = [toy.submit() for _ in range(60)]
    toy.look()
    assert {flow.status(run_id) for run_id in parked} == {"running"}
    for run_id in parked:
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
    toy.dag(a="")
    fresh = toy.submit(workflow_name="w")
    toy.look()
    assert flow.states(fresh) == {"s/a": "queued"}
    assert all(flow.job(run_id, "q")["input_spec"] for run_id in parked)


def test_runs_are_started_by_priority_and_then_by_age(toy: flow.Flow) -> None:
    toy.dag(a="")
    first, second, urgent = toy.submit(), toy.submit(), toy.submit(priority=1)
    toy.look()
    order = factories.execute("SELECT run_id FROM workflow_node_jobs ORDER BY seq")
    assert [row["run_id"] for row in order] == [urgent, first, second]


def test_the_cache_of_a_run_ends_with_the_run(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_store.insert_run(run_id="r", workflow_name="w")
    dispatcher.start_run("r")
    flow.finish("r", "s/a")
    flow.finish("r", "s/b")
    assert flow.status("r") == "completed"
    run_store.delete_run("r")
    run_store.insert_run(run_id="r", workflow_name="w")
    with flow.elsewhere():  # What is remembered here is of the first one.
        dispatcher.start_run("r")
    assert flow.states("r") == {"s/a": "queued"}
    assert flow.finish("r", "s/a") == 1
    assert flow.states("r") == {"s/a": "completed", "s/b": "queued"}
