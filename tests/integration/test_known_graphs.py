"""What a process reads of the graphs of runs costs it little, and nothing a second time."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from queue_workflows import config, db
from queue_workflows.claim import outcomes
from queue_workflows.dag import definition
from queue_workflows.dispatch import run_cache
from queue_workflows.runtime import clock
from queue_workflows.worker import claimed_job, node_plans, queue_state, shapes
from tests.support import counting_cursor, factories, flow, transitions, worker_scripts
from tests.support.cpu import cpu_seconds

pytestmark = pytest.mark.usefixtures("invariants_hold")


def recorded_together(count: int) -> int:
    """Claim so many nodes and record them in one statement, as a worker does.

    Return how many statements that took.
    """
    runner: Any = None  # nothing is to run
    own = queue_state.Queue(transitions.who(), shapes.Shape(count), runner)
    with db.connect() as conn:

        def send(claim: int, done: list[node_plans.Done]) -> list[claimed_job.ClaimedJob]:
            script = own.claim(claim, done, promote=False, ahead_s=5.0)
            rows = worker_scripts.run(conn, script)
            now = clock.boot_s()
            found = [row for row in rows if row[0] is not None]
            return [claimed_job.ClaimedJob(own, row, now, now) for row in found]

        outcome = outcomes.Outcome("completed", 0.1, "{}")
        done = [(job, outcome) for job in send(count, [])]
        assert len(done) == count
        asked = counting_cursor.Counter(conn)
        send(0, done)
        for job, _ in done:
            node_plans.noted(job)
        return asked.statements


@pytest.mark.parametrize("revision", [0, 1])
def test_nodes_that_are_recorded_together_leave_no_open_event(
    toy: flow.Flow, revision: int
) -> None:
    toy.dag(a="", b="", c="", last="a b c")
    run_id = toy.started()
    factories.execute("UPDATE workflow_runs SET revision = %s WHERE id = %s", revision, run_id)
    recorded_together(3)
    events = factories.execute("SELECT processed_at IS NULL AS open FROM workflow_dispatch_events")
    assert events == [{"open": False}] * 3


def test_the_graphs_of_unknown_runs_are_read_by_one_statement(toy: flow.Flow) -> None:
    toy.dag(a="")
    run_ids = [toy.started() for _ in range(4)]
    factories.execute("UPDATE workflow_runs SET definition = '{}' WHERE id = %s", run_ids[1])
    for run_id in run_ids:
        flow.forget(run_id)
    assert recorded_together(4) == 2
    assert [flow.status(each) for each in run_ids] == [
        "completed",
        "running",
        "completed",
        "completed",
    ]
    toy.go()
    assert flow.status(run_ids[1]) == "failed"


def test_a_large_graph_delays_no_result_and_is_asked_for_once(toy: flow.Flow) -> None:
    toy.dag(*({"id": f"n{secrets.token_hex(40)}"} for _ in range(120)))
    run_id = toy.started()
    flow.forget(run_id)
    assert [recorded_together(1) for _ in range(2)] == [2, 1]
    assert factories.execute(
        "SELECT count(*) AS n FROM workflow_dispatch_events WHERE processed_at IS NULL"
    ) == [{"n": 2}]


def test_reading_a_definition_again_costs_less_than_its_check(conn: db.Connection) -> None:
    entry = {"module": "ok", "queue": "cpu", "model": None, "deps": [], "inputs": {},
             "skip_if": None, "pipeline": "p", "step": None}  # fmt: skip
    nodes = [{"id": f"n{number}"} | entry for number in range(5000)]
    made = {"version": 1, "workflow": "w", "nodes": nodes}

    def start() -> None:
        run_id = factories.run(conn, mode="node", definition=made)
        head = factories.one(
            conn, "SELECT jsonb_build_object('id', id, 'generation', 0, 'revision', 0, 'born', 0,"
            " 'has_definition', true) FROM workflow_runs WHERE id = %s", run_id,
        )  # fmt: skip
        costs.append(cpu_seconds(lambda: run_cache.learn(db.transaction, head), tries=1))

    costs: list[float] = []
    start()
    start()
    assert costs[1] < costs[0] / 3


def test_a_workflow_is_expanded_again_only_after_a_change(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand, expanded = definition.expand, list[str]()

    def counted(workflow: Any, *more: Any) -> Any:
        expanded.append(workflow["name"])
        return expand(workflow, *more)

    monkeypatch.setattr(definition, "expand", counted)
    node_id = f"n{secrets.token_hex(8)}"  # no other test has had this workflow

    def started() -> tuple[int, str]:
        node = flow.job(toy.started(), f"s/{node_id}")
        return len(expanded), node["node_module"]

    toy.dag({"id": node_id, "node": "ok"})
    assert [started() for _ in range(2)] == [(1, "ok")] * 2
    toy.pipelines["s"]["nodes"][0]["node"] = "other"
    assert [started() for _ in range(2)] == [(2, "other")] * 2
    toy.workflows["w"]["steps"][0]["skip_if"] = False
    assert started() == (3, "other")
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "77")
    assert started() == (4, "other")
    config.set_node_versions({"other": 3})
    run_id = toy.started()
    assert flow.job(run_id, f"s/{node_id}")["required_version"] == "other@3"


TAKES_X: Any = {"id": "a", "node": "ok", "inputs": [{"name": "x", "from": "pipeline.x"}]}


def test_a_run_whose_nodes_take_its_inputs_starts_by_two_statements(toy: flow.Flow) -> None:
    toy.define(flow.step("s", inputs={"x": {"$from": "x"}}), s=[TAKES_X])
    run_id = toy.submit(context={"x": 1})
    with db.connect() as counted:
        asked = counting_cursor.Counter(counted)
        assert flow.start_on(counted, run_id) == 1
        assert asked.statements == 3  # it also reads the run, as no check has read it
    assert flow.job(run_id, "s/a")["inputs"] == {"x": 1}


def test_inputs_that_change_while_the_start_is_planned_count_as_they_are_then(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.define(flow.step("s", inputs={"x": {"$from": "x"}}), s=[TAKES_X])
    run_id = toy.submit(context={"x": 1})
    read, seen = run_cache.read_context, list[Any]()

    def changed(*given: Any) -> db.Script[dict[str, Any]]:
        found = yield from read(*given)
        seen.append(found)
        if len(seen) == 1:
            factories.execute(
                "UPDATE workflow_runs SET context = '{\"x\": 2}' WHERE id = %s", run_id
            )
        return found

    monkeypatch.setattr(run_cache, "read_context", changed)
    with db.connect() as conn:
        assert flow.start_on(conn, run_id) == 1
    assert seen == [{"x": 1}, {"x": 2}]
    assert flow.job(run_id, "s/a")["inputs"] == {"x": 2}
