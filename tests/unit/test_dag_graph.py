"""The graph of a definition: its edges, its cycles, its cost."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import graph
from tests.support.cpu import cpu_seconds
from tests.support.wait import patience


def document(deps: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "version": 1,
        "workflow": "w",
        "nodes": [
            {"id": node_id, "module": node_id, "queue": "cpu", "model": None, "deps": needed,
             "inputs": {}, "skip_if": None, "pipeline": "p", "step": None}
            for node_id, needed in deps.items()
        ],
    }  # fmt: skip


DIAMOND = {"d": ["b", "c"], "a": [], "b": ["a"], "c": ["a"], "alone": []}


def test_edges_go_both_ways_in_declaration_order() -> None:
    built = graph.read(document(DIAMOND))
    assert list(built.nodes) == ["d", "a", "b", "c", "alone"]
    assert built.nodes["d"].deps == ("b", "c")
    assert built.downstream("a") == ("b", "c")
    assert built.downstream("d") == built.downstream("stranger") == ()
    assert built.sources == ("a", "alone")
    assert built.leaves == ("d", "alone")
    assert built.position["c"] == 3


def test_a_node_cannot_be_changed_and_has_no_dict() -> None:
    node = graph.read(document(DIAMOND)).nodes["a"]
    assert (node.module, node.queue, node.model, node.pipeline, node.step) == (
        "a", "cpu", None, "p", None,
    )  # fmt: skip
    with pytest.raises(AttributeError):
        node.queue = "gpu"  # type: ignore[misc]
    assert not hasattr(node, "__dict__")


@pytest.mark.parametrize(
    ("broken", "words"),
    [({"version": 3, "nodes": []}, "version 3"), (document({"a": ["x"]}), "'a' depends on 'x'")],
)
def test_a_definition_it_cannot_read_is_refused(broken: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidWorkflow, match=words):
        graph.read(broken)


def test_a_cycle_is_refused() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="cycle"):
        graph.read(document({"s": [], "a": ["b", "s"], "b": ["a"]}))


@pytest.mark.parametrize(
    ("deps", "cycle"),
    [
        ({"a": [], "b": ["a"]}, None),
        ({"a": ["a"]}, ["a", "a"]),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b", "c", "b"]),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, None),
    ],
)
def test_find_cycle(deps: dict[str, list[str]], cycle: list[str] | None) -> None:
    assert graph.find_cycle(deps) == cycle


CHAIN = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(10_000)}
FAN = {"a": [], **{f"n{i}": ["a"] for i in range(10_000)}, "join": [f"n{i}" for i in range(10_000)]}


@pytest.mark.parametrize("deps", [CHAIN, FAN], ids=["chain", "fan"])
def test_10000_nodes_build_in_150_ms(deps: dict[str, list[str]]) -> None:
    given = document(deps)
    assert cpu_seconds(lambda: graph.read(given), tries=2) < patience(0.15)
    built = graph.read(given)
    assert len(built.downstream("n0" if deps is CHAIN else "a")) == (1 if deps is CHAIN else 10_000)
    assert graph.find_cycle(deps) is None
