"""Define the soak's workflows whose graphs grow: a map, a branch, a loop, a child run."""

from __future__ import annotations

import random
from typing import Any

from tests.soak import handler_wrapper

MAPS, GROWS, INSIDE = "maps", "grows", "inside"
ITEMS = ("c", "a", "e", "b", "d")
"""The keys of the map's items, in the order of their source."""
AT_ONCE = 2
ROUNDS = 3
KINDS = {"film": "film", "still": "still", "sound": "still"}
"""Values of the branch, and the arm of each."""
Doc = dict[str, Any]


def lists() -> Doc:
    """Return the list that the map works on."""
    return handler_wrapper.last(0.0, "lists") | {"items": [{"key": key} for key in ITEMS]}


def part(key: str) -> Doc:
    """Work on one item, in both of its nodes; the value of the second one is the item's result."""
    return handler_wrapper.last(random.uniform(0, 0.1), "part") | {"value": key + key}


def gathers(values: list[str], keys: list[str]) -> Doc:
    """Return what the map gave its join."""
    return handler_wrapper.last(0.0, "gathers") | {"got": [keys, values]}


def film() -> Doc:
    return handler_wrapper.last(0.0, "film") | {"arm": "film"}


def still() -> Doc:
    return handler_wrapper.last(0.0, "still") | {"arm": "still"}


def turn(count: int) -> Doc:
    """Count one round of the loop."""
    done = handler_wrapper.last(random.uniform(0, 0.05), "turn")
    return done | {"count": count + 1, "full": count + 1 >= ROUNDS}


def passes(seen: Any) -> Doc:
    """Return what the child run got from its parent."""
    return handler_wrapper.last(random.uniform(0, 0.2), "passes") | {"seen": seen}


def tells(seen: Any, count: int) -> Doc:
    """Return what the last node got from the child run and from the loop."""
    return handler_wrapper.last(0.0, "tells") | {"seen": seen, "count": count}


HANDLERS = (lists, part, gathers, film, still, turn, passes, tells)


def _node(name: str, body: str, *deps: str, **inputs: str) -> Doc:
    given = [{"name": key, "from": value} for key, value in inputs.items()]
    return {"id": name, "node": body, "depends_on": list(deps), "inputs": given}


PIPELINES: dict[str, list[Doc]] = {
    "lists": [_node("n", "lists")],
    "item": [
        _node("a", "part", key="pipeline.key"),
        _node("b", "part", "a", key="pipeline.key"),
    ],
    "gathers": [_node("n", "gathers", values="pipeline.values", keys="pipeline.keys")],
    "arms": [_node("film", "film"), _node("still", "still")],
    "rounds": [_node("turn", "turn", count="pipeline.count")],
    "passes": [_node("n", "passes", seen="pipeline.seen")],
    "tells": [_node("n", "tells", seen="pipeline.seen", count="pipeline.count")],
}


def _step(name: str, kind: str, *after: str, **more: Any) -> Doc:
    inputs = {key: {"$from": ref} for key, ref in more.pop("inputs", {}).items()}
    return {"id": name, "kind": kind, "depends_on": list(after), "inputs": inputs, **more}


WORKFLOWS: dict[str, list[Doc]] = {
    MAPS: [
        _step("list", "pipeline", pipeline="lists"),
        _step(
            "each", "map", "list", over={"$from": "list/n.items"}, key="key", at_once=AT_ONCE,
            pipeline="item", inputs={"key": "item.key"}, result={"$from": "b.value"},
        ),
        _step(
            "join", "pipeline", "each", pipeline="gathers",
            inputs={"values": "each.results", "keys": "each.keys"},
        ),
    ],
    GROWS: [
        _step("first", "pipeline", pipeline="quick"),
        _step(
            "done", "branch", "first", on={"$from": "kind"}, arms={"film": "film"}, other="still",
            pipeline="arms",
        ),
        _step("child", "run", "done", workflow=INSIDE, inputs={"seen": "done.arm"}),
        _step(
            "again", "loop", "child", pipeline="rounds", result="turn", start={"count": 0},
            inputs={"count": "again.count"}, until={"$from": "again.full"}, at_most=ROUNDS + 2,
        ),
        _step(
            "last", "pipeline", "again", pipeline="tells",
            inputs={"seen": "child.seen", "count": "again.count"},
        ),
    ],
    INSIDE: [_step("made", "pipeline", pipeline="passes", inputs={"seen": "seen"})],
}  # fmt: skip
OUTPUTS = {INSIDE: {"seen": {"$from": "made/n.seen"}}}
