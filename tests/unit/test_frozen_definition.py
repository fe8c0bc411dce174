"""What the engine reads of a run's stored definition, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import graph, payload

ENTRY: dict[str, Any] = {
    "id": "a", "module": "m", "queue": "cpu", "model": None, "deps": [], "inputs": {},
    "skip_if": None, "pipeline": None, "step": None,
}  # fmt: skip


def test_a_definition_of_a_million_nodes_is_refused_at_once() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="1000000 nodes; at most 20000"):
        graph.read({"version": 1, "nodes": [ENTRY] * 1_000_000})


def test_a_stored_version_is_checked() -> None:
    made = {"version": 1, "workflow": "w", "nodes": [{**ENTRY, "version": 3}]}
    assert graph.read(made).nodes["a"].version_key == "m@3"
    assert graph.read({**made, "nodes": [ENTRY]}).nodes["a"].version_key is None
    for bad in ("3", -1, 2**40, True):
        with pytest.raises(errors.InvalidWorkflow, match="version must be"):
            graph.read({**made, "nodes": [{**ENTRY, "version": bad}]})


def refusal(*entries: Any, **more: Any) -> str:
    document = {"version": 1, "workflow": "w", "nodes": [*entries], **more}
    with pytest.raises(errors.InvalidWorkflow) as refused:
        graph.read(document)
    return str(refused.value)


def test_a_refusal_names_the_place() -> None:
    assert refusal(ENTRY, 5) == (
        "the run's stored definition: node 2: an object is needed, not int"
    )
    assert refusal() == "the run's stored definition has no nodes"
    assert "version 3" in refusal(ENTRY, version=3)
    assert "two nodes have the id 'a'" in refusal(ENTRY, ENTRY)


@pytest.mark.parametrize("node_id", ["", "a/b/c", "a/", "/a", "a[b]", 5, None, "a#0", "x" * 207])
def test_an_id_that_is_no_folder_is_refused(node_id: Any) -> None:
    refusal({**ENTRY, "id": node_id})


@pytest.mark.parametrize("node_id", ["a/b", "a/b#1", "a#9999"])
def test_an_id_may_have_two_parts_and_a_round(node_id: str) -> None:
    assert [*graph.read({"version": 1, "nodes": [{**ENTRY, "id": node_id}]}).nodes] == [node_id]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"queue": "fast"}, "unknown queue 'fast'"),
        ({"model": "m"}, "names a model but is not on the gpu queue"),
        ({"deps": ["a"]}, "a cycle of nodes: a -> a"),
        ({"deps": [5]}, "lists ids, not int"),
        ({"arm": "b"}, "unknown branch 'b'"),
        ({"step": 5}, "'step': an object is needed"),
        ({"round": 0}, "'round' must be 1 to 1000"),
        ({"round": 1001}, "'round' must be 1 to 1000"),
        ({"round": True}, "'round' must be 1 to 1000"),
        ({"policy": 5}, "'policy': an object is needed"),
        ({"policy": {"retries": -1}}, "'retries' must be 0 to 1000"),
        ({"map": {}}, "'map' and the module '__map__'"),
        ({"module": "__map__"}, "'map' and the module '__map__'"),
        ({"inputs": {"i": {"$out": {}}}}, "'$out' without '$value'"),
        ({"inputs": {"i": {"$out": "/etc"}}}, "is not a path below out_dir"),
        ({"inputs": {"i": {"$out": ["a", "b/../.."]}}}, "is not a path below out_dir"),
        ({"inputs": {"i": {"$out": ""}}}, "is not a path below out_dir"),
        ({"inputs": {"i": {"$out": 5}}}, "is not a path below out_dir"),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal({**ENTRY, **fields})


def test_the_policy_of_a_question_is_its_waiting_time() -> None:
    given = {"timeout_s": 5, "default": 1, "retries": 2}
    asking = {**ENTRY, "step": {"widget": "w"}, "policy": given}
    nodes = graph.read(
        {"version": 1, "nodes": [asking, {**ENTRY, "id": "b", "policy": given}]}
    ).nodes
    assert nodes["a"].policy == {"timeout_s": 5.0, "default": 1}
    assert nodes["b"].policy == {"timeout_s": 5.0, "retries": 2}


MAP = {"body": [ENTRY], "result": "a", "path": [], "key": None, "item": "item", "at_once": None,
       "may_fail": {"count": 0}}  # fmt: skip


def mapped(depth: int = 1, **more: Any) -> dict[str, Any]:
    body = [ENTRY] if depth == 1 else [mapped(depth - 1)]
    result = "a" if depth == 1 else "m"
    found = {**MAP, "body": body, "result": result, **more}
    return {**ENTRY, "id": "m", "module": "__map__", "map": found}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"result": "b"}, "'map': 'result' 'b' is no node of its body"),
        ({"result": None}, "'result' None is no node of its body"),
        ({"path": "a"}, "'map': 'path': a list of texts is needed"),
        ({"path": [5]}, "'path': a list of texts is needed"),
        ({"item": "a/b"}, "is not an id"),
        ({"at_once": 0}, "'at_once' is a number of items"),
        ({"may_fail": {"share": "x"}}, "'may_fail' is a number of items"),
        ({"may_fail": {"share": True}}, "'may_fail' is a number of items"),
        ({"may_fail": {}}, "'may_fail' is a number of items"),
        ({"body": []}, "its body has no nodes"),
    ],
)
def test_a_map_of_the_wrong_shape_is_refused(more: dict[str, Any], words: str) -> None:
    assert words in refusal(mapped(**more))


def test_maps_nest_four_levels_deep() -> None:
    assert graph.read({"version": 2, "nodes": [mapped(4)]}).nodes["m"].map is not None
    assert "maps are nested too deep" in refusal(mapped(5))


@pytest.mark.parametrize(
    ("given", "allowed"),
    [({"share": 1}, 1.0), ({"share": 0.5}, 0.5), ({"count": 3}, 3), ({"count": 1}, 1)],
)
def test_a_stored_share_stays_one_though_json_makes_it_a_whole_number(
    given: dict[str, Any], allowed: float
) -> None:
    found = graph.read({"version": 2, "nodes": [mapped(may_fail=given)]}).nodes["m"].map
    assert found is not None
    assert (found.may_fail, type(found.may_fail)) == (allowed, type(allowed))


LONGEST_ID = f"{'x' * 100}/{'y' * 100}#9999"


def test_the_bounds_of_ids_modules_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = {**ENTRY, "id": LONGEST_ID, "module": "m" * 220}
    assert [*graph.read({"version": 1, "nodes": [longest]}).nodes] == [LONGEST_ID]
    assert "is not a node id" in refusal({**ENTRY, "id": f"{LONGEST_ID}0"})
    assert "1 to 220 characters" in refusal({**ENTRY, "module": "m" * 221})
    monkeypatch.setattr(graph, "MAX_NODES_PER_RUN", 2)
    two = [ENTRY, {**ENTRY, "id": "b"}]
    assert len(graph.read({"version": 1, "nodes": two}).nodes) == 2
    assert "has 3 nodes; at most 2" in refusal(*two, {**ENTRY, "id": "c"})


def test_an_input_may_be_as_deep_as_a_payload_beside_what_the_engine_wraps_it_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload, "MAX_DEPTH", 10)

    def taking(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return {**ENTRY, "round": 1000, "inputs": {"i": {"$out": {"$value": value}}}}

    assert graph.read({"version": 1, "nodes": [taking(10)]}).nodes["a"].round == 1000
    assert "nested too deep" in refusal(taking(11))


@pytest.mark.parametrize(("count", "shown"), [(19, 20), (20, 20)])
def test_a_long_cycle_is_named_by_its_ends(count: int, shown: int) -> None:
    deps = [{**ENTRY, "id": f"n{n}", "deps": [f"n{(n + 1) % count}"]} for n in range(count)]
    names = refusal(*deps).partition("a cycle of nodes: ")[2].split(" -> ")
    assert len(names) == shown
    assert ("..." in names) == (count == 20)
    assert (names[0], names[9], names[-1]) == ("n0", "n9", "n0")
