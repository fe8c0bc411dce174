"""Refs at their edges: the deepest template, the first index, ids of items in paths."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors, refs
from tests.support import tabled


def nested(depth: int) -> Any:
    template: Any = {"$value": 1}
    for _ in range(depth - 1):
        template = {"k": template}
    return template


def test_the_deepest_template_resolves() -> None:
    assert refs.resolve_ref(nested(200), {}) is not None
    with pytest.raises(errors.InvalidRef, match="deeper than 200 levels"):
        refs.resolve_ref(nested(201), {})


@pytest.mark.parametrize(("at", "found"), [("0", 1), ("2", 3), ("-1", 3), ("-3", 1)])
def test_a_list_has_indexes_from_both_ends(at: str, found: int) -> None:
    assert refs.resolve_ref({"$from": f"l.{at}"}, {"l": [1, 2, 3]}) == found
    assert refs.resolve_ref({"$from": f"l.{at}"}, {"l": (1, 2, 3)}) == found


def test_another_index_is_missing() -> None:
    cases: list[Any] = ["3", "4", "-4", "-5", "x", "1.0", " 1", "0x1", "1234567890"]
    for at in cases:
        with tabled.case(at), pytest.raises(errors.RefNotFound):
            refs.resolve_ref({"$from": f"l.{at}"}, {"l": [1, 2, 3]})


def test_the_id_of_an_items_node_is_one_segment() -> None:
    cases: list[Any] = [
        ("a.b.c", ["a", "b", "c"]), ("a", ["a"]), ("m[a.png]/cut", ["m[a.png]/cut"]),
        ("m[a.png]/cut.x.y", ["m[a.png]/cut", "x", "y"]),
        ("m[a]/n[b.c]/cut.x", ["m[a]/n[b.c]/cut", "x"]),
        ("a[b.c", ["a[b", "c"]), ("m[].x", ["m[]", "x"]), ("a.m[b.c]", ["a", "m[b", "c]"]),
    ]  # fmt: skip
    for path, segments in cases:
        with tabled.case(path, segments):
            assert refs.segments(path) == segments


def test_a_key_without_a_dollar_is_no_operator() -> None:
    assert refs.resolve_ref({"$from": "a", "note": "x"}, {"a": 1}) == 1
    with pytest.raises(errors.InvalidRef, match="unknown operator '\\$gt'"):
        refs.resolve_ref({"$from": "a", "$gt": 1}, {"a": 1})


@pytest.mark.parametrize("condition", ["kind:lt", ":matches", "kind", "kind:"])
def test_a_condition_names_a_field_and_a_known_operator(condition: str) -> None:
    with pytest.raises(errors.InvalidRef, match="a condition is '<field>:eq'"):
        refs.resolve_ref({"$from": "l", "$filter": {condition: "x"}}, {"l": [{"kind": "x"}]})


def test_the_reason_of_an_error_of_ours_has_no_class() -> None:
    assert refs.attempt({"$from": "x"}, {}, refs.resolve_ref) == (
        None,
        "$from 'x': there is no 'x'",
    )
    assert refs.attempt({"$from": "x"}, {"x": 1}, refs.resolve_ref) == (1, None)


def test_inside_are_the_refs_and_quotes_that_resolving_visits() -> None:
    quote, ref = {"$value": {"$from": "x"}}, {"$from": "a", "$eq": {"$from": "b"}}
    assert refs.inside({"q": quote, "r": {"s": ref}, "t": [ref]}) in ([ref, quote], [quote, ref])
