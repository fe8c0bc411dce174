"""Loops at their edges: the most rounds, parts of a state, paths, outputs of no round."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import definition, graph, loops
from queue_workflows.dag import document_values as bindings
from tests.support import tabled

LOOP = loops.Loop("l", tuple(loops.Round(f"l/f#{n}", n) for n in (1, 2, 3)), True)

BODY = {"nodes": [{"id": "f", "inputs": [{"name": "x", "from": "pipeline.x"}]}]}


def nodes_of(**more: Any) -> dict[str, dict[str, Any]]:
    """Return the nodes by id of a workflow with one loop, which `more` changes."""
    step = {"id": "l", "kind": "loop", "pipeline": "p", "inputs": {"x": {"$from": "l"}}, "until": 1,
            "at_most": 3, "result": "f", "start": {"$from": "begin"}, **more}  # fmt: skip
    made = definition.expand({"name": "w", "steps": [step]}, lambda _: BODY)
    graph.read(made)
    return {entry["id"]: entry for entry in made["nodes"]}


def read(**more: Any) -> loops.Spec:
    entry = {"until": 1, "at_most": 3, "result": "f", **more}
    return loops.read(entry, ["f"], "here")


def test_the_fewest_and_the_most_rounds_are_taken() -> None:
    assert [read(at_most=count).at_most for count in (1, 1000)] == [1, 1000]
    assert [read().must, read(must=False).must, read(must=True).must] == [True, False, True]
    assert (read(result="f.a.b").end, read(result="f.a.b").path) == ("f", "a.b")


def test_a_stored_loop_has_as_many_and_ends_of_250_characters() -> None:
    rounds = [{"end": "x" * 250, "until": 1}] * 1000
    found = loops.stored({"rounds": rounds}, "l", "node 'l'")
    assert found is not None
    assert (len(found.rounds), found.must) == (1000, True)
    assert found.rounds[0] == loops.Round("x" * 250, 1)
    again = loops.stored({"rounds": rounds[:1], "must": False}, "l", "node 'l'")
    assert again is not None and not again.must
    for wrong in (rounds * 2, [], [{"end": "x" * 251}]):
        with pytest.raises(errors.InvalidWorkflow, match="node 'l': 'loop'"):
            loops.stored({"rounds": wrong}, "l", "node 'l'")


def resolved(template: Any) -> Any:
    if template == "gone":
        raise errors.InvalidWorkflow("no such value")
    return template


def test_a_round_follows_one_that_took_place_and_did_not_end_the_loop() -> None:
    cases: list[Any] = [
        (1, {}, 1, True), (0, {}, 1, True), (2, {"l/f#1": 1}, 0, True),
        (2, {"l/f#1": 1}, 1, False), (2, {}, 0, False), (3, {"l/f#1": 1}, 0, False),
        (3, {"l/f#2": 1}, 0, True), (900, {"l/f#3": 1}, 0, True), (900, {"l/f#2": 1}, 0, False),
    ]  # fmt: skip
    for number, context, until, goes_on in cases:
        with tabled.case(number, context, until, goes_on):
            loop = LOOP._replace(rounds=tuple(each._replace(until=until) for each in LOOP.rounds))
            assert loops.goes_on(loop, number, context, resolved) is goes_on


def test_an_until_that_does_not_resolve_names_its_round() -> None:
    loop = LOOP._replace(rounds=tuple(each._replace(until="gone") for each in LOOP.rounds))
    with pytest.raises(errors.InvalidWorkflow, match="'until' of round 1: no such value"):
        loops.goes_on(loop, 2, {"l/f#1": {}}, resolved)
    with pytest.raises(errors.InvalidWorkflow, match="'until' of round 2: no such value"):
        loops.output(loop, {"l/f#1": {}, "l/f#2": {}}, resolved)


def test_the_output_is_that_of_the_last_round_that_took_place() -> None:
    assert loops.output(LOOP, {}, resolved) == ({}, 0)
    assert loops.output(LOOP, {"l/f#1": {"n": 1}}, resolved) == ({"n": 1}, 1)
    assert loops.output(LOOP, {"l/f#1": {"n": 1}, "l/f#3": {"n": 3}}, resolved) == ({"n": 3}, 3)
    open_ = LOOP._replace(rounds=tuple(each._replace(until=0) for each in LOOP.rounds))
    assert loops.output(open_._replace(must=False), {"l/f#3": {"n": 3}}, resolved) == ({"n": 3}, 3)
    with pytest.raises(errors.InvalidWorkflow, match="after round 3, and at_most is 3"):
        loops.output(open_, {"l/f#3": {}}, resolved)


def inputs_of(number: int, read: Any, **more: Any) -> Any:
    return nodes_of(inputs={"x": read}, **more)[f"l/f#{number}"]["inputs"]["x"]


def test_the_state_is_the_start_and_then_a_part_of_the_result() -> None:
    cases: list[Any] = [
        ({"$from": "l"}, {"a": 1}, {"$from": "l/f#1.s"}),
        ({"$from": "l.a"}, {"$value": 1}, {"$from": "l/f#1.s.a"}),
        ({"$from": "l.a", "$eq": 1}, {"$value": True}, {"$from": "l/f#1.s.a", "$eq": 1}),
        ({"$from": "l", "$ne": 2}, {"$value": True}, {"$from": "l/f#1.s", "$ne": 2}),
        ({"$value": {"$from": "l"}}, {"$value": {"$from": "l"}}, {"$value": {"$from": "l"}}),
        ({"k": {"$from": "l.a"}}, {"k": {"$value": 1}}, {"k": {"$from": "l/f#1.s.a"}}),
        ({"$from": "other.l"}, {"$from": "other.l"}, {"$from": "other.l"}),
        (7, 7, 7),
    ]
    for given, first, second in cases:
        with tabled.case(given, first, second):
            start = {"result": "f.s", "start": {"a": 1}}
            assert (inputs_of(1, given, **start), inputs_of(2, given, **start)) == (first, second)


def test_a_start_of_several_values_is_given_as_a_whole() -> None:
    start = {"a": {"$from": "x"}, "b": 2}
    assert inputs_of(1, {"$from": "l"}, start=start) == start
    for part in ({"$from": "l.b"}, {"$from": "l", "$eq": 1}):
        with pytest.raises(errors.InvalidWorkflow, match="'start' is made of several values"):
            inputs_of(1, part, start=start)


def test_the_until_of_a_round_is_about_the_state_after_it() -> None:
    made = nodes_of(result="f.s", until={"$from": "l.n", "$eq": 0}, at_most=2)
    assert [each["until"]["$from"] for each in made["l"]["loop"]["rounds"]] == [
        "l/f#1.s.n",
        "l/f#2.s.n",
    ]


@pytest.mark.parametrize(
    ("marked", "placed"),
    [
        ("l/a/file", "l/a#2/file"), ("l/a", "l/a#2"),
        (["l/a/x", "l/f/y/z"], ["l/a#2/x", "l/f#2/y/z"]),
        ({"$value": {"$out": "l/a"}}, {"$value": {"$out": "l/a"}}),
    ],
)  # fmt: skip
def test_paths_lead_to_folders_of_the_same_round(marked: Any, placed: Any) -> None:
    node = {"id": "l/f", "deps": ["l/a", "out"], "inputs": {"p": {bindings.OUT: marked}},
            "skip_if": None}  # fmt: skip
    other = {**node, "id": "l/a", "deps": []}
    spec = loops.Spec(None, 1, "f", "", 2, True)
    found, made = loops.expanded("l", spec, [other, node], ["l/f"], "here")
    assert found[3]["inputs"] == {"p": {bindings.OUT: placed}}
    assert [each["deps"] for each in found] == [[], ["l/a#1"], ["l/f#1"], ["l/a#2"]]
    assert [each["round"] for each in found] == [1, 1, 2, 2]
    assert made.document() == {
        "rounds": [{"end": "l/f#1", "until": 1}, {"end": "l/f#2", "until": 1}],
        "must": True,
    }
