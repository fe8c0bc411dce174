"""The ref language: what resolves to what, and what hostile input cannot do."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from queue_workflows import errors, refs
from tests.support import tabled
from tests.support.cpu import cpu_seconds
from tests.support.wait import patience

CONTEXT: dict[str, Any] = {
    "flag": True,
    "a": {"b": {"c": [10, {"d": "deep"}]}, "none": None},
    "step/node": {"out": 7},
    "files": [
        {"kind": "image", "rel_path": "s/one.png"},
        {"kind": "image", "rel_path": "s/two.jpg"},
        {"kind": "csv", "rel_path": "s/t.csv", "size": 3},
        "not an object",
    ],
}


def test_a_template_resolves_as_documented() -> None:
    cases: list[Any] = [
        (5, 5),
        (None, None),
        ("$from", "$from"),
        ({"$value": {"$from": "nowhere"}}, {"$from": "nowhere"}),
        ({"$from": "flag"}, True),
        ({"$from": "a.b.c.0"}, 10),
        ({"$from": "a.b.c.1.d"}, "deep"),
        ({"$from": "a.b.c.-1.d"}, "deep"),
        ({"$from": "a.none"}, None),
        ({"$from": "step/node.out"}, 7),
        ({"$from": "a.b.c.0", "$eq": 10}, True),
        ({"$from": "a.b.c.0", "$eq": "10"}, False),
        ({"$from": "a.b.c.0", "$ne": 10}, False),
        ({"$from": "a.b.c.0", "$ne": 11}, True),
        ({"$from": "a.b.c.0", "$ne": 11, "$eq": 12}, False),
        ({"$from": "a.b.c.0", "$ne": 10, "$eq": 10}, True),
        ({"x": {"$from": "flag"}, "y": {"z": {"$value": 1}}}, {"x": True, "y": {"z": 1}}),
        ([{"$from": "flag"}], [{"$from": "flag"}]),
    ]
    for template, expected in cases:
        with tabled.case(template, expected):
            assert refs.resolve_ref(template, CONTEXT) == expected


def test_a_missing_segment_is_a_key_error_that_names_the_path() -> None:
    cases: list[Any] = [
        "x",
        "a.x",
        "a.b.c.2",
        "a.b.c.-3",
        "a.b.c.d",
        "flag.real",
        "a.none.x",
        "",
        "a.b.c.1.d.0",
    ]
    for path in cases:
        with tabled.case(path):
            with pytest.raises(KeyError) as caught:
                refs.resolve_ref({"$from": path}, CONTEXT)
            assert repr(path) in str(caught.value)


class _Secret:
    password = "canary"

    def __init__(self) -> None:
        self.environ = {"PATH": "canary"}


@pytest.mark.parametrize(
    "path", ["o.environ", "o.environ.PATH", "o.password", "o.__class__", "o.__init__.__globals__"]
)
def test_attributes_are_never_walked(path: str) -> None:
    with pytest.raises(errors.RefNotFound):
        refs.resolve_ref({"$from": path}, {"o": _Secret()})


def test_methods_of_containers_are_not_reachable() -> None:
    for path in ("a.keys", "files.append", "a.__class__", "flag.__class__"):
        with pytest.raises(errors.RefNotFound):
            refs.resolve_ref({"$from": path}, CONTEXT)


def test_what_a_ref_finds_is_data_even_when_it_looks_like_a_ref() -> None:
    data = {"$from": "flag"}
    context = {"answer": data, "flag": True}
    assert refs.resolve_ref({"$from": "answer"}, context) is data
    assert refs.resolve_ref({"in": {"$from": "answer"}}, context) == {"in": data}


def test_filter_keeps_the_items_that_meet_every_condition() -> None:
    def names(conditions: dict[str, Any]) -> list[str]:
        found = refs.resolve_ref({"$from": "files", "$filter": conditions}, CONTEXT)
        return [item["rel_path"] for item in found]

    assert names({"kind:eq": "image"}) == ["s/one.png", "s/two.jpg"]
    assert names({"rel_path:matches": r"\.(png|csv)$"}) == ["s/one.png", "s/t.csv"]
    assert names({"kind:eq": "image", "rel_path:matches": "^s/t"}) == ["s/two.jpg"]
    assert names({"size:eq": 3}) == ["s/t.csv"]
    assert names({"size:eq": None}) == ["s/one.png", "s/two.jpg"]
    assert names({"size:eq": None, "kind:eq": "csv"}) == []
    assert names({"size:matches": "3"}) == ["s/t.csv"]
    assert names({"size:matches": "4"}) == []
    assert len(names({})) == 3


def test_a_pattern_is_searched_in_texts_and_in_the_digits_of_numbers() -> None:
    cases: list[Any] = [
        (12, "^12$", True),
        (-1.5, r"^-1\.5$", True),
        (0, "0", True),
        (12, "3", False),
        (True, "", False),
        (True, "True|1", False),
        (None, "", False),
        ([12], "12", False),
        ({"a": 12}, "12", False),
    ]
    for value, pattern, found in cases:
        with tabled.case(value, pattern, found):
            items = [{"f": value}]
            ref = {"$from": "l", "$filter": {"f:matches": pattern}}
            assert refs.resolve_ref(ref, {"l": items}) == (items if found else [])


def test_a_member_without_the_key_counts_as_null() -> None:
    items: list[Any] = [{"f": None}, {}, {"f": 0}, {"f": ""}, "text"]
    ref = {"$from": "l", "$filter": {"f:eq": None}}
    assert refs.resolve_ref(ref, {"l": items}) == [{"f": None}, {}]
    assert refs.resolve_ref({**ref, "$filter": {"f:eq": 0}}, {"l": items}) == [{"f": 0}]


@pytest.mark.parametrize("more", [{"$eq": []}, {"$ne": []}, {"$eq": 1, "$ne": 1}])
def test_of_several_operators_the_filter_counts(more: dict[str, Any]) -> None:
    ref = {"$from": "files", "$filter": {"kind:eq": "csv"}}
    assert refs.resolve_ref(more | ref, CONTEXT) == [CONTEXT["files"][2]]
    assert refs.resolve_ref({**more, **ref, "$filter": {"kind:eq": "mesh"}}, CONTEXT) == []


def test_filter_needs_a_list() -> None:
    with pytest.raises(TypeError, match="flag"):
        refs.resolve_ref({"$from": "flag", "$filter": {}}, CONTEXT)


def test_what_is_no_ref_of_this_language_is_a_value_error() -> None:
    cases: list[Any] = [
        {"$from": "files", "$filter": {"kind:lt": 1}},
        {"$from": "files", "$filter": {"kind": "image"}},
        {"$from": "files", "$filter": {":eq": "image"}},
        {"$from": "files", "$filter": "image"},
        {"$from": "files", "$filter": {"kind:matches": 5}},
        {"$from": "files", "$filter": {"kind:matches": "["}},
        {"$from": "files", "$equals": []},
        {"$from": ["a", "b"]},
        {"$from": None},
    ]
    for ref in cases:
        with tabled.case(ref), pytest.raises(ValueError):
            refs.resolve_ref(ref, CONTEXT)


REFUSED = [
    "a" * 201,
    r"(a)\1",
    r"(?P<x>a)(?P=x)",
    r"(a)(?(1)b|c)",
    r"(a+)+$",
    r"(a*)*$",
    r"(a?)?",
    r"((a+))*",
    r"(?:a{2}){3}",
    r"(\w+\s?)*$",
    r"([a-z]+)*!",
    r"(.*)*x",
    r"(x+x+)+y",
    r"a*b*c*",
    r".*.*.*=",
    r"a{2,}b{3,}c{4,}",
    r"(a|a)*b",
    r"(a|aa)+$",
    r"(a|b|ab)*c",
    r"(|a)*b",
    r"(?x) (a+) *",
    r"(?x:(a+) *)",
    r"(?:a+)(?#comment)*",
    "(a?){50}a{50}",
    "a?" * 40 + "a" * 40,
    "(a|a)" * 30,
    r"a{0,500}a{0,500}a{0,500}[!]",
    "(?i)(?:a|A)*!",
]


def test_unsafe_patterns_are_refused() -> None:
    for pattern in REFUSED:
        with tabled.case(pattern), pytest.raises(errors.InvalidRef):
            refs.resolve_ref({"$from": "files", "$filter": {"kind:matches": pattern}}, CONTEXT)


def test_ordinary_patterns_are_searched_for() -> None:
    cases: list[Any] = [
        (r".*foo.*bar", "a foo a bar"),
        (r"scan.*mask.*png", "scan1/mask.png"),
        (r"^img_\d+_\d+\.(png|jpe?g)$", "img_10_2.jpeg"),
        (r"img_\d+_\d+", "x/img_1_2"),
        (r"^[a-z]{3,20}_[a-z]{3,20}_[a-z]{3,20}$", "abc_def_ghi"),
        (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", "127.0.0.1"),
        (r"(?:foo|bar)+$", "foobarfoo"),
        (r"(?:ab)*c", "ababc"),
        (r"(?i).*FOO", "xfoo"),
        (r"^(?!tmp_).*\.csv$", "a.csv"),
        (r"[]a]+\]", "]]]"),
        (r"x{}", "x{}"),
        (r"\[\d+\]", "a[12]"),
        (r"^a.*b|^c.*d", "c--d"),
        (r".*?x", "aax"),
        ("", "anything"),
        (r"\d*", ""),
    ]
    for pattern, subject in cases:
        with tabled.case(pattern, subject):
            found = refs.resolve_ref(
                {"$from": "l", "$filter": {"f:matches": pattern}},
                {"l": [{"f": subject}, {"f": None}, {}]},
            )
            assert found == [{"f": subject}]


def test_a_subject_over_the_limit_matches_nothing() -> None:
    ref = {"$from": "l", "$filter": {"f:matches": "a"}}
    items = [{"f": "a" * 1000}, {"f": "a" * 1001}]
    assert refs.resolve_ref(ref, {"l": items}) == items[:1]


HOSTILE = [
    (r".*.*x", "a" * 1000),
    (r"\w*\w*[!?]", "a" * 1000),
    (r"a*a*b", "a" * 1000),
    (r"\s+$", " " * 999 + "x"),
    (r".*foo.*[bc]", "foo" * 333),
    (r"^.*.*[xy]", "a" * 1000),
    (r"\w+[!?]", "a" * 1000),
    (r"\d+_\d+x", "1" * 499 + "_" + "1" * 500),
    (r"(?:a|b)*c", "ab" * 500),
    (r"aa*a*[!?]", "a" * 1000),
]


def test_the_evil_corpus_takes_less_than_200_ms_in_all() -> None:
    def run_all() -> None:
        for pattern, subject in [*HOSTILE, *((pattern, "a" * 1000) for pattern in REFUSED)]:
            with contextlib.suppress(errors.InvalidRef):
                ref = {"$from": "l", "$filter": {"f:matches": pattern}}
                assert refs.resolve_ref(ref, {"l": [{"f": subject}]}) == []

    assert cpu_seconds(run_all) < patience(0.2)


def test_many_hostile_items_share_one_budget() -> None:
    items = [{"f": "ab" * 500} for _ in range(1000)]
    ref = {"$from": "l", "$filter": {"f:matches": r"^\w*\w*[!?]"}}

    def resolve() -> None:
        with pytest.raises(errors.InvalidRef, match="too long"):
            refs.resolve_ref(ref, {"l": items})

    assert cpu_seconds(resolve) < patience(0.5)


def _nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"k": leaf}
    return leaf


def test_depth_is_bounded_by_a_clear_error() -> None:
    assert refs.resolve_ref(_nested(199, {"$value": 1}), {}) == _nested(199, 1)
    for depth in (201, 3000):
        with pytest.raises(errors.InvalidRef):
            refs.resolve_ref(_nested(depth, 1), {})


def test_deep_data_passes_through_and_is_not_compared_to_death() -> None:
    deep = _nested(3000, 1)
    assert refs.resolve_ref({"$from": "d"}, {"d": deep}) is deep
    with pytest.raises(errors.InvalidRef):
        refs.resolve_ref({"$from": "d", "$eq": _nested(3000, 1)}, {"d": _nested(3000, 1)})
    assert refs.heads(_nested(3000, {"$from": "x.y"})) == {"x"}


def test_heads_are_what_resolving_reads() -> None:
    template = {
        "a": {"$from": "step/node.out.x"},
        "b": {"c": {"$from": "flag", "$eq": {"$from": "literal"}}},
        "d": {"$value": {"$from": "escaped"}},
        "e": [{"$from": "in a list"}],
        "f": {"$from": 5},
        "g": {"$value": 1, "$from": "beside a value"},
    }
    assert refs.heads(template) == {"step/node", "flag"}
    assert refs.heads("x") == set()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, False), ({"a": {"b": 1}}, False), ([{"$from": "a"}], False), ({"a": {"$value": 1}}, True),
     ({"a": {"b": {"$from": "x"}}}, True)],
)  # fmt: skip
def test_has_refs(value: Any, expected: bool) -> None:
    assert refs.has_refs(value) is expected


def test_inputs_that_stopped_resolving_keep_their_value() -> None:
    template = {"a": {"$from": "gone"}, "b": {"$from": "flag"}, "c": {"$from": "gone"}, "d": 4}
    assert refs.resolve_inputs(template, {"flag": 2}, {"a": "kept", "b": 1, "d": 0}) == {
        "a": "kept",
        "b": 2,
        "d": 4,
    }


@pytest.mark.parametrize("error", [KeyError, IndexError, TypeError, RuntimeError, RecursionError])
def test_any_error_of_an_app_resolver_keeps_the_value(error: type[Exception]) -> None:
    def resolver(value: Any, context: Any) -> Any:
        raise error("boom")

    assert refs.resolve_inputs({"a": 1}, {}, {"a": "kept"}, resolver) == {"a": "kept"}
    assert refs.attempt(1, {}, resolver)[1] is not None


def test_fallback_values_and_resolved_values_are_not_resolved_again() -> None:
    looks_like = {"$from": "flag"}
    resolved = refs.resolve_inputs(
        {"a": {"$from": "gone"}, "b": {"$from": "data"}}, {"data": looks_like, "flag": 1},
        {"a": looks_like},
    )  # fmt: skip
    assert resolved == {"a": looks_like, "b": looks_like}
