"""Planning at its edges: reads of the context, repeated events, loops and child runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_workflows.dag import branches, graph, loops, plan
from tests.support.planning import FakeRun, built, ids, node

LOOP = loops.Loop("l", tuple(loops.Round(f"l/f#{n}", {"$from": f"u{n}"}) for n in (1, 2, 3)), True)
BRANCH = {"on": {"$from": "kind"}, "arms": {"x": "b/one", "y": "b/two"}, "other": None}


def branched(*more: dict[str, Any], **context: Any) -> FakeRun:
    arms = [node(f"b/{name}", arm="b") for name in ("one", "two")]
    end = node("b", "b/one", "b/two", module=branches.MODULE, choice=BRANCH)
    nodes = [*arms, end, *more]
    return FakeRun(graph.read({"version": 2, "workflow": "w", "nodes": nodes}), **context)


def test_the_event_of_a_node_is_known_without_a_query_from_then_on() -> None:
    run = FakeRun(built(node("a"), node("b", "a")))
    progress = plan.Progress(run.graph)
    assert ids(plan.plan(progress, ["a"], run, out_dir=None)) == ["b"]
    assert (progress.known, run.calls) == ({"a"}, 0)


def test_a_node_that_is_not_committed_counts_for_its_plan_alone() -> None:
    run = FakeRun(built(node("a"), node("b", "a")))
    progress = plan.Progress(run.graph)
    assert ids(plan.plan(progress, ["a"], run, out_dir=None, committed=False)) == ["b"]
    assert progress.known == set()


def test_an_event_that_comes_twice_ends_the_branch_once() -> None:
    run = branched(kind="x")
    run.start()
    run.finish("b/one", v=1)
    assert ids(run.after("b/one")) == ["b"]
    assert run.after("b/one") == plan.Plan([])


def test_a_branch_keeps_its_value_as_inputs_and_the_nodes_of_its_arms_do_not() -> None:
    run = branched(kind="x")
    run.start()
    run.finish("b/one")
    run.after("b/one")
    assert {row.node.id: row.inputs for row in run.rows} == {
        "b/one": {},
        "b/two": None,
        "b": {"value": "x"},
    }


@pytest.mark.parametrize(("output", "seen"), [({"v": 2}, 2), ({}, 1)])
def test_an_output_of_the_plan_replaces_a_value_of_the_context_unless_it_is_empty(
    output: dict[str, Any], seen: int
) -> None:
    after = node("n", "b", inputs={"i": {"$from": "b.v"}})
    run = branched(after, kind="x", b={"v": 1})
    run.start()
    run.finish("b/one", **output)
    made = run.after("b/one")
    assert [row.inputs for row in made.rows if row.node.id == "n"] == [{"i": seen}]


def test_the_apps_value_under_the_id_of_a_skipped_node_is_read() -> None:
    run = FakeRun(
        built(node("s", skip_if=True), node("n", "s", inputs={"i": {"$from": "s.v"}})), s={"v": 1}
    )
    assert [row.inputs for row in run.start().rows] == [{"i": 1}, None]


def test_what_was_learned_is_no_reason_to_read_the_context_in_each_round() -> None:
    flag = {"skip_if": {"$from": "flag"}}
    run = FakeRun(
        built(node("a"), node("late"), node("m", "a", "late", **flag), node("n", "m", **flag)),
        flag=True,
    )
    run.finish("a", "late")
    assert ids(run.after("a"), "skipped") == ["m", "n"]
    assert (run.calls, run.heads_read) == (1, [{"flag"}])


def unresolved(value: Any, context: Any) -> Any:
    raise RuntimeError("no such value")


def candidate_of(number: int | None, **more: Any) -> plan.NewNode:
    of = graph.Node("l/f", "f", "cpu", None, (), {}, None, "p", None, arm="l", round=number, **more)
    return plan.NewNode(of, template={}, owner=LOOP)


@pytest.mark.parametrize("number", [None, 1])
def test_a_first_round_reads_nothing_of_its_loop_and_takes_place(number: int | None) -> None:
    made = candidate_of(number)
    assert made.templates() == []
    assert not made.is_skipped({}, unresolved)
    assert not made.after_loop


@pytest.mark.parametrize("number", [2, 3])
def test_a_round_reads_the_end_of_the_one_before_and_nothing_else(number: int) -> None:
    assert candidate_of(number).templates() == [
        {"$from": f"u{number - 1}"},
        {"$from": f"l/f#{number - 1}"},
    ]


def test_the_node_with_a_loops_output_reads_all_its_rounds() -> None:
    read = [{"$from": head} for n in (1, 2, 3) for head in (f"u{n}", f"l/f#{n}")]
    assert candidate_of(None, loop=LOOP).templates() == read


def test_a_round_whose_start_cannot_be_decided_is_not_skipped() -> None:
    made = candidate_of(2)
    assert not made.is_skipped({"l/f#1": {}}, unresolved)
    assert not made.after_loop
    assert made.reason is not None and "no such value" in made.reason


def test_a_child_run_that_nobody_waits_for_ends_its_node_at_once() -> None:
    run = FakeRun(
        built(
            node("wait", module=f"{graph.RUN}flow"),
            node("go", module=f"{graph.START}flow"),
            node("after", "go", inputs={"i": {"$from": "go.result"}}),
        )
    )
    rows = {row.node.id: row for row in run.start().rows}
    wait, go = rows["wait"], rows["go"]
    assert (wait.status, wait.result) == ("awaiting_input", None)
    assert wait.child is not None and wait.child["workflow"] == "flow"
    assert go.child is not None and (go.status, go.result) == (
        "completed",
        {"result": go.child["id"]},
    )
    assert rows["after"].inputs == {"i": go.child["id"]}


def test_the_last_open_dependency_is_none_once_all_are_known() -> None:
    progress = plan.Progress(built(node("a"), node("b"), node("j", "a", "b")))
    assert progress.last_open("j") == 1
    progress.known = {"b"}
    assert progress.last_open("j") == 0
    progress.known = {"a", "b"}
    assert progress.last_open("j") == -1


def test_a_dependency_that_the_plan_skipped_is_not_queried_again() -> None:
    run = FakeRun(
        built(node("a"), node("s", "a", skip_if=True), node("x"), node("y"), node("j", *"sxy"))
    )
    run.finish("a", "x", "y")
    assert ids(run.after("a")) == ["j", "s"]
    assert (run.calls, run.lookups) == (2, 2)


def test_each_query_asks_for_twice_as_many_dependencies() -> None:
    run = FakeRun(
        built(*(node(f"n{n}") for n in range(64)), node("j", *(f"n{n}" for n in range(64))))
    )
    run.finish(*(f"n{n}" for n in range(64)))
    assert ids(run.after("n63")) == ["j"]
    assert (run.calls, run.lookups) == (6, 63)


class Counted(set[str]):
    """A set that counts its look-ups."""

    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


def test_a_plan_looks_at_each_skipped_dependency_of_a_join_a_few_times() -> None:
    width = 200
    names = [f"n{n}" for n in range(width)]
    of = built(node("first"), *(node(name) for name in names), node("j", "first", *names[::-1]))
    round_ = plan.Planner(plan.Progress(of), set(), FakeRun(of))
    round_.skipped = skipped = Counted()
    for name in names:
        skipped.add(name)
        assert round_.ready(["j"]) == []
    assert skipped.lookups < 6 * width


def test_the_output_of_a_run_is_the_inputs_of_its_node_and_a_map_waits_for_its_items() -> None:
    output = node_of(graph.OUTPUT)._replace(module=graph.OUTPUT, inputs={"x": 1})
    items = graph.Map(graph.Graph({"e": node_of("e")}), "e")
    of_items = node_of("m", map=items)._replace(module="__map__", inputs={"over": [1]})
    made = FakeRun(graph.Graph({graph.OUTPUT: output, "m": of_items})).start()
    rows = {row.node.id: (row.status, row.inputs, row.result) for row in made.rows}
    assert rows == {
        graph.OUTPUT: ("completed", {"x": 1}, {"x": 1}),
        "m": ("queued", {"over": [1]}, None),
    }


def test_a_node_that_was_decided_before_hides_no_other_one() -> None:
    run = FakeRun(built(node("a", skip_if=True), node("b", skip_if=True)))
    run.status["a"] = "running"
    assert ids(run.start()) == ["b"]


def row_json(row: plan.NewNode) -> dict[str, Any]:
    return json.loads(plan.encode_row(row))


COLUMNS = {
    "node_id": "n", "node_module": "m", "queue": "gpu", "required_model": "big",
    "required_version": "m@3", "pipeline_name": "p", "status": "queued", "ref_heads": ["k"],
    "input_template": {"i": {"$from": "k.v"}}, "inputs": {"i": 7},
}  # fmt: skip


def encoded(**more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"inputs": {"i": 7}, "template": {"i": {"$from": "k.v"}}}
    of = graph.Node("n", "m", "gpu", "big", (), {}, None, "p", None, version=3)
    return row_json(plan.NewNode(of._replace(**more.pop("node", {})), **{**row, **more}))


def test_the_row_of_a_node_has_its_columns_and_those_of_its_policy() -> None:
    assert encoded() == COLUMNS
    assert encoded(node={"policy": {"retries": 2, "backoff": 5}}) == COLUMNS | {
        "max_attempts": 3,
        "policy": {"backoff": 5},
    }
    asking = {"policy": {"timeout_s": 5, "default": 1}, "step": {"widget": "w"}}
    assert encoded(node=asking) == COLUMNS | {"policy": {"timeout_s": 5, "default": 1}}


def test_the_row_of_a_node_that_no_worker_runs_has_nothing_for_a_claim() -> None:
    policy = {"policy": {"retries": 2}}
    ended = {
        "node_id": "n", "node_module": "m", "queue": "gpu", "inputs": {"i": 7},
        "input_template": {}, "ref_heads": [],
    }  # fmt: skip
    assert encoded(node=policy, status="completed", result={"r": 1}) == ended | {
        "status": "completed",
        "context_delta": {"r": 1},
    }
    child = {"id": "c", "workflow": "w"}
    assert encoded(node=policy, status="awaiting_input", child=child) == ended | {
        "status": "awaiting_input",
        "child": child,
        "context_delta": {},
    }
    skipped = row_json(plan.NewNode(node_of("n"), "skipped"))
    assert (skipped["inputs"], skipped["input_template"], skipped["ref_heads"]) == ({}, None, [])


def node_of(node_id: str, **more: Any) -> graph.Node:
    return graph.Node(node_id, "m", "cpu", None, (), {}, None, None, None, **more)


@pytest.mark.parametrize(("status", "reason"), [("queued", "items"), ("skipped", None)])
def test_the_row_of_a_map_waits_for_its_items(status: str, reason: str | None) -> None:
    of = graph.Map(graph.Graph({"e": node_of("e")}), "e")
    row = plan.NewNode(node_of("m", map=of), status, {"over": [1]}, {"over": [1]})
    assert row_json(row) == {
        "node_id": "m", "node_module": "m", "queue": "cpu", "status": status,
        "blocked_reason": reason, "inputs": {}, "input_template": {}, "ref_heads": [],
    }  # fmt: skip
