"""A ref in a node's inputs lets the node wait for the node that it names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import errors
from tests.support import constants, planning, tabled
from tests.support.cpu import cpu_seconds
from tests.support.examples import examples
from tests.support.flow import step
from tests.support.planning import FakeRun, ids
from tests.support.wait import patience

Json = dict[str, Any]


def read(path: str) -> Json:
    return {"$from": path}


def taking(node_id: str, *keys: str, **more: Any) -> Json:
    """A node of a pipeline whose inputs are the step's inputs of these names."""
    inputs = [{"name": key, "from": f"pipeline.{key}"} for key in keys]
    return {"id": node_id, "inputs": inputs, **more}


def expand(*steps: Any, **pipelines: list[Json]) -> list[Json]:
    """The nodes of a workflow of these steps, checked as a stored definition is."""
    known = {name: {"nodes": nodes} for name, nodes in pipelines.items()}
    made = planning.expand({"name": "w", "steps": list(steps)}, known.__getitem__)
    planning.read(made)
    return made["nodes"]


def deps(*steps: Any, **pipelines: list[Json]) -> dict[str, list[str]]:
    return {node["id"]: node["deps"] for node in expand(*steps, **pipelines)}


def test_a_node_waits_for_the_node_that_its_input_names() -> None:
    both = [{"id": "a"}, taking("b", "x")]
    assert deps(step("s", "p", inputs={"x": read("s/a.v")}), p=both) == {"s/a": [], "s/b": ["s/a"]}
    for value in (read("s/a"), {"deep": [1], "in": {"k": read("s/a.v.0")}}):
        assert deps(step("s", "p", inputs={"x": value}), p=both)["s/b"] == ["s/a"]
    for value in ({"$value": read("s/a")}, [read("s/a")], read("a"), read("s"), 1):
        assert deps(step("s", "p", inputs={"x": value}), p=both)["s/b"] == []


def test_across_steps_also_one_that_is_declared_later() -> None:
    found = deps(
        step("t", "p", inputs={"x": read("s/a.v"), "y": read("q.answer")}),
        {"id": "q", "kind": "input", "widget": "w"},
        step("s", "one"),
        p=[taking("b", "x", "y"), taking("c", depends_on=["b"]), taking("d")],
        one=[{"id": "a"}],
    )
    assert found == {"t/b": ["q", "s/a"], "t/c": ["t/b"], "t/d": [], "q": [], "s/a": []}


def test_a_child_run_and_a_map_wait_for_what_they_take() -> None:
    found = deps(
        {"id": "m", "kind": "map", "over": read("s/a.list"), "pipeline": "p"},
        {"id": "r", "kind": "run", "workflow": "v", "inputs": {"x": read("m.results")}},
        step("s", "one"),
        p=[{"id": "n"}],
        one=[{"id": "a"}],
    )
    assert found == {"m": ["s/a"], "r": ["m"], "s/a": []}


BODY = {"steps": [{"id": "n", "kind": "node", "inputs": {"x": read("s/a.v")}}]}
INNER = {"id": "i", "kind": "map", "over": [1], **BODY}


@pytest.mark.parametrize(
    "body",
    [BODY, {"pipeline": "p", "inputs": {"x": read("s/a.v")}}, {"steps": [INNER]},
     {"steps": [{**INNER, "over": read("s/a.v"), "steps": [{"id": "n", "kind": "node"}]}]}],
)  # fmt: skip
def test_a_map_waits_for_what_its_body_takes(body: Json) -> None:
    outer = {"id": "m", "kind": "map", "over": [1], **body}
    found = deps(outer, step("s", "one"), p=[taking("n", "x")], one=[{"id": "a"}])
    assert found == {"m": ["s/a"], "s/a": []}


def test_the_nodes_of_a_body_wait_for_each_other() -> None:
    inner = [{"id": "b", "kind": "node", "inputs": {"x": read("a.v")}}, {"id": "a", "kind": "node"}]
    outer = {"id": "m", "kind": "map", "over": [1], "result": read("b")}
    (made,) = expand({**outer, "steps": inner})
    assert {node["id"]: node["deps"] for node in made["map"]["body"]} == {"b": ["a"], "a": []}
    flow = [taking("b", "x"), {"id": "a"}]
    (made,) = expand({**outer, "pipeline": "p", "inputs": {"x": read("a.v")}}, p=flow)
    assert {node["id"]: node["deps"] for node in made["map"]["body"]} == {"b": ["a"], "a": []}


def test_a_ref_to_a_node_of_an_item_waits_for_the_map() -> None:
    clips = {"id": "m", "kind": "map", "over": ["p"], "pipeline": "body"}
    found = deps(
        step("e", "p", inputs={"x": read("m[p]/n.k")}),
        clips,
        p=[taking("a", "x")],
        body=[{"id": "n"}],
    )
    assert found["e/a"] == ["m"]


def test_too_many_implied_dependencies_are_refused_before_the_definition_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert constants.value("dag.graph.MAX_DEPENDENCIES") == 1_000_000
    constants.put(monkeypatch, "dag.graph.MAX_DEPENDENCIES", 10_000)
    steps = [step("s", "many"), step("t", "takers", inputs={})]
    wide = [{"id": f"a{number}"} for number in range(101)]
    steps[1]["inputs"] = {"x": {f"k{number}": read(f"s/a{number}") for number in range(101)}}
    takers = [taking(f"b{number}", "x") for number in range(100)]
    with pytest.raises(errors.InvalidWorkflow, match="10100 dependencies"):
        expand(*steps, many=wide, takers=takers)


def test_names_of_a_body_and_its_item_are_not_those_outside_of_the_map() -> None:
    inner = [
        {"id": "a", "kind": "node", "inputs": {"x": read("item.v")}},
        {"id": "b", "kind": "node", "depends_on": ["a"], "inputs": {"x": read("a.v")}},
    ]
    ask = {"kind": "input", "widget": "w"}
    found = deps(
        {"id": "m", "kind": "map", "over": [1], "steps": inner},
        *({"id": name, **ask} for name in ("item", "a")),
    )
    assert found == {"m": [], "item": [], "a": []}


CHOOSING = {
    "id": "c", "kind": "branch", "pipeline": "p", "arms": {"1": "b", "2": "d"},
    "on": read("s/a.v"),
}  # fmt: skip


def test_the_nodes_of_a_branch_wait_for_its_value() -> None:
    arms = [taking("a"), taking("b", depends_on=["a"]), taking("d")]
    found = deps(CHOOSING, step("s", "one"), p=arms, one=[{"id": "a"}])
    assert found == {"c/a": ["s/a"], "c/b": ["c/a"], "c/d": ["s/a"], "c": ["c/b", "c/d"], "s/a": []}


def test_two_nodes_of_one_branch_wait_only_as_declared() -> None:
    arms = [taking("b", "x"), taking("d")]
    found = deps({**CHOOSING, "on": 1, "inputs": {"x": read("c/d.v")}}, p=arms)
    assert found == {"c/b": [], "c/d": [], "c": ["c/b", "c/d"]}


LOOP = {
    "id": "l", "kind": "loop", "pipeline": "p", "start": {"n": 2}, "result": "f", "at_most": 2,
    "until": {"$from": "l.n", "$eq": 0},
}  # fmt: skip


def test_a_loop_waits_for_what_its_rounds_and_its_end_take() -> None:
    body = [taking("f", "x"), taking("g", depends_on=["f"])]
    around = (step("s", "one"),)
    for more in (
        {"inputs": {"x": read("s/a.v")}},
        {"until": {"$from": "s/a.v", "$eq": 0}},
        {"start": read("s/a.v"), "inputs": {"x": read("l.n")}},
    ):
        found = deps({**LOOP, **more}, *around, p=body, one=[{"id": "a"}])
        assert found == {
            "l/f#1": ["s/a"], "l/g#1": ["l/f#1"], "l/f#2": ["l/g#1", "l/f#1"], "l/g#2": ["l/f#2"],
            "l": ["l/g#2", "l/f#2"], "s/a": [],
        }  # fmt: skip


def test_skip_if_and_the_source_of_a_question_imply_nothing() -> None:
    found = deps(
        step("s", "one"),
        step("t", "p", skip_if=read("s/a.v")),
        {"id": "q", "kind": "input", "widget": "choose_one", "source": read("s/a.v")},
        {"id": "m", "kind": "map", "over": [1], "skip_if": read("s/a.v"), "pipeline": "own"},
        one=[{"id": "a"}],
        p=[{"id": "b"}, {"id": "c", "skip_if": read("t/b.v")}],
        own=[{"id": "n", "skip_if": read("s/a.v")}],
    )
    assert found == {"s/a": [], "t/b": [], "t/c": [], "q": [], "m": []}


def test_refs_that_would_close_a_cycle_add_nothing() -> None:
    circle = [taking("a", "x"), taking("b", "y"), taking("c", "z"), taking("d", "x")]
    given = {"x": read("s/b.v"), "y": read("s/a.v"), "z": read("s/c.v")}
    assert deps(step("s", "p", inputs=given), p=circle) == {
        "s/a": [], "s/b": [], "s/c": [], "s/d": ["s/b"],
    }  # fmt: skip
    against = [taking("a", "x"), taking("b", depends_on=["a"])]
    found = deps(step("s", "p", inputs={"x": read("s/b.v")}), p=against)
    assert found == {"s/a": [], "s/b": ["s/a"]}


def test_a_ref_from_one_cycle_to_another_is_waited_for() -> None:
    nodes = [
        taking("a", "x"), taking("b", depends_on=["a"]),
        taking("between", depends_on=["b"]),
        taking("c", "y", "z"), taking("d", depends_on=["c"]),
    ]  # fmt: skip
    given = {"x": read("s/b.v"), "y": read("s/d.v"), "z": read("s/between.v")}
    assert deps(step("s", "p", inputs=given), p=nodes) == {
        "s/a": [], "s/b": ["s/a"], "s/between": ["s/b"], "s/c": ["s/between"], "s/d": ["s/c"],
    }  # fmt: skip
    given["z"] = read("s/a.v")
    assert deps(step("s", "p", inputs=given), p=nodes)["s/c"] == ["s/a"]


def test_a_cycle_takes_no_other_dependency_away() -> None:
    nodes = [{"id": "first"}, taking("a", "x", "f"), taking("b", "y"), taking("last", "y")]
    given = {"x": read("s/b.v"), "y": read("s/a.v"), "f": read("s/first.v")}
    assert deps(step("s", "p", inputs=given), p=nodes) == {
        "s/first": [], "s/a": ["s/first"], "s/b": [], "s/last": ["s/a"],
    }  # fmt: skip


def test_nodes_that_share_what_their_step_waits_for_do_not_share_what_a_ref_implies() -> None:
    found = deps(
        step("first", "one"),
        step("other", "one"),
        step("s", "p", depends_on=["first"], inputs={"x": read("other/a.v")}),
        one=[{"id": "a"}],
        p=[taking("b", "x"), taking("c"), taking("d")],
    )
    assert found["s/b"] == ["first/a", "other/a"]
    assert found["s/c"] == found["s/d"] == ["first/a"]


def test_what_a_node_waits_for_anyway_is_not_added() -> None:
    chain = [taking("a"), taking("b", depends_on=["a"]), taking("c", "x", depends_on=["b"])]
    assert deps(step("s", "p", inputs={"x": read("s/a.v")}), p=chain)["s/c"] == ["s/b"]
    assert deps(step("s", "p", inputs={"x": read("s/b.v")}), p=chain)["s/c"] == ["s/b"]
    # Also if only other refs imply it.
    refs = [taking("a"), taking("b", "x"), taking("c", "x", "y")]
    found = deps(step("s", "p", inputs={"x": read("s/a.v"), "y": read("s/b.v")}), p=refs)
    assert found["s/b"] == ["s/a"]
    assert found["s/c"] in (["s/b"], ["s/a", "s/b"])


def test_the_output_of_a_run_waits_for_the_last_nodes_alone() -> None:
    flow = {"p": {"nodes": [{"id": "a"}, taking("b", "x")]}}
    steps = [step("s", "p", inputs={"x": read("s/a.v")})]
    document = {"name": "w", "steps": steps, "output": {"v": read("s/b.v")}}
    made = planning.expand(document, flow.__getitem__)
    assert made["nodes"][-1]["deps"] == ["s/b"]


def test_a_declared_cycle_is_still_refused() -> None:
    circle = [taking("a", "x", depends_on=["b"]), taking("b", depends_on=["a"])]
    with pytest.raises(errors.InvalidWorkflow, match="cycle of nodes"):
        deps(step("s", "p", inputs={"x": read("s/b.v")}), p=circle)


# --- dependencies on one node of another step


def test_a_step_may_wait_for_one_node_of_another() -> None:
    two = [{"id": "a"}, {"id": "b", "depends_on": ["a"]}, {"id": "c"}]
    found = deps(
        step("t", "one", depends_on=["s/a", "u"]), step("s", "p"), step("u", "one"),
        p=two, one=[{"id": "n"}],
    )  # fmt: skip
    assert found["t/n"] == ["s/a", "u/n"]
    arms = [taking("b"), taking("d")]
    found = deps({**CHOOSING, "on": 1}, step("t", "one", depends_on=["c/b"]), p=arms, one=two)
    assert found["t/a"] == found["t/c"] == ["c/b"]


def test_a_dependency_on_no_node_is_refused() -> None:
    cases: list[Any] = [
        ("s/gone", "unknown step 's/gone'"),
        ("gone/a", "unknown step 'gone/a'"),
        ("s/", "unknown step 's/'"),
        ("l/f", "unknown step 'l/f'"),
        ("l/f#1", "unknown step 'l/f#1'"),
        ("m/n", "unknown step 'm/n'"),
        ("q/q", "unknown step 'q/q'"),
        ("t/a", "'t' depends on itself"),
        ("u/a", "cycle of steps"),
    ]
    for dep, words in cases:
        with tabled.case(dep, words), pytest.raises(errors.InvalidWorkflow, match=words):
            deps(
                step("s", "one"),
                LOOP,
                {"id": "m", "kind": "map", "over": [1], "steps": [{"id": "n", "kind": "node"}]},
                {"id": "q", "kind": "input", "widget": "w"},
                step("t", "one", depends_on=[dep]),
                step("u", "one", depends_on=["t"]),
                p=[taking("f")],
                one=[{"id": "a"}],
            )


# --- steps of other kinds


def test_steps_behind_one_of_another_kind_wait_for_those_before_it() -> None:
    cases: list[Any] = ["note", "node", "Pipeline", "", None, 5, [], {"a": 1}]
    for kind in cases:
        with tabled.case(kind):
            notes = [
                {"id": "x", "kind": kind, "depends_on": ["s"], "skip_if": True, "pipeline": "gone"},
                {"id": "y", "kind": kind, "depends_on": ["x", "u/a"]},
                {"id": "z", "kind": kind},
            ]
            for note in notes:
                if kind is None:
                    del note["kind"]
            found = deps(
                step("s", "p"), step("u", "p"), *notes,
                step("t", "p", depends_on=["y"]), step("v", "p", depends_on=["z"]),
                step("w", "p", depends_on=["z", "x", "u"]),
                p=[{"id": "a"}, {"id": "b", "depends_on": ["a"]}],
            )  # fmt: skip
            starts = {name: found[f"{name}/a"] for name in "suvtw"}
            assert starts == {"s": [], "u": [], "v": [], "t": ["s/b", "u/a"], "w": ["s/b", "u/b"]}
            assert len(found) == 10


def test_a_cycle_through_steps_of_other_kinds_is_refused() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="cycle of steps: s -> x -> s"):
        deps(step("s", "p", depends_on=["x"]), {"id": "x", "depends_on": ["s"]}, p=[{"id": "a"}])


# --- against slow definitions, and cost


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[set[int]], list[set[int]]]:
    """The declared dependencies of nodes, which have no cycle, and the targets of their refs."""
    size = draw(st.integers(1, 7))
    every = st.integers(0, size - 1)
    declared = [draw(st.sets(st.integers(0, n - 1))) if n else set[int]() for n in range(size)]
    return declared, [draw(st.sets(every, max_size=3)) for _ in range(size)]


def reached(edges: list[set[int]], start: int) -> set[int]:
    """The nodes before one, on any path of at least one edge."""
    found: set[int] = set()
    todo = [start]
    while todo:
        fresh = edges[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


@settings(max_examples=examples(300))
@given(graphs())
def test_the_implied_dependencies_are_those_of_a_slow_reference(
    drawn: tuple[list[set[int]], list[set[int]]],
) -> None:
    declared, refs = drawn
    nodes: list[Json] = []
    for number, targets in enumerate(refs):
        keys = [f"k{each}" for each in sorted(targets)]
        needed = [f"n{each}" for each in sorted(declared[number])]
        nodes.append(taking(f"n{number}", *keys, depends_on=needed))
    inputs = {f"k{each}": read(f"s/n{each}.v") for each in range(len(nodes))}
    found = deps(step("s", "p", inputs=inputs), p=nodes)
    made = [{int(dep.removeprefix("s/n")) for dep in each} for each in found.values()]
    wanted = [one | two - {n} for n, (one, two) in enumerate(zip(declared, refs, strict=True))]
    before = [reached(made, number) for number in range(len(made))]
    joined = [reached(wanted, number) for number in range(len(made))]
    assert all(number not in each for number, each in enumerate(before))
    for number, targets in enumerate(refs):
        assert declared[number] <= made[number] <= wanted[number]
        for each in targets - {number}:
            closes = number in joined[number] and each in joined[each]
            assert closes or each in before[number]
        for each in made[number] - declared[number]:
            others = [made[number] - {each} if n == number else m for n, m in enumerate(made)]
            # An edge that only another added one makes needless may stay.
            declared_too = others[number] & declared[number]
            assert each not in set[int]().union(*(reached(made, one) for one in declared_too))


def test_a_run_goes_the_way_that_refs_imply() -> None:
    known = {"p": {"nodes": [taking("b", "x"), {"id": "a"}]}}
    document = {"name": "w", "steps": [step("s", "p", inputs={"x": read("s/a.v")})]}
    run = FakeRun(planning.read(planning.expand(document, known.__getitem__)))
    assert ids(run.start()) == ["s/a"]
    run.finish("s/a", v=5)
    assert [(row.node.id, row.inputs) for row in run.after("s/a").rows] == [("s/b", {"x": 5})]


def test_refs_over_a_chain_of_10000_nodes_are_checked_fast() -> None:
    chain: list[Json] = [
        taking(f"n{i}", "x", depends_on=[f"n{i - 1}"] if i else []) for i in range(10_000)
    ]
    seconds = cpu_seconds(lambda: deps(step("s", "p", inputs={"x": read("s/n0.v")}), p=chain))
    assert seconds < patience(3)


def test_many_steps_behind_a_long_one_expand_fast() -> None:
    chain: list[Json] = [
        {"id": f"n{i}", "depends_on": [f"n{i - 1}"] if i else []} for i in range(5000)
    ]
    steps = [step(f"t{i}", "one", depends_on=["s/n0"]) for i in range(5000)]

    def made() -> None:
        assert deps(step("s", "p"), *steps, p=chain, one=[{"id": "a"}])["t9/a"] == ["s/n0"]

    assert cpu_seconds(made) < patience(2)
