"""Items of maps at their edges: ids, look-ups, loops and branches in a body, nested maps."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import branches, graph, item_ids, items, loops, plan
from tests.support import tabled
from tests.support.planning import FakeRun
from tests.unit.test_dag_graph_edges import entry


def mapped(*nodes: dict[str, Any], item: str = "item") -> graph.Map:
    """Return a map with these nodes as its body."""
    return graph.Map(graph.read({"version": 2, "nodes": nodes}), nodes[-1]["id"], item=item)


def scoped(*nodes: dict[str, Any], value: Any = 7) -> items.Scope:
    return items.Scope(mapped(*nodes), "m", "k", value)


def bound(template: Any, item: Any = 7) -> Any:
    return items.bound({"i": template}, [scoped(entry("n"), value=item)])["i"]


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


def test_rows_of_an_item_have_full_ids_and_the_order_of_the_body() -> None:
    scope = scoped(*CHAIN)
    run = FakeRun(scope.of.body)
    progress = plan.Progress(scope.of.body, scope.prefix)
    assert [row.id for row in run.start(progress).rows] == ["m[k]/a"] == items.ids(scope)[:1]
    run.finish("a")
    assert [row.id for row in run.after("a", progress=progress).rows] == ["m[k]/b", "m[k]/c"]


def failure(*nodes: dict[str, Any], done: tuple[str, ...] = (), **context: Any) -> Any:
    """Return why the plan of an item fails after these nodes, or at its start."""
    scope = scoped(*nodes)
    run = FakeRun(scope.of.body, **context)
    run.start(progress := plan.Progress(scope.of.body, scope.prefix))
    run.finish(*done)
    return run.after(*done, progress=progress).failure if done else run.start(progress).failure


def test_a_reason_names_the_loop_or_branch_of_its_item() -> None:
    assert failure(*LOOP, done=("l/f#1",)) == (
        "m[k]/l/f#2",
        "loop 'm[k]/l': 'until' of round 1: $from 'l/f#1.x': there is no 'x'",
    )
    found = failure(*BRANCH[:2], {**BRANCH[2], "choice": {**CHOICE, "other": None}}, item={})
    assert found[0] == "m[k]/b/one"
    assert found[1].startswith("branch 'm[k]/b': its value: ")


def test_a_template_is_bound_to_the_item() -> None:
    cases: list[Any] = [
        (5, 5), ({"$from": "item"}, 7),
        ({"$value": {"$from": "item"}}, {"$value": {"$from": "item"}}),
        ({"$value": 3}, 3), ({"x": {"$from": "item"}}, {"x": {"$value": 7}}),
        ({"$from": "other.x"}, {"$from": "other.x"}), ({"$from": "n.x"}, {"$from": "m[k]/n.x"}),
        ({"$from": "item", "$eq": 7}, True), ("/o/m[k]/n", "/o/m[k]/n"),
    ]  # fmt: skip
    for given, made in cases:
        with tabled.case(given, made):
            assert bound(given) == made


def test_an_item_that_is_a_template_stays_quoted() -> None:
    assert bound({"$from": "item"}, {"$from": "x"}) == {"$value": {"$from": "x"}}
    assert bound({"$from": "item"}, {"a": 1}) == {"a": 1}


def test_the_innermost_item_of_a_name_counts_and_others_are_found_outside() -> None:
    inner, outer = mapped(entry("n")), mapped(entry("cut"), entry("m"), item="film")
    scopes = [items.Scope(outer, "o", "1", "F"), items.Scope(inner, "o[1]/m", "2", {"x": 3})]
    read = {"own": "item.x", "outer": "film", "node": "cut.y", "sibling": "n", "run": "size"}
    assert items.bound({name: {"$from": path} for name, path in read.items()}, scopes) == {
        "own": 3,
        "outer": "F",
        "node": {"$from": "o[1]/cut.y"},
        "sibling": {"$from": "o[1]/m[2]/n"},
        "run": {"$from": "size"},
    }
    owners = {head: items.owner(head, scopes) for head in ("item", "n", "film", "cut", "size")}
    assert owners == {
        "item": scopes[1], "n": scopes[1], "film": scopes[0], "cut": scopes[0], "size": None,
    }  # fmt: skip
    same = [scopes[0]._replace(of=outer._replace(item="item")), scopes[1]]
    assert items.owner("item", same) is scopes[1]
    assert items.ids(scopes[1]) == ["o[1]/m[2]/n"]


def test_near_a_round_are_the_ones_beside_it_and_what_no_loop_repeats() -> None:
    body = mapped(*LOOP).body
    assert items.near(body, ["l/f#1"]) == ["l", "l/f#2", "l/f#1"]
    assert items.near(body, []) == ["l"]
    assert items.near(mapped(*CHAIN).body, ["a"]) == ["a", "b", "c"]


def test_an_id_of_the_longest_length_is_taken_and_a_longer_one_is_refused() -> None:
    room = item_ids.MAX_ID_BYTES - len("m[]/n")

    def check(key: str) -> None:
        items.check_ids(items.Scope(mapped(entry("n")), "m", key, 1))

    check("k" * room)
    for longer in ("k" * (room + 1), "é" * (room // 2 + 1)):
        with pytest.raises(errors.InvalidPayload, match="an id of more than"):
            check(longer)
