"""The DAG walk: what is queued when, with which inputs, and how a run ends."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import (
    claim_worker,
    config,
    dispatcher,
    errors,
    jobs,
    node_queue,
    run_store,
    runs,
)
from queue_workflows import db as engine
from queue_workflows.dispatch import hooks, run_cache, starts
from queue_workflows.engine import finish, job_tables, outcomes
from queue_workflows.runtime import clock
from queue_workflows.worker import current_job, guards, run_dispatch
from tests.support import counting_cursor, flow, invariants, transitions


@pytest.fixture
def unjudged(db: ModuleType) -> Iterator[flow.Flow]:
    made = flow.Flow()
    yield made
    made.close()


@pytest.fixture
def host(unjudged: flow.Flow) -> Iterator[flow.Flow]:
    yield unjudged
    with engine.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []


def sql(statement: str, *values: Any) -> list[dict[str, Any]]:
    with engine.connect() as conn:
        cursor = conn.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []


def read(key: str) -> dict[str, str]:
    return {"$from": key}


# --- expanding and queueing


def test_a_start_queues_the_first_nodes_and_flips_the_run(host: flow.Flow) -> None:
    host.dag(a="", b="a", c="")
    run_id = host.submit()
    assert dispatcher.start_run(run_id) == 2
    assert flow.states(run_id) == {"s/a": "queued", "s/c": "queued"}
    row = flow.run(run_id)
    assert (row["status"], row["started_at"] is not None) == ("running", True)
    assert (row["definition"]["workflow"], len(row["definition_hash"])) == ("w", 64)


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_records_a_node_and_what_follows_in_one_transaction(
    host: flow.Flow, known: bool
) -> None:
    """Also if it does not know the run yet: then it reads the definition before."""
    later = {"id": "b", "node": "ok", "gpu": True, "model": "m", "depends_on": ["a"]}
    host.dag({"id": "a", "node": "ok"}, later)
    host.define(flow.step("t"), name="short", t=[{"id": "a", "node": "ok"}])
    longer, shorter = host.started(), host.started(workflow_name="short")
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
    found = sql(
        f"{by_run} UNION ALL SELECT id, xmin::text FROM workflow_runs WHERE id = %s", shorter
    )
    assert [
        len({row["xid"] for row in found if row["run_id"] == each}) for each in (longer, shorter)
    ] == [1, 1]
    assert len(found) == 6


def recorded_together(count: int) -> int:
    """Claim so many nodes and record them in one statement, as a worker does.

    Return how many statements that took.
    """
    who = transitions.who()
    with contextlib.closing(engine.DedicatedConnection()) as dedicated:
        conn = dedicated.get()
        lease_end = guards.LeaseEnd(clock.boot_s(), who.lease_s)
        outcome = outcomes.Outcome("completed", 0.1, "{}")
        done = [
            (current_job.Work(job_tables.NODE_JOBS, job, lease_end), outcome)
            for job in transitions.claim(conn, who, count)
        ]
        assert len(done) == count
        dispatch = run_dispatch.RunDispatch(job_tables.NODE_JOBS, dedicated)
        asked = counting_cursor.Counter(conn)
        finish.finish(conn, dispatch.planned(done), who=who)
        return asked.statements


@pytest.mark.parametrize("revision", [0, 1])
def test_nodes_that_are_recorded_together_leave_no_open_event(
    host: flow.Flow, revision: int
) -> None:
    host.dag(a="", b="", c="", last="a b c")
    run_id = host.started()
    sql("UPDATE workflow_runs SET revision = %s WHERE id = %s", revision, run_id)
    recorded_together(3)
    events = sql("SELECT processed_at IS NULL AS open FROM workflow_dispatch_events")
    assert events == [{"open": False}] * 3


def test_the_graphs_of_unknown_runs_are_read_by_one_statement(host: flow.Flow) -> None:
    host.dag(a="")
    run_ids = [host.started() for _ in range(4)]
    sql("UPDATE workflow_runs SET definition = '{}' WHERE id = %s", run_ids[1])
    for run_id in run_ids:
        flow.forget(run_id)
    assert recorded_together(4) == 2
    assert [flow.status(each) for each in run_ids] == [
        "completed",
        "running",
        "completed",
        "completed",
    ]
    host.go()
    assert flow.status(run_ids[1]) == "failed"


def test_a_large_graph_delays_no_result_and_is_asked_for_once(host: flow.Flow) -> None:
    host.dag(*({"id": f"n{secrets.token_hex(40)}"} for _ in range(120)))
    run_id = host.started()
    asked: list[int] = []
    for _ in range(2):
        flow.forget(run_id)
        asked.append(recorded_together(1))
    assert asked == [2, 1]
    assert sql("SELECT count(*) AS n FROM workflow_dispatch_events WHERE processed_at IS NULL") == [
        {"n": 2}
    ]


def test_a_second_start_changes_nothing(host: flow.Flow) -> None:
    host.dag(a="", b="a")
    run_id = host.started()
    assert dispatcher.start_run(run_id) == 0
    flow.finish(run_id, "s/a")
    assert dispatcher.start_run(run_id) == 0
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


def test_a_run_that_an_app_inserted_as_running_is_started_once(host: flow.Flow) -> None:
    host.dag(a="", b="a")
    run_id = host.submit(status="running")
    assert dispatcher.start_run(run_id) == 1
    assert flow.states(run_id) == {"s/a": "queued"}
    flow.finish(run_id, "s/a")
    assert dispatcher.start_run(run_id) == 0
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


@pytest.mark.parametrize("status", ["paused", "cancelled", "completed", "failed"])
def test_only_a_queued_run_is_started(host: flow.Flow, status: str) -> None:
    host.dag(a="")
    run_id = host.submit(status=status)
    host.look()
    assert (dispatcher.start_run(run_id), flow.status(run_id)) == (0, status)


def test_a_run_of_mode_step_belongs_to_the_app(host: flow.Flow) -> None:
    host.dag(a="")
    run_id = host.submit(mode="step")
    host.look()
    assert (dispatcher.start_run(run_id), flow.status(run_id)) == (0, "queued")


def test_an_unknown_run_is_not_started(host: flow.Flow) -> None:
    assert dispatcher.start_run("nope") == 0


def test_a_step_waits_for_every_leaf_of_the_steps_before_it(host: flow.Flow) -> None:
    host.define(
        flow.step("one"),
        flow.step("two", depends_on=["one"]),
        one=flow.nodes(a="", b="a", c="a"),
        two=flow.nodes(x="", y="x"),
    )
    run_id = host.started()
    assert flow.finish(run_id, "one/a") == 2
    assert flow.finish(run_id, "one/b") == 0
    assert flow.finish(run_id, "one/c") == 1
    assert [*flow.jobs(run_id)] == ["one/a", "one/b", "one/c", "two/x"]
    assert flow.finish(run_id, "two/x") == 1
    flow.finish(run_id, "two/y")
    assert flow.status(run_id) == "completed"


def test_a_job_has_the_settings_of_its_node(host: flow.Flow) -> None:
    host.dag({"id": "plain"}, {"id": "big", "node": "draw", "gpu": True, "model": "m"})
    run_id = host.started(priority=7)
    columns = ("node_module", "queue", "required_model", "pipeline_name", "priority", "status")
    plain, big = flow.job(run_id, "s/plain"), flow.job(run_id, "s/big")
    assert [plain[c] for c in columns] == ["plain", "cpu", None, "s", 7, "queued"]
    assert [big[c] for c in columns] == ["draw", "gpu", "m", "s", 7, "queued"]


def test_nodes_that_become_ready_later_inherit_the_runs_priority_too(
    host: flow.Flow,
) -> None:
    host.dag(a="", b="a")
    run_id = host.started(priority=3)
    flow.finish(run_id, "s/a")
    assert flow.job(run_id, "s/b")["priority"] == 3


def test_ready_nodes_are_queued_by_model_and_those_without_last(host: flow.Flow) -> None:
    def gpu(name: str, model: str | None) -> dict[str, Any]:
        more = {"model": model} if model else {}
        return {"id": name, "node": "ok", "gpu": True, "depends_on": ["first"], **more}

    host.dag(
        *flow.nodes(first="", cpu="first"),
        *[gpu("a1", "A"), gpu("bare", None), gpu("b1", "B"), gpu("a2", "A"), gpu("b2", "B")],
    )
    run_id = host.started()
    flow.finish(run_id, "s/first")
    order = ["first", "a1", "a2", "b1", "b2", "cpu", "bare"]
    assert [*flow.jobs(run_id)] == [f"s/{name}" for name in order]


# --- skipping


def test_skip_if_makes_a_skipped_row_that_satisfies_what_depends_on_it(
    host: flow.Flow,
) -> None:
    host.dag({"id": "a", "skip_if": read("skip_a")}, b="a")
    run_id = host.started(context={"skip_a": True})
    assert flow.states(run_id) == {"s/b": "queued", "s/a": "skipped"}
    flow.finish(run_id, "s/b")
    assert flow.status(run_id) == "completed"


@pytest.mark.parametrize(
    ("skip_if", "status"),
    [
        ({"$from": "flag", "$eq": "x"}, "skipped"),
        ({"$from": "flag", "$ne": "x"}, "queued"),
        ({"$from": "flag", "$eq": "y"}, "queued"),
        ({"$from": "flag.no.such"}, "queued"),
        ({"$from": "nowhere"}, "queued"),
        ({"$from": "list", "$filter": {"a:nope": 1}}, "queued"),
        ({"$from": "flag", "$filter": {"a:eq": 1}}, "queued"),
        ({"$value": True}, "skipped"),
        (True, "skipped"),
        (False, "queued"),
        (None, "queued"),
    ],
)
def test_skip_if_decides_by_its_value_and_an_error_skips_nothing(
    host: flow.Flow, skip_if: Any, status: str
) -> None:
    host.dag({"id": "a", "skip_if": skip_if})
    run_id = host.started(context={"flag": "x", "list": [{"a": 1}]})
    assert flow.states(run_id) == {"s/a": status}


def test_a_nodes_skip_if_wins_over_its_steps_unless_it_is_empty(host: flow.Flow) -> None:
    empty: dict[str, Any] = {"null": None, "false": False, "object": {}, "list": [], "zero": 0}
    members = [
        {"id": "own", "skip_if": read("no")},
        {"id": "bare"},
        *({"id": name, "skip_if": value} for name, value in empty.items()),
    ]
    host.define(flow.step("s", skip_if=read("yes")), s=members)
    run_id = host.started(context={"yes": True, "no": False})
    assert flow.states(run_id) == {
        "s/own": "queued",
        "s/bare": "skipped",
        **{f"s/{name}": "skipped" for name in empty},
    }


def test_skips_cascade_within_one_start(host: flow.Flow) -> None:
    host.define(
        flow.step("one", skip_if=read("yes")),
        flow.step("two", depends_on=["one"], skip_if=read("yes")),
        flow.step("three", depends_on=["two"]),
        one=flow.nodes(a="", b="a"),
        two=flow.nodes(a="", b="a"),
        three=flow.nodes(a=""),
    )
    run_id = host.started(context={"yes": True})
    states = flow.states(run_id)
    assert states.pop("three/a") == "queued"
    assert (len(states), {*states.values()}) == (4, {"skipped"})


def test_a_skip_is_decided_by_a_result_before_it(host: flow.Flow) -> None:
    skip = {"id": "b", "depends_on": ["a"], "skip_if": {"$from": "s/a.found", "$eq": 0}}
    host.dag(*flow.nodes(a="", c=""), skip, {"id": "d", "node": "ok", "depends_on": ["b", "c"]})
    run_id = host.started()
    flow.finish(run_id, "s/c")
    flow.finish(run_id, "s/a", found=0)
    assert flow.states(run_id)["s/b"] == "skipped"
    assert flow.states(run_id)["s/d"] == "queued"


def test_an_input_step_may_be_skipped(host: flow.Flow) -> None:
    host.define(
        flow.ask("q", skip_if=True),
        flow.step("s", depends_on=["q"]),
        s=flow.nodes(a=""),
    )
    run_id = host.started()
    assert flow.states(run_id) == {"s/a": "queued", "q": "skipped"}


def test_a_run_with_everything_skipped_is_completed(host: flow.Flow) -> None:
    host.define(flow.step("s", skip_if=True), s=flow.nodes(a="", b="a", c=""))
    run_id = host.started()
    assert {*flow.states(run_id).values()} == {"skipped"}
    row = flow.run(run_id)
    assert (row["status"], row["progress_pct"]) == ("completed", 100)


# --- inputs


def test_inputs_hold_what_was_resolved_and_the_template_what_was_written(
    host: flow.Flow,
) -> None:
    wanted = [{"name": "x", "from": "pipeline.x"}, {"name": "y", "from": "pipeline.y"}]
    host.define(
        flow.step("one"),
        flow.step("two", depends_on=["one"], inputs={"x": read("one/a.size"), "y": [1, read("k")]}),
        one=flow.nodes(a=""),
        two=[{"id": "b", "inputs": wanted}],
    )
    run_id = host.started(context={"k": "v"})
    flow.finish(run_id, "one/a", size=3)
    job = flow.job(run_id, "two/b")
    assert job["input_template"] == {"x": {"$from": "one/a.size"}, "y": [1, {"$from": "k"}]}
    assert job["inputs"] == {"x": 3, "y": [1, {"$from": "k"}]}


def test_every_form_of_a_node_input(host: flow.Flow, tmp_path: Any) -> None:
    forms = {
        "key": "pipeline.size",
        "ref": "pipeline.who",
        "missing": "pipeline.nowhere",
        "number": "pipeline._implicit(5)",
        "text": "pipeline._implicit('a b')",
        "folders": "pipeline._siblings([a, b])",
        "folder": "a",
        "file": "a.deep/x.json",
    }
    members = flow.nodes(a="", b="", c="a b")
    members[2]["inputs"] = [{"name": name, "from": text} for name, text in forms.items()]
    host.define(flow.step("s", inputs={"size": 3, "who": read("user.name")}), s=members)
    run_id = host.started(context={"user": {"name": "x"}}, out_dir=str(tmp_path))
    flow.finish(run_id, "s/a")
    flow.finish(run_id, "s/b")
    assert flow.job(run_id, "s/c")["inputs"] == {
        "key": 3,
        "ref": "x",
        "missing": None,
        "number": 5,
        "text": "a b",
        "folders": [f"{tmp_path}/s/a", f"{tmp_path}/s/b"],
        "folder": f"{tmp_path}/s/a",
        "file": f"{tmp_path}/s/a/deep/x.json",
    }


def test_refs_read_the_runs_context_and_each_result_under_its_node_id(
    host: flow.Flow,
) -> None:
    refs = {"own": read("run_key.0"), "first": read("s/a.v"), "second": read("s/b.deep.1")}
    members = flow.nodes(a="", b="", c="a b")
    members[2]["inputs"] = [{"name": name, "from": f"pipeline.{name}"} for name in refs]
    host.define(flow.step("s", inputs=refs), s=members)
    run_id = host.started(context={"run_key": [9], "s/a": {"v": "hidden by the result"}})
    flow.finish(run_id, "s/a", v=1)
    flow.finish(run_id, "s/b", deep=[0, 2])
    assert flow.job(run_id, "s/c")["inputs"] == {"own": 9, "first": 1, "second": 2}


def one_input(host: flow.Flow, template: Any, **columns: Any) -> str:
    """A started run of one node `s/b` whose input `x` has this template."""
    wanted = [{"name": "x", "from": "pipeline.x"}]
    host.define(flow.step("s", inputs={"x": template}), s=[{"id": "b", "inputs": wanted}])
    return host.started(**columns)


def received(run_id: str, node_id: str = "s/b") -> dict[str, Any]:
    return dispatcher.resolve_inputs_for_job(flow.job(run_id, node_id)["id"])


def test_the_template_is_resolved_against_the_context_as_it_is_when_executed(
    host: flow.Flow,
) -> None:
    run_id = one_input(host, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={"k": "now"})
    assert flow.job(run_id, "s/b")["inputs"] == {"x": "then"}
    assert received(run_id) == {"x": "now"}


def test_a_ref_that_has_stopped_resolving_keeps_its_first_value(host: flow.Flow) -> None:
    run_id = one_input(host, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={})
    assert received(run_id) == {"x": "then"}


def test_data_that_looks_like_a_ref_stays_data(host: flow.Flow) -> None:
    data = {"$from": "secret"}
    run_id = one_input(host, read("k"), context={"k": data, "secret": "told"})
    assert flow.job(run_id, "s/b")["inputs"] == {"x": data}
    assert received(run_id) == {"x": data}
    quoted = one_input(host, {"$value": data}, context={"secret": "told"})
    assert flow.job(quoted, "s/b")["inputs"] == {"x": data}
    assert received(quoted) == {"x": data}


def test_a_worker_hands_over_the_late_value_and_stores_what_it_was(
    host: flow.Flow,
) -> None:
    seen: list[Any] = []
    flow.body(seen.append, "b")
    config.register_node("b", lambda x: seen.append(x) or {"got": x})
    run_id = one_input(host, read("k"), context={"k": "then"})
    run_store.update_run(run_id, context={"k": {"$from": "k2"}, "k2": "never"})
    host.work()
    job = flow.job(run_id, "s/b")
    assert seen == [{"$from": "k2"}]
    assert (job["inputs"], job["resolved_inputs"]) == ({"x": "then"}, {"x": {"$from": "k2"}})
    assert flow.status(run_id) == "completed"


def test_the_inputs_of_a_job_that_an_app_queued_are_its_template(host: flow.Flow) -> None:
    run_id = run_store.insert_run(workflow_name="w", status="running", context={"k": 1})["id"]
    job_id = node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module="m", queue="cpu",
        inputs={"x": read("k"), "y": {"deep": read("k")}, "z": 2},
    )  # fmt: skip
    assert node_queue.get_node_job(job_id)["input_template"] is None  # type: ignore[index]
    assert dispatcher.resolve_inputs_for_job(job_id) == {"x": 1, "y": {"deep": 1}, "z": 2}


def test_an_input_of_an_apps_job_that_does_not_resolve_is_passed_as_it_stands(
    host: flow.Flow,
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
    host: flow.Flow,
) -> None:
    members = flow.nodes(a="", b="a", c="")
    members[1]["inputs"] = [{"name": "x", "from": "pipeline.x"}]
    host.define(flow.step("s", inputs={"x": read("s/a.size")}), s=members)
    run_id = host.started()
    flow.finish(run_id, "s/a", width=3)
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"] == "node 's/b': input 'x': $from 's/a.size': there is no 'size'"
    assert flow.states(run_id) == {"s/a": "completed", "s/c": "cancelled"}


def test_a_path_in_a_run_without_out_dir_is_in_the_folder_that_it_got(
    host: flow.Flow,
) -> None:
    members = flow.nodes(a="", b="a")
    members[1]["inputs"] = [{"name": "x", "from": "a"}]
    host.dag(*members)
    run_id = host.started()
    flow.finish(run_id, "s/a")
    assert flow.job(run_id, "s/b")["inputs"] == {"x": f"{flow.run(run_id)['out_dir']}/s/a"}


def test_inputs_too_large_to_store_fail_the_run_at_once(
    host: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "2")
    wanted = [{"name": name, "from": f"pipeline.{name}"} for name in "xy"]
    half = "h" * 1100
    host.define(
        flow.step("s", inputs={"x": read("half"), "y": read("half")}),
        s=[{"id": "b", "inputs": wanted}],
    )
    run_id = host.submit(context={"half": half})
    host.look()
    row = flow.run(run_id)
    assert (row["status"], row["start_attempts"]) == ("failed", 0)
    assert "inputs of node 's/b'" in row["error"]


# --- how runs end


def test_a_run_is_completed_by_its_last_node(host: flow.Flow) -> None:
    host.dag(a="", b="a", c="a")
    run_id = host.started()
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
    host: flow.Flow,
) -> None:
    host.dag(a="", b="", c="", d="a")
    run_id = host.started()
    flow.finish(run_id, "s/c")
    flow.fail(run_id, "s/a", "it broke")
    assert flow.states(run_id) == {"s/a": "failed", "s/b": "cancelled", "s/c": "completed"}
    row = flow.run(run_id)
    assert (row["status"], row["error"]) == ("failed", "node s/a failed: it broke")
    assert row["finished_at"] is not None


def test_a_failure_beside_results_of_the_same_batch_wins(host: flow.Flow) -> None:
    host.dag(a="", b="", c="a")
    run_id = host.started()
    flow.complete(run_id, "s/a")
    node_queue.mark_failed(flow.job(run_id, "s/b")["id"], error="broke")
    assert flow.dispatch(run_id) == 0
    assert flow.status(run_id) == "failed"
    assert "s/c" not in flow.jobs(run_id)


def test_nothing_changes_a_cancelled_run(host: flow.Flow) -> None:
    host.define(
        flow.step("s"), flow.ask("q"), flow.step("t", depends_on=["q", "s"]),
        s=flow.nodes(a="", b="a"), t=flow.nodes(c=""),
    )  # fmt: skip
    run_id = host.started()
    with engine.connect() as conn:
        running = transitions.claim_node(conn)
        assert running["node_id"] == "s/a"
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
        sql(
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
    host.go()
    assert flow.status(run_id) == "cancelled"
    assert flow.states(run_id) == {"s/a": "completed", "q": "cancelled"}
    assert node_queue.count_unprocessed_dispatch_events() == 0


@pytest.mark.parametrize("late", ["completed", "failed"])
def test_late_results_do_not_change_a_failed_run(host: flow.Flow, late: str) -> None:
    host.dag(a="", b="", c="b")
    run_id = host.started()
    with engine.connect() as conn:
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


def test_the_callbacks_do_what_the_drain_does(host: flow.Flow) -> None:
    host.dag(a="", b="a")
    run_id = host.started()
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


STEP = flow.step("s")
BAD: list[tuple[str, dict[str, Any] | None, list[Any], str]] = [
    ("empty workflow", {"name": "w", "steps": []}, [{"id": "a"}], r"workflow 'w': it has no steps"),
    ("empty pipeline", None, [], r"step 's': pipeline 's': it has no nodes"),
    (
        "cycle",
        None,
        flow.nodes(a="b", b="a"),
        r"a cycle of nodes: (a -> b -> a|b -> a -> b)",
    ),
    ("itself", None, flow.nodes(a="a"), r"node 'a' depends on itself"),
    ("unknown node", None, flow.nodes(a="x"), r"node 'a' depends on the unknown node 'x'"),
    ("duplicate", None, [{"id": "a"}, {"id": "a"}], r"two nodes have the id 'a'"),
    ("steps twice", {"name": "w", "steps": [STEP, STEP]}, [{"id": "a"}], r"two steps .* 's'"),
    (
        "unknown step",
        {"name": "w", "steps": [flow.step("s", depends_on=["x"])]},
        [{"id": "a"}],
        r"step 's' depends on the unknown step 'x'",
    ),
    (
        "unknown pipeline",
        {"name": "w", "steps": [flow.step("s", "no")]},
        [],
        r"no pipeline 'no'",
    ),
    ("no id", None, [{"id": "../x"}], r"'../x' is not an id"),
    ("no document", None, [3], r"node 1: an object is needed"),
]


@pytest.mark.parametrize(
    ("workflow", "members", "reason"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_a_workflow_that_cannot_run_fails_its_run_at_once_with_the_reason(
    host: flow.Flow, workflow: dict[str, Any] | None, members: list[Any], reason: str
) -> None:
    host.define(STEP, s=members)
    if workflow is not None:
        host.workflows["w"] = workflow
    run_id = host.submit()
    host.look()
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert re.search(reason, row["error"]), row["error"]
    assert flow.states(run_id) == {}


@pytest.mark.parametrize("error", [KeyError("w"), FileNotFoundError("w.yml"), LookupError()])
def test_a_workflow_that_the_provider_does_not_know_fails_its_run_at_once(
    host: flow.Flow, error: Exception
) -> None:
    def load(name: str) -> Any:
        raise error

    config.set_workflow_provider(load, load)
    run_id = host.submit(workflow_name="nope")
    host.look()
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"].startswith("the provider knows no workflow 'nope'")


def test_more_nodes_than_a_run_may_have_are_refused(
    host: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_NODES_PER_RUN", "2")
    host.dag(a="", b="", c="")
    run_id = host.started()
    assert "more than 2 nodes" in flow.run(run_id)["error"]


def test_a_run_that_failed_for_its_workflow_runs_once_that_is_fixed(
    host: flow.Flow,
) -> None:
    host.dag(a="a")
    run_id = host.started()
    host.dag(a="")
    run_store.update_run(run_id, status="queued")
    host.go()
    assert flow.status(run_id) == "completed"


# --- from beginning to end, by real workers


def test_workers_and_orchestrator_bring_a_diamond_to_its_end(host: flow.Flow) -> None:
    members = flow.nodes(a="", b="a", c="a", d="b c")
    for member, name in zip(members, "abcd", strict=True):
        flow.body({name: 1}, name)
        member["node"] = name
    host.dag(*members)
    run_id = host.submit()
    host.go()
    assert flow.status(run_id) == "completed"
    assert {n: j["context_delta"] for n, j in flow.jobs(run_id).items()} == {
        "s/a": {"a": 1}, "s/b": {"b": 1}, "s/c": {"c": 1}, "s/d": {"d": 1},
    }  # fmt: skip
    assert {j["claim_no"] for j in flow.jobs(run_id).values()} == {1}


def test_a_handler_that_raises_ends_its_run(host: flow.Flow) -> None:
    def boom() -> None:
        raise ValueError("no")

    flow.body(boom, "boom")
    host.dag({"id": "a", "node": "boom"}, b="a", c="")
    run_id = host.submit()
    host.go()
    assert flow.run(run_id)["error"] == "node s/a failed: ValueError: no"
    assert flow.states(run_id)["s/c"] in ("completed", "cancelled")


# --- many at once


COMPLETE = b"""
WITH done AS (UPDATE workflow_node_jobs SET status = 'completed', finished_at = now()
               WHERE id = ANY (%s) RETURNING *)
INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, generation)
SELECT run_id, node_id, 'completed', id, generation FROM done ORDER BY seq
"""


def cost_of_a_fan(host: flow.Flow, size: int, batch: int) -> tuple[float, float]:
    """Statements and rows a node when so many are completed between two drains."""
    middle = {f"n{i}": "src" for i in range(size)}
    host.dag(**{"src": "", **middle, "join": " ".join(middle)})
    run_id = host.submit()
    with engine.connect() as counted, engine.connect() as other:
        asked = counting_cursor.Counter(counted)
        begin = run_cache.on_connection(counted)
        assert starts.start_run(run_id, begin=begin) == 1
        flow.complete(run_id, "s/src")
        assert flow.dispatch(run_id, begin=begin) == size
        queued = [job["id"] for job in flow.jobs(run_id).values() if job["status"] == "queued"]
        made: list[int] = []
        for at in range(0, size, batch):
            other.execute(COMPLETE, (queued[at : at + batch],), prepare=True)
            made.append(flow.dispatch(run_id, begin=begin))
        assert made == [0] * (len(made) - 1) + [1]
    flow.finish(run_id, "s/join")
    assert flow.status(run_id) == "completed"
    return asked.statements / size, asked.rows / size


@pytest.mark.parametrize("batch", [1, 200])
def test_the_cost_of_a_fan_grows_with_its_nodes_and_not_with_their_square(
    unjudged: flow.Flow, batch: int
) -> None:
    few_statements, few_rows = cost_of_a_fan(unjudged, 200, batch)
    many_statements, many_rows = cost_of_a_fan(unjudged, 2000, batch)
    assert many_statements <= few_statements * 1.1
    assert many_rows <= few_rows * 1.1


def test_two_dispatchers_on_one_run_make_no_error_and_no_double(host: flow.Flow) -> None:
    host.dag(
        src="", **{f"n{i}": "src" for i in range(12)}, join=" ".join(f"n{i}" for i in range(12))
    )
    run_ids = [host.submit() for _ in range(3)]
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
            host.work()
            if problems or all(flow.status(run_id) in ended for run_id in run_ids):
                break
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
    assert problems == []
    assert [flow.status(run_id) for run_id in run_ids] == ["completed"] * 3
    for run_id in run_ids:
        assert len(flow.jobs(run_id)) == 14
        assert {job["claim_no"] for job in flow.jobs(run_id).values()} == {1}


def test_a_start_raced_by_many_queues_each_node_once(host: flow.Flow) -> None:
    host.dag(a="", b="", c="a b")
    run_id = host.submit()
    barrier = threading.Barrier(4)
    made: list[Any] = []

    def start() -> None:
        with engine.connect() as conn:
            barrier.wait(10)
            try:
                made.append(starts.start_run(run_id, begin=run_cache.on_connection(conn)))
            except BaseException as error:
                made.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(made) == [0, 0, 0, 2]


def test_an_engine_pool_of_one_connection_is_enough(
    host: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.close_pool()
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_ENGINE_POOL_MAX", "1")
    custom = [None, lambda value, context: value]
    for resolve in custom:
        host.define(
            flow.step("s"), flow.ask("q", depends_on=["s"]), flow.step("t", depends_on=["q"]),
            s=flow.nodes(a="", b="a"), t=flow.nodes(c=""),
        )  # fmt: skip
        host.provide(resolve_ref=resolve)
        run_id = host.submit()
        assert starts.start_queued() == (1, [])
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


def test_sixty_parked_runs_do_not_keep_a_new_one_from_starting(host: flow.Flow) -> None:
    host.define(flow.ask("q"))
    parked = [host.submit() for _ in range(60)]
    host.look()
    assert {flow.status(run_id) for run_id in parked} == {"running"}
    for run_id in parked:
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
    host.dag(a="")
    fresh = host.submit(workflow_name="w")
    host.look()
    assert flow.states(fresh) == {"s/a": "queued"}
    assert all(flow.job(run_id, "q")["input_spec"] for run_id in parked)


def test_runs_are_started_by_priority_and_then_by_age(host: flow.Flow) -> None:
    host.dag(a="")
    first, second, urgent = host.submit(), host.submit(), host.submit(priority=1)
    host.look()
    order = sql("SELECT run_id FROM workflow_node_jobs ORDER BY seq")
    assert [row["run_id"] for row in order] == [urgent, first, second]


def test_the_cache_of_a_run_ends_with_the_run(host: flow.Flow) -> None:
    host.dag(a="", b="a")
    run_store.insert_run(run_id="r", workflow_name="w")
    dispatcher.start_run("r")
    flow.finish("r", "s/a")
    flow.finish("r", "s/b")
    assert flow.status("r") == "completed"
    run_store.delete_run("r")
    run_store.insert_run(run_id="r", workflow_name="w")
    with engine.connect() as conn:
        # As another process starts it: what is remembered here is of the first one.
        kept = dict(run_cache._cache._items)
        starts.start_run("r", begin=run_cache.on_connection(conn))
        run_cache._cache._items.update(kept)
    assert flow.states("r") == {"s/a": "queued"}
    assert flow.finish("r", "s/a") == 1
    assert flow.states("r") == {"s/a": "completed", "s/b": "queued"}


def test_errors_are_builtins_that_apps_catch() -> None:
    assert issubclass(hooks.NoProvider, errors.QueueWorkflowsError)
    assert issubclass(hooks.HookFailed, errors.QueueWorkflowsError)
