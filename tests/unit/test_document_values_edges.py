"""Values of a workflow's document at their edges: the longest text, the deepest value, odd ids."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import document_values, payload


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "raw", [None, True, 0, 1.5, -(2**1024 - 1), "é", [], {}, {"a": [1, {"b": None}]}]
)
def test_a_json_value_is_copied(raw: Any) -> None:
    assert document_values.value(raw, "it") == raw


def test_a_copy_has_the_types_of_json() -> None:
    given = MappingProxyType({"a": (1, (2,))})
    assert document_values.value(given, "it") == {"a": [1, [2]]}
    inner: list[Any] = []
    assert document_values.value([inner], "it")[0] is not inner


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (float("nan"), "a number that JSON cannot carry"),
        (float("inf"), "a number that JSON cannot carry"),
        (2**1024, "a number that JSON cannot carry"),
        (-(2**1024), "a number that JSON cannot carry"),
        ({1: 2}, "the key 1 is not a string"), ({"a\0": 2}, "NUL"), ("\ud800", "surrogate"),
        (chr(0xDFFF), "surrogate"), ({1, 2}, "a set is not a JSON value"),
        ([object], "a type is not a JSON value"), (b"x", "a bytes is not a JSON value"),
    ],
)  # fmt: skip
def test_what_json_cannot_carry_is_refused(raw: Any, said: str) -> None:
    with pytest.raises(errors.InvalidWorkflow, match=rf"^it: .*{said}"):
        document_values.value(raw, "it")


def test_the_deepest_value_is_that_of_a_payload_and_of_what_the_engine_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload, "MAX_DEPTH", 3)
    assert document_values.value(nested(3), "it") == nested(3)
    assert document_values.value(nested(5), "it", wrapped=2) == nested(5)
    assert document_values.value({"a": {"b": {"c": 1}}}, "it") == {"a": {"b": {"c": 1}}}
    with pytest.raises(errors.InvalidWorkflow, match="nested too deep"):
        document_values.value({"a": {"b": {"c": {}}}}, "it")
    for levels, wrapped in ((4, 0), (6, 2)):
        with pytest.raises(errors.InvalidWorkflow, match="nested too deep"):
            document_values.value(nested(levels), "it", wrapped=wrapped)


def test_a_text_has_its_limit() -> None:
    def text(raw: Any, **limit: Any) -> str | None:
        return document_values.text({"k": raw}, "k", "it", **limit)

    assert (text(None), document_values.text({}, "k", "it")) == (None, None)
    assert text("x" * 200) == "x" * 200
    assert text("x" * 300, limit=None) == "x" * 300
    assert text("xx", limit=2) == "xx"
    for raw, limit, said in (
        ("x" * 201, {}, "'k' must have 1 to 200 characters, not 201"),
        ("", {}, "'k' must have 1 to 200 characters, not 0"),
        ("", {"limit": None}, "'k' must not be empty"),
        (5, {}, "'k' must be text, not int"), ("a\0", {}, "NUL"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidWorkflow, match=f"it: .*{said}"):
            text(raw, **limit)


def test_a_needed_text_is_there() -> None:
    assert document_values.needed_text({"k": "x" * 3}, "k", "it", limit=3) == "xxx"
    with pytest.raises(errors.InvalidWorkflow, match="it: 'k' is missing"):
        document_values.needed_text({"k": None}, "k", "it")


def test_records_members_and_lists() -> None:
    assert document_values.record({"a": 1}, "it") == {"a": 1}
    for raw, kind in ((None, "null"), ([], "list")):
        with pytest.raises(errors.InvalidWorkflow, match=f"an object is needed, not {kind}"):
            document_values.record(raw, "it")
    given = {"a": 1}
    assert document_values.members(given) == given
    assert document_values.members(given) is not given
    assert [document_values.members(each) for each in (None, 5, [1])] == [{}, {}, {}]
    assert document_values.items({"k": (1, 2)}, "k", "it") == [1, 2]
    assert document_values.items({"k": None}, "k", "it") == []
    with pytest.raises(errors.InvalidWorkflow, match="'k' must be a list, not str"):
        document_values.items({"k": "ab"}, "k", "it")


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ("x", "x"), ("x" * 100, "x" * 100), ("é" * 100, "é" * 100), (7, "7"), (-7, "-7"),
        (10**99, "1" + "0" * 99), (0, "0"),
    ],
)  # fmt: skip
def test_an_id_is_short_and_printable_or_a_number(raw: Any, found: str) -> None:
    assert document_values.identifier({"id": raw}, "it") == found


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "x" * 101,
        "€" * 67,
        "a\n",
        "a/b",
        "a[b",
        "a]",
        "a#",
        None,
        True,
        1.5,
        10**100,
        -(10**100),
    ],
)
def test_another_id_is_refused(raw: Any) -> None:
    with pytest.raises(errors.InvalidWorkflow, match="is not an id: 1 to 100 printable"):
        document_values.identifier({"id": raw}, "it")


def test_a_long_number_is_not_written_into_the_reason() -> None:
    for digits in (100, 5000):
        with pytest.raises(errors.InvalidWorkflow, match="it: a number of so many digits is not"):
            document_values.identifier({"id": 10**digits}, "it")
    with pytest.raises(errors.InvalidWorkflow, match="it: True is not"):
        document_values.identifier({"id": True}, "it")


def test_ids_are_a_list_or_one_and_each_counts_once() -> None:
    assert document_values.ids({"k": "a"}, "k", "it") == ("a",)
    assert document_values.ids({"k": 7}, "k", "it") == ("7",)
    assert document_values.ids({"k": ["a", 7, "a"]}, "k", "it") == ("a", "7")
    assert document_values.ids({}, "k", "it") == ()
    for wrong in (True, [True], [1.5], [None]):
        with pytest.raises(errors.InvalidWorkflow, match=r"'k' (lists ids|must be a list)"):
            document_values.ids({"k": wrong}, "k", "it")


@pytest.mark.parametrize(
    ("node_id", "path"),
    [
        ("a/b", "a/b"), (".", "%2E"), ("..", "%2E%2E"), (".scratch", "%2Escratch"),
        ("...", "..."), (".x", ".x"), ("a/..#2", "a/%2E%2E#2"), ("%2E", "%252E"), ("a#2", "a#2"),
        ("%252E", "%25252E"), ("..#1/.", "%2E%2E#1/%2E"),
    ],
)  # fmt: skip
def test_the_folder_of_a_node_is_its_own(node_id: str, path: str) -> None:
    assert document_values.folder(node_id) == path
