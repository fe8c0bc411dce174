"""Branches at their edges: the most arms, the longest names, an output whose value has changed."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import branches

KNOWN: dict[str, list[str]] = {"one": [], "first": [], "two": ["first"]}
CHOICE = branches.Choice("b", 1, {"x": "b/one", "y": "b/two"}, None)


def read(**more: Any) -> branches.Choice:
    entry = {"on": {"$from": "k"}, "arms": {"x": "one", "y": "two"}, **more}
    return branches.read(entry, "b", KNOWN, "here")


def many(count: int) -> dict[str, str]:
    return {f"k{n}": "two" if n else "one" for n in range(count)}


def test_a_thousand_arms_are_taken_and_one_more_is_not() -> None:
    assert len(read(arms=many(1000)).arms) == 1000
    assert read(arms={"x": "two"}, other="one").other == "b/one"
    with pytest.raises(errors.InvalidWorkflow, match="1001 arms, not 1 to 1000"):
        read(arms=many(1001))


def test_a_stored_branch_has_as_many_and_ends_of_201_characters() -> None:
    longest = "b/" + "x" * 199
    raw = {"on": 1, "arms": dict.fromkeys(many(1000), longest), "other": longest}
    found = branches.stored(raw, "b", "node 'b'")
    assert (len(found.arms), found.other, found.ends) == (1000, longest, [longest])
    assert branches.stored({"on": 1, "arms": {"x": "b/one"}}, "b", "here") == branches.Choice(
        "b", 1, {"x": "b/one"}, None
    )
    for wrong in ({"arms": many(1001)}, {"arms": {"x": longest + "x"}}, {"other": longest + "x"}):
        with pytest.raises(errors.InvalidWorkflow, match="node 'b': 'choice'"):
            branches.stored({**raw, **wrong}, "b", "node 'b'")


@pytest.mark.parametrize(("count", "more"), [(20, False), (21, True)])
def test_the_reason_lists_twenty_arms(count: int, more: bool) -> None:
    arms = {f"k{n}": "b/one" for n in range(count)}
    with pytest.raises(errors.InvalidWorkflow) as refused:
        branches.Choice("b", 1, arms, None).arm_of("z")
    assert "k19" in str(refused.value)
    assert "k20" not in str(refused.value)
    assert (", ..." in str(refused.value)) is more


def test_the_reason_lists_all_of_a_few_arms() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="its arms are x, y: add one"):
        CHOICE.arm_of("z")


def test_every_other_value_has_the_arm_other() -> None:
    choice = CHOICE._replace(other="b/o")
    assert [choice.arm_of(value) for value in ("x", "z", None, 1.5, [])] == [
        "b/one", "b/o", "b/o", "b/o", "b/o",
    ]  # fmt: skip
    assert choice.ends == ["b/one", "b/two", "b/o"]
    assert choice.document() == {"on": 1, "arms": CHOICE.arms, "other": "b/o"}


@pytest.mark.parametrize(
    ("context", "output"),
    [({"b/one": {"v": 1}}, {"v": 1}), ({}, {}), ({"b/one": 5, "b/two": {}}, {})],
)
def test_the_output_is_that_of_the_chosen_arm(context: Any, output: Any) -> None:
    assert branches.output(CHOICE, "x", context) == output


def test_a_value_that_has_changed_since_an_arm_ran_is_an_error() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="'b/two' has run, and 'x' chooses 'b/one'"):
        branches.output(CHOICE, "x", {"b/two": {}})


def test_the_nodes_of_an_arm_are_those_that_its_last_one_waits_for() -> None:
    deps = {"b/two": ["b/mid", "out"], "b/mid": ["b/start"], "b/start": ["out"], "b/one": []}

    def arm(node_id: str) -> str | None:
        return "b" if node_id.startswith("b/") else None

    assert branches.linked(CHOICE, deps.get, arm).members == {
        "b/one": {"b/one"},
        "b/two": {"b/two", "b/mid", "b/start"},
    }
    with pytest.raises(errors.InvalidWorkflow, match="'b/one' is not a node of this branch"):
        branches.linked(CHOICE, deps.get, lambda node_id: None)


def test_values_have_the_keys_that_json_gives_them() -> None:
    keys = {"a": "a", "null": None, "true": True, "false": False, "-3": -3}
    assert {branches.key_of(value): key for key, value in keys.items()} == {
        key: key for key in keys
    }
    assert [branches.key_of(value) for value in (1.5, [], {})] == [None, None, None]
