"""The soak's check of a map whose items branch and repeat, on constructed evidence."""

from __future__ import annotations

from typing import Any

from tests.soak import acknowledgements, check_growth, evidence, growing_workflows, journal
from tests.support import tabled

Nodes = dict[str, dict[str, Any]]
Lines = dict[str, list[journal.Line]]
RUN = "r"


def line(node_id: str, word: str, at: float, claim: int = 1) -> journal.Line:
    return journal.Line(word, node_id, claim, "w:1:1:1", 1, at, "part")


def ran(nodes: Nodes, lines: Lines, node_id: str, at: float, **result: Any) -> None:
    """Add a node that was completed by its first claim, within a second."""
    nodes[node_id] = {
        "id": node_id, "run_id": RUN, "node_id": node_id, "status": "completed", "claim_no": 1,
        "result": {"by": 1} | result,
    }  # fmt: skip
    lines[node_id] = [line(node_id, "start", at), line(node_id, "end", at + 0.9)]


def right() -> tuple[Nodes, Lines]:
    """Return the nodes and the journal of a run that grew as its workflow says, one by one."""
    nodes: Nodes = {}
    lines: Lines = {}
    at = 0.0
    ran(nodes, lines, "list/n", at)
    for key in growing_workflows.ITEMS:
        for node_id, result in growing_workflows.handlers_of(key):
            at += 1
            ran(nodes, lines, f"each[{key}]/{node_id}", at, **result)
        for node_id in ("ready", "again"):
            nodes[f"each[{key}]/{node_id}"] = nodes["list/n"] | {"node_id": node_id, "result": {}}
        for node_id in growing_workflows.skipped_of(key):
            name = f"each[{key}]/{node_id}"
            nodes[name] = nodes["list/n"] | {"id": name, "status": "skipped", "result": None}
    nodes["each"] = nodes["list/n"] | {"node_id": "each"}
    values = [growing_workflows.value_of(key) for key in growing_workflows.ITEMS]
    ran(nodes, lines, "join/n", at + 1, got=[[*growing_workflows.ITEMS], values])
    for node_id, node in nodes.items():
        node["node_id"] = node_id
    return nodes, lines


def found(nodes: Nodes, lines: Lines) -> list[str]:
    names = (
        "events", "fires", "lines", "faults", "off", "ended", "time", "began", "ended_load",
        "stuck", "invariants", "slow",
    )  # fmt: skip
    known: dict[str, Any] = dict.fromkeys(names)
    books = acknowledgements.Acknowledgements(runs={RUN: growing_workflows.MAPS})
    runs = {RUN: {"status": "completed", "parent": None, "kind": "film"}}
    jobs = {f"{RUN} {node_id}": node for node_id, node in nodes.items()}
    seen = evidence.Evidence(**known, jobs=jobs, runs=runs, books=books, by_job=lines)
    return [*check_growth.grown(seen)]


def test_an_item_of_each_kind_and_number_of_rounds_is_right() -> None:
    assert found(*right()) == []
    rounds = {growing_workflows.rounds_of(key) for key in growing_workflows.ITEMS}
    assert rounds == {1, 2, 3}
    assert {growing_workflows.arm_of(key) for key in growing_workflows.ITEMS} == {"film", "still"}


def wrong_arm(nodes: Nodes, lines: Lines) -> None:
    lines["each[c]/ready/still"] = [line("each[c]/ready/still", "start", 2.5)]


def both_arms(nodes: Nodes, lines: Lines) -> None:
    nodes["each[c]/ready/still"]["status"] = "completed"


def no_arm(nodes: Nodes, lines: Lines) -> None:
    nodes["each[c]/ready/film"]["status"] = "skipped"


def another_round(nodes: Nodes, lines: Lines) -> None:
    ran(nodes, lines, "each[a]/again/turn#3", 9.0, count=4)


def a_round_less(nodes: Nodes, lines: Lines) -> None:
    nodes["each[c]/again/turn#3"]["status"] = "skipped"


def a_round_that_is_not_there(nodes: Nodes, lines: Lines) -> None:
    del nodes["each[c]/again/turn#4"]


def a_round_too_early(nodes: Nodes, lines: Lines) -> None:
    before = nodes["each[c]/again/turn#1"]
    before["claim_no"] = 2
    lines["each[c]/again/turn#1"].append(line("each[c]/again/turn#1", "end", 99.0, claim=2))


def a_round_of_an_old_state(nodes: Nodes, lines: Lines) -> None:
    nodes["each[c]/again/turn#2"]["result"]["count"] = 1


def an_arm_of_another(nodes: Nodes, lines: Lines) -> None:
    nodes["each[c]/ready/film"]["result"]["arm"] = "still"


def a_skipped_round_that_ran(nodes: Nodes, lines: Lines) -> None:
    lines["each[c]/again/turn#4"] = [line("each[c]/again/turn#4", "start", 6.5)]


def test_anything_else_is_found() -> None:
    cases: list[Any] = [
        (wrong_arm, "each[c]/ready/still ran, and is skipped"),
        (both_arms, "each[c]/ready/still is completed, not skipped"),
        (no_arm, "each[c]/ready/film is skipped, not completed"),
        (another_round, "each[a]/again/turn#3 is completed, not skipped"),
        (a_round_less, "each[c]/again/turn#3 is skipped, not completed"),
        (a_round_that_is_not_there, "each[c]/again/turn#4 is missing, not skipped"),
        (a_round_too_early, "each[c]/again/turn#2 began before each[c]/again/turn#1 had ended"),
        (a_round_of_an_old_state, "each[c]/again/turn#2 has the count 1, not 2"),
        (an_arm_of_another, "each[c]/ready/film has the arm still, not film"),
        (a_skipped_round_that_ran, "each[c]/again/turn#4 ran, and is skipped"),
    ]
    for spoil, words in cases:
        with tabled.case(spoil, words):
            nodes, lines = right()
            spoil(nodes, lines)
            assert any(words in text for text in found(nodes, lines)), found(nodes, lines)
