"""Graphs at their edges: versions, loops, failures that a map allows, cycles."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import graph
from tests.support import tabled
from tests.unit.test_dag_graph import document


def entry(node_id: str, *deps: str, **more: Any) -> dict[str, Any]:
    (made,) = document({node_id: list(deps)})["nodes"]
    return {**made, **more}


def looped(end: str) -> dict[str, Any]:
    rounds = [{"end": end, "until": {"$from": "done"}}]
    loop = entry("l", "l/f#1", module="__loop__", loop={"rounds": rounds, "must": True})
    return {"version": 2, "nodes": [entry("l/f#1", arm="l", round=1), loop]}


def test_a_worker_must_have_the_code_of_a_versioned_node_alone() -> None:
    of = graph.read({"version": 1, "nodes": [entry("a", version=2), entry("b")]})
    assert (of.nodes["a"].version_key, of.nodes["b"].version_key) == ("a@2", None)


def test_the_nodes_that_no_loop_repeats() -> None:
    assert graph.read(looped("l/f#1")).once == ("l",)


def test_a_loop_whose_round_ends_elsewhere_is_refused() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="'l' is not a node of this loop"):
        graph.read(looped("l"))


@pytest.mark.parametrize(
    ("may_fail", "total", "allowed"),
    [(0, 9, 0), (2, 9, 2), (0.5, 3, 1), (0.29, 100, 29), (0.0, 9, 0), (1.0, 9, 9)],
)
def test_a_map_allows_a_count_of_failures_or_a_share_without_its_rounding_error(
    may_fail: float, total: int, allowed: int
) -> None:
    of = graph.Map(graph.read(document({"n": []})), "n", may_fail=may_fail)
    assert of.allowed_failures(total) == allowed
    assert graph.Map(of.body, "n").allowed_failures(total) == 0


def test_each_node_is_behind_those_it_depends_on() -> None:
    deps = {"c": ["b"], "b": ["a", "elsewhere"], "a": [], "d": []}
    assert graph.groups(deps) == [["a"], ["b"], ["c"], ["d"]]
    assert graph.groups({"j": ["a", "b"], "a": [], "b": ["a"]}) == [["a"], ["b"], ["j"]]
    cyclic = {"a": ["b"], "b": ["a"], "behind": ["a"], "free": []}
    assert graph.groups(cyclic) == [["a", "b"], ["behind"], ["free"]]


def test_the_nodes_of_a_cycle_are_one_group() -> None:
    cases: list[Any] = [
        ({"a": [], "b": ["a"]}, ["a", "b"]),
        ({"a": ["a"], "b": []}, ["a", "b"]),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "x": [], "y": ["a"]}, ["abc", "x", "y"]),
        ({"a": ["b", "x"], "b": ["a"], "x": [], "c": ["d"], "d": ["c"]}, ["ab", "cd", "x"]),
        ({"a": ["b"], "b": ["a"], "m": ["a"], "c": ["d", "m"], "d": ["c"]}, ["ab", "cd", "m"]),
        ({"a": ["b"], "b": ["c", "a"], "c": ["b"], "d": ["c", "e"], "e": ["d"]}, ["abc", "de"]),
        ({"a": ["b", "d"], "b": ["c"], "c": ["a"], "d": ["e"], "e": ["a", "d"]}, ["abcde"]),
        ({"a": ["b"], "b": ["c"], "c": ["d"], "d": ["c", "x"], "x": ["b"]}, ["a", "bcdx"]),
    ]  # fmt: skip
    for deps, groups in cases:
        with tabled.case(deps, groups):
            assert sorted("".join(sorted(group)) for group in graph.groups(deps)) == groups


def test_cycles_behind_one_another_are_apart_in_whatever_order_they_are_searched() -> None:
    deps: dict[str, list[str]] = {}
    for n in range(40):  # some cycles are searched from a cycle behind them, some from themselves
        deps |= {f"a{n}": [f"b{n}"], f"b{n}": [f"a{n}"]}
        deps |= {f"c{n}": [f"d{n}", f"a{n + 1 if n < 39 else 0}"], f"d{n}": [f"c{n}"]}
    pairs = sorted(sorted(group) for group in graph.groups(deps))
    assert pairs == sorted([f"{x}{n}", f"{y}{n}"] for n in range(40) for x, y in ("ab", "cd"))
