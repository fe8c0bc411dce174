"""The layout of graphs: every edge is drawn, boxes never overlap, ranks ascend."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows.service.dashboard import layered
from tests.support.examples import examples
from tests.support.wait import patience

Graph = dict[str, list[str]]
RANK = layered.WIDTH + layered.GAP_X
"""From a rank to the next one."""
pytestmark = pytest.mark.property


@st.composite
def acyclic(draw: st.DrawFn) -> Graph:
    """A graph in which each box depends on some before it, the boxes in any order."""
    count = draw(st.integers(0, 30))
    names = [f"n{number}" for number in range(count)]
    deps = {
        name: [other for other in names[:number] if draw(st.integers(0, 5)) == 0]
        for number, name in enumerate(names)
    }
    return {name: deps[name] for name in draw(st.permutations(names))}


@st.composite
def anything(draw: st.DrawFn) -> Graph:
    """A graph with cycles, dependencies on itself, twice and on boxes that are not there."""
    names = [f"n{number}" for number in range(draw(st.integers(0, 12)))]
    some = st.lists(st.sampled_from([*names, "gone"]), max_size=5)
    return {name: draw(some) for name in names}


def wanted(graph: Graph) -> set[tuple[str, str]]:
    """The edges that a drawing has."""
    return {
        (dep, name) for name, deps in graph.items() for dep in deps if dep in graph and dep != name
    }


def overlaps(drawing: layered.Drawing) -> list[tuple[str, str]]:
    pairs = itertools.combinations(drawing.boxes.items(), 2)
    return [
        (one, other)
        for (one, a), (other, b) in pairs
        if abs(a.x - b.x) < layered.WIDTH and abs(a.y - b.y) < layered.HEIGHT
    ]


@settings(max_examples=examples(200))
@given(acyclic() | anything())
def test_every_edge_is_drawn_and_no_boxes_overlap(graph: Graph) -> None:
    drawing = layered.draw(graph)
    assert list(drawing.boxes) == list(graph)
    assert {(edge.source, edge.target) for edge in drawing.edges} == wanted(graph)
    assert len(drawing.edges) == len(wanted(graph))
    assert overlaps(drawing) == []
    for box in drawing.boxes.values():
        assert 0 <= box.x <= drawing.width - layered.WIDTH
        assert 0 <= box.y <= drawing.height - layered.HEIGHT + 0.1
    assert all(0 <= y <= drawing.height for edge in drawing.edges for _, y in edge.points)
    assert layered.draw(graph) == drawing


@settings(max_examples=examples(200))
@given(acyclic())
def test_ranks_ascend_and_edges_begin_and_end_at_their_boxes(graph: Graph) -> None:
    drawing = layered.draw(graph)
    for edge in drawing.edges:
        source, target = drawing.boxes[edge.source], drawing.boxes[edge.target]
        assert source.x < target.x
        assert edge.points[0] == (source.x + layered.WIDTH, pytest.approx(source.y + 15, abs=0.2))
        assert edge.points[-1] == (target.x, pytest.approx(target.y + 15, abs=0.2))
        assert [x for x, _ in edge.points] == sorted(x for x, _ in edge.points)
        assert edge.path.startswith("M")
    if graph:
        places = {box.x for box in drawing.boxes.values()}
        assert places == {place * RANK for place in range(len(places))}


@settings(max_examples=examples(100))
@given(acyclic())
def test_a_long_edge_passes_beside_the_boxes(graph: Graph) -> None:
    drawing = layered.draw(graph)
    by_x: dict[float, list[layered.Box]] = {}
    for box in drawing.boxes.values():
        by_x.setdefault(box.x, []).append(box)
    for edge in drawing.edges:
        ranks = (drawing.boxes[edge.target].x - drawing.boxes[edge.source].x) / RANK
        assert len(edge.points) == 2 * ranks
        for (left, y), (right, to_y) in zip(edge.points[1:-1:2], edge.points[2:-1:2], strict=True):
            assert (y, right) == (to_y, left + layered.WIDTH)
            assert not [box for box in by_x[left] if box.y < y < box.y + layered.HEIGHT]


def test_a_chain_is_straight_and_a_tree_has_no_crossing() -> None:
    chain = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}
    assert {box.y for box in layered.draw(chain).boxes.values()} == {0.0}
    tree: Graph = {"root": []}
    tree |= {
        f"n{number}": ["root" if number < 3 else f"n{number // 3 - 1}"] for number in range(39)
    }
    shuffled = [*tree]
    random.Random(7).shuffle(shuffled)
    drawing = layered.draw({name: tree[name] for name in shuffled})
    for one, other in itertools.combinations(drawing.edges, 2):
        if drawing.boxes[one.source].x == drawing.boxes[other.source].x:
            starts = one.points[0][1] - other.points[0][1]
            ends = one.points[-1][1] - other.points[-1][1]
            assert starts * ends >= 0, (one, other)


@pytest.mark.parametrize("shape", ["random", "fan", "chain", "all before", "halves"])
def test_five_hundred_boxes_take_a_moment(shape: str) -> None:
    chance = random.Random(3)
    graph: Graph = {}
    for number in range(layered.MOST):
        deps = {
            "random": lambda n: {chance.randrange(n) for _ in range(3)} if n else set(),
            "fan": lambda n: {0} if n else set(),
            "chain": lambda n: {n - 1} if n else set(),
            "all before": lambda n: {*range(max(0, n - 4), n), 0} if n else set(),
            "halves": lambda n: {*range(0, 250, 50)} if n >= 250 else set(),
        }[shape](number)
        graph[f"n{number}"] = [f"n{dep}" for dep in deps]
    begun = time.thread_time()
    drawing = layered.draw(graph)
    assert time.thread_time() - begun < patience(0.3)
    assert len(drawing.boxes) == layered.MOST
    assert len(drawing.edges) == len(wanted(graph))


def test_all_before_all_is_drawn_without_millions_of_points() -> None:
    graph = {f"n{number}": [f"n{dep}" for dep in range(number)] for number in range(120)}
    drawing = layered.draw(graph)
    assert {(edge.source, edge.target) for edge in drawing.edges} == wanted(graph)
    assert overlaps(drawing) == []


def test_the_path_of_a_box() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"], "d": ["a"], "e": ["c", "d"]}
    assert layered.path_of(graph, "b") == {"a", "b", "c", "e"}
    assert layered.path_of(graph, "d") == {"a", "d", "e"}
    assert layered.path_of(graph, "gone") == {"gone"}
