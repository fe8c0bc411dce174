"""Items of maps at their edges: ids, look-ups, loops and branches in a body, nested maps."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import branches, graph, item_ids, items, loops
from queue_workflows.dag import document_values as bindings
from tests.support import tabled
from tests.unit.test_dag_graph_edges import entry


def mapped(*nodes: dict[str, Any], item: str = "item") -> graph.Map:
    """Return a map with these nodes as its body."""
    return graph.Map(graph.read({"version": 2, "nodes": nodes}), nodes[-1]["id"], item=item)


def instance(*nodes: dict[str, Any], value: Any = 7) -> items.Instance:
    return items.Instance([items.Scope(mapped(*nodes), "m", "k", value)])


def inputs_of(value: Any, item: Any = 7) -> Any:
    made = instance(entry("n", inputs={"i": value}), value=item)
    return made.nodes["m[k]/n"].inputs["i"]


CHAIN = (entry("a"), entry("b", "a"), entry("c", "a"))
ROUNDS = [{"end": f"l/f#{n}", "until": {"$from": f"l/f#{n}.x"}} for n in (1, 2, 3)]
LOOP = (
    entry("l/f#1", arm="l", round=1),
    entry("l/f#2", "l/f#1", arm="l", round=2),
    entry("l/f#3", "l/f#2", arm="l", round=3),
    entry("l", "l/f#3", module=loops.MODULE, loop={"rounds": ROUNDS, "must": True}),
)
CHOICE = {"on": {"$from": "item.kind"}, "arms": {"x": "b/one"}, "other": "b/two"}
BRANCH = (
    entry("b/one", arm="b"), entry("b/two", arm="b"),
    entry("b", "b/one", "b/two", module=branches.MODULE, choice=CHOICE),
)  # fmt: skip


def test_the_graph_of_an_item_is_that_of_the_body_with_full_ids() -> None:
    made = instance(*CHAIN)
    assert made.sources == ("m[k]/a",)
    assert made.leaves == ("m[k]/b", "m[k]/c")
    assert made.downstream("m[k]/a") == ("m[k]/b", "m[k]/c")
    assert [*made.nodes] == ["m[k]/a", "m[k]/b", "m[k]/c"]
    assert (len(made.nodes), made.position("m[k]/c")) == (3, 2)
    assert made.nodes["m[k]/b"] is made.nodes["m[k]/b"]
    assert made.once == ("m[k]/a", "m[k]/b", "m[k]/c")


@pytest.mark.parametrize("name", ["a", "m[k]/x", "m[j]/a", "", 5])
def test_a_node_of_elsewhere_is_not_there(name: Any) -> None:
    nodes = instance(*CHAIN).nodes
    assert name not in nodes
    assert "m[k]/a" in nodes
    if isinstance(name, str):
        with pytest.raises(KeyError):
            nodes[name]


def test_the_rounds_of_a_loop_have_full_ids() -> None:
    made = instance(*LOOP)
    loop = made.nodes["m[k]/l"].loop
    assert loop is not None
    rounds = [loops.Round(f"m[k]/l/f#{n}", {"$from": f"m[k]/l/f#{n}.x"}) for n in (1, 2, 3)]
    assert (loop.id, loop.must, len(loop.rounds)) == ("m[k]/l", True, 3)
    assert [*loop.rounds] == rounds
    assert loop.rounds[1] == rounds[1]
    assert (made.nodes["m[k]/l/f#2"].arm, made.nodes["m[k]/l"].arm) == ("m[k]/l", None)
    assert made.nodes["m[k]/l/f#2"].loop is None


def test_a_branch_has_full_ids_and_the_value_of_its_item() -> None:
    made = instance(*BRANCH, value={"kind": "x"})
    choice = made.nodes["m[k]/b"].choice
    assert choice == branches.Choice(
        "m[k]/b",
        {"$value": "x"},
        {"x": "m[k]/b/one"},
        "m[k]/b/two",
        {
            "m[k]/b/one": frozenset({"m[k]/b/one"}),
            "m[k]/b/two": frozenset({"m[k]/b/two"}),
        },
    )
    assert made.nodes["m[k]/b"].choice is choice
    assert made.nodes["m[k]/b/one"].choice is None


def test_a_branch_without_other_has_none_in_an_item() -> None:
    choice = {"on": 1, "arms": {"x": "b/one"}, "other": None}
    made = instance(BRANCH[0], {**entry("b", "b/one", module=branches.MODULE), "choice": choice})
    found = made.nodes["m[k]/b"].choice
    assert found is not None and found.other is None


def test_an_input_is_bound_to_the_item() -> None:
    cases: list[Any] = [
        (5, 5), ({"$from": "item"}, 7),
        ({"$value": {"$from": "item"}}, {"$value": {"$from": "item"}}),
        ({"$value": 3}, 3), ({"$value": {bindings.OUT: 1}}, {"$value": {bindings.OUT: 1}}),
        ({"x": {"$from": "item"}}, {"x": {"$value": 7}}),
        ({"$from": "other.x"}, {"$from": "other.x"}),
        ({"$from": "item.x"}, {"$from": "m[k]/item.x"}), ({"$from": "n.x"}, {"$from": "m[k]/n.x"}),
        ({"$from": 5}, {"$from": 5}), ({"$from": "item", "$eq": 7}, True),
        ({bindings.OUT: "n/file"}, {bindings.OUT: "m[k]/n/file"}),
        ({bindings.OUT: ["n/a", "n/b"]}, {bindings.OUT: ["m[k]/n/a", "m[k]/n/b"]}),
        ({bindings.OUT: {"$value": {"$from": "item"}}}, {bindings.OUT: {"$value": {"$value": 7}}}),
    ]  # fmt: skip
    for given, bound in cases:
        with tabled.case(given, bound):
            assert inputs_of(given) == bound


def test_an_item_that_is_a_template_stays_quoted() -> None:
    assert inputs_of({"$from": "item"}, {"$from": "x"}) == {"$value": {"$from": "x"}}
    assert inputs_of({"$from": "item"}, {bindings.OUT: 1}) == {"$value": {bindings.OUT: 1}}
    assert inputs_of({"$from": "item"}, {"a": 1}) == {"a": 1}


def test_the_innermost_item_of_a_name_counts_and_others_are_found_outside() -> None:
    read = {"own": {"$from": "item.x"}, "outer": {"$from": "film"}, "node": {"$from": "cut.y"},
            "file": {bindings.OUT: "n/file"}}  # fmt: skip
    inner = mapped(entry("n", skip_if={"$from": "item"}, inputs=read))
    outer = mapped(entry("cut"), entry("m"), item="film")
    scopes = [items.Scope(outer, "o", "1", "F"), items.Scope(inner, "o[1]/m", "2", {"x": 3})]
    made = items.Instance(scopes).nodes["o[1]/m[2]/n"]
    assert made.inputs == {
        "own": 3,
        "outer": "F",
        "node": {"$from": "o[1]/cut.y"},
        "file": {bindings.OUT: "o[1]/m[2]/n/file"},
    }
    assert made.skip_if == {"$value": {"x": 3}}
    assert items.context(scopes) == {"o[1]/film": "F", "o[1]/m[2]/item": {"x": 3}}
    assert items.ids(scopes[1]) == ["o[1]/m[2]/n"]


def test_near_a_round_are_the_ones_beside_it_and_what_no_loop_repeats() -> None:
    scope = items.Scope(mapped(*LOOP), "m", "k", 1)
    assert items.near(scope, ["m[k]/l/f#1"]) == ["m[k]/l", "m[k]/l/f#2", "m[k]/l/f#1"]
    assert items.near(scope, []) == ["m[k]/l"]
    plain = items.Scope(mapped(*CHAIN), "m", "k", 1)
    assert items.near(plain, ["m[k]/a"]) == ["m[k]/a", "m[k]/b", "m[k]/c"]


def test_an_id_of_the_longest_length_is_taken_and_a_longer_one_is_refused() -> None:
    room = item_ids.MAX_ID_BYTES - len("m[]/n")

    def made(key: str) -> items.Instance:
        return items.Instance([items.Scope(mapped(entry("n")), "m", key, 1)])

    made("k" * room).check_ids()
    with pytest.raises(errors.InvalidPayload, match="an id of more than"):
        made("k" * (room + 1)).check_ids()
    with pytest.raises(errors.InvalidPayload, match="an id of more than"):
        made("é" * (room // 2 + 1)).nodes[f"m[{'é' * (room // 2 + 1)}]/n"]
