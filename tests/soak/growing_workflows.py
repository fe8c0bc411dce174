"""Define the soak's workflows whose graphs grow: maps, branches and loops, a child run."""

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
COUNTS = {"c": 0, "a": 1, "e": 2, "b": 0, "d": 1}
"""Where the loop of each item begins to count."""
KINDS_OF = {"c": "film", "a": "still", "e": "sound", "b": "still", "d": "film"}
"""The value of each item's branch."""
AT_MOST = ROUNDS + 1
"""Rounds of the loop of an item, at most."""
Doc = dict[str, Any]


def lists() -> Doc:
    """Return the list that the map works on."""
    return handler_wrapper.last(0.0, "lists") | {"items": [{"key": key} for key in ITEMS]}


def part(key: str) -> Doc:
    """Work on one item; return the value of its branch and the start of its loop."""
    done = handler_wrapper.last(random.uniform(0, 0.1), "part")
    return done | {"kind": KINDS_OF[key], "count": COUNTS[key]}


def whole(key: str, arm: str, count: int) -> Doc:
    """Return what an item got from its branch and from its loop: its result."""
    return handler_wrapper.last(random.uniform(0, 0.1), "whole") | {"value": f"{key} {arm} {count}"}


def arm_of(key: str) -> str:
    """Return the arm that an item has to choose."""
    return KINDS[KINDS_OF[key]]


def rounds_of(key: str) -> int:
    """Return how many rounds an item has to run."""
    return ROUNDS - COUNTS[key]


def value_of(key: str) -> str:
    """Return the right result of an item."""
    return f"{key} {arm_of(key)} {ROUNDS}"


def handlers_of(key: str) -> list[tuple[str, Doc]]:
    """Return the nodes of an item whose handlers have to run, in order, with what they return."""
    first, last = COUNTS[key], rounds_of(key)
    rounds = [(f"again/turn#{n}", {"count": first + n}) for n in range(1, last + 1)]
    arm = f"ready/{arm_of(key)}", {"arm": arm_of(key)}
    return [("a", {"count": first}), arm, *rounds, ("b", {"value": value_of(key)})]


def skipped_of(key: str) -> list[str]:
    """Return the nodes of an item that have to be skipped."""
    arms = [f"ready/{arm}" for arm in {*KINDS.values()} - {arm_of(key)}]
    return [*arms, *(f"again/turn#{n}" for n in range(rounds_of(key) + 1, AT_MOST + 1))]


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


HANDLERS = (lists, part, whole, gathers, film, still, turn, passes, tells)


def _node(name: str, body: str, *deps: str, **inputs: str) -> Doc:
    given = [{"name": key, "from": value} for key, value in inputs.items()]
    return {"id": name, "node": body, "depends_on": list(deps), "inputs": given}


PIPELINES: dict[str, list[Doc]] = {
    "lists": [_node("n", "lists")],
    "gathers": [_node("n", "gathers", values="pipeline.values", keys="pipeline.keys")],
    "arms": [_node("film", "film"), _node("still", "still")],
    "rounds": [_node("turn", "turn", count="pipeline.count")],
    "passes": [_node("n", "passes", seen="pipeline.seen")],
    "tells": [_node("n", "tells", seen="pipeline.seen", count="pipeline.count")],
}


def _step(name: str, kind: str, *after: str, **more: Any) -> Doc:
    inputs = {key: {"$from": ref} for key, ref in more.pop("inputs", {}).items()}
    return {"id": name, "kind": kind, "depends_on": list(after), "inputs": inputs, **more}


ITEM = [
    _step("a", "node", node="part", inputs={"key": "item.key"}),
    _step(
        "ready", "branch", "a", on={"$from": "a.kind"}, arms={"film": "film"}, other="still",
        pipeline="arms",
    ),
    _step(
        "again", "loop", "ready", pipeline="rounds", result="turn", start={"$from": "a"},
        inputs={"count": "again.count"}, until={"$from": "again.full"}, at_most=AT_MOST,
    ),
    _step(
        "b", "node", "again", node="whole",
        inputs={"key": "item.key", "arm": "ready.arm", "count": "again.count"},
    ),
]  # fmt: skip
"""The nodes of each item of the map."""
WORKFLOWS: dict[str, list[Doc]] = {
    MAPS: [
        _step("list", "pipeline", pipeline="lists"),
        _step(
            "each", "map", "list", over={"$from": "list/n.items"}, key="key", at_once=AT_ONCE,
            steps=ITEM, result={"$from": "b.value"},
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
