"""Answers at their edges: options and labels, accepted files, JSON equality, what messages show."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import answers
from tests.support import tabled

RECORDS = [{"label": "L", "name": "N", "value": 1}, {"rel_path": "p", "id": 5}, {"x": 1}]


@pytest.mark.parametrize("spec", [None, [], "x", {}, {"options": {"a": 1}}, {"options": "ab"}])
def test_a_question_without_a_list_has_no_options(spec: Any) -> None:
    assert answers.options(spec) == []
    assert answers.meant(spec, "x") == "x"


def test_an_option_is_named_by_the_first_of_its_labels() -> None:
    one, two, three = RECORDS
    assert answers.options({"options": [*RECORDS, 7, None]}) == [
        ("L", one), ("p", two), (str(three), three), ("7", 7), ("None", None),
    ]  # fmt: skip
    assert answers.options({"widget": "turnout", "options": [one, {"label": "M"}, "x"]}) == [
        ("L", 1), ("M", None), ("x", "x"),
    ]  # fmt: skip


def test_the_options_of_a_turnout_come_first_and_a_library_last() -> None:
    spec: dict[str, Any] = {"turnout_options": ["a"], "options": ["b"], "library": ["c"]}
    for name in (*"abc",):
        assert answers.options(spec) == [(name, name)]
        del spec[next(iter(spec))]


def accepts(accept: Any, *names: str) -> list[bool]:
    found: list[bool] = []
    for name in names:
        try:
            answers.check({"widget": "file_upload", "accept": accept}, name, "it")
            found.append(True)
        except errors.InputRefused:
            found.append(False)
    return found


def test_files_are_accepted_by_suffix_and_type() -> None:
    cases: list[Any] = [
        ([".csv"], True, False, False), ("csv", True, False, False),
        (" .CSV ,", True, False, False),
        ("image/*", False, True, False), ("image/png", False, True, False),
        ("image/jpeg", False, False, False), ("text/*,png", True, True, False),
        ("*", True, True, True), ("*/*", True, True, True), (".*", True, True, True),
        ("*.csv", True, False, False), ("", True, True, True), (None, True, True, True),
        (5, True, True, True), ({"a": 1}, True, True, True), ([5], False, False, False),
    ]  # fmt: skip
    for accept, csv, png, odd in cases:
        with tabled.case(accept, csv, png, odd):
            assert accepts(accept, "a.csv", "a.PNG", "a.odd") == [csv, png, odd]


def test_a_type_is_all_that_is_before_its_slash() -> None:
    assert accepts("audio/*", "a.json", "a.mp3") == [False, True]
    assert accepts("audi/*", "a.mp3") == [False]


def test_the_names_of_files_are_looked_for() -> None:
    cases: list[Any] = [
        ("a.csv", False), ("a.exe", True), (["a.csv", ["b.exe"]], True), ({"path": "a.exe"}, True),
        ({"rel_path": "a.exe"}, True), ({"abs_path": "a.exe"}, True), ({"name": "a.exe"}, True),
        ({"path": "a.csv", "name": "b.exe"}, False), ({"other": "a.exe"}, False), (5, False),
        ([], False), (None, False),
    ]  # fmt: skip
    for value, refused in cases:
        with tabled.case(value, refused):
            spec = {"widget": "pick_or_upload", "accept": "csv"}
            if not refused:
                answers.check(spec, value, "it")
                continue
            with pytest.raises(errors.InputRefused, match=r"it accepts \.csv"):
                answers.check(spec, value, "it")


def test_values_are_compared_as_json() -> None:
    cases: list[Any] = [
        (1, 1.0, True), (True, 1, False), (1, True, False), (False, False, True), ("1", 1, False),
        ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"a": True}, False), ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False), ([1, 2], [1, 2.0], True), ([1, 2], [1], False),
        ([1, 2], [2, 2], False), ([1], {"a": 1}, False), (None, None, True), (None, 0, False),
        ([True], [1], False), ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False), ([], {}, False),
    ]  # fmt: skip
    for one, other, same in cases:
        with tabled.case(one, other, same):
            spec = {"widget": "choose_one", "options": [one]}
            if same:
                answers.check(spec, other, "it")
                continue
            with pytest.raises(errors.InputRefused, match="it does not take"):
                answers.check(spec, other, "it")


def reason(options: list[Any], value: Any, widget: str = "choose_one") -> str:
    with pytest.raises(errors.InputRefused) as refused:
        answers.check({"widget": widget, "options": options}, value, "it")
    return str(refused.value)


def test_a_question_that_cannot_be_read_takes_nothing() -> None:
    for spec in ([], "x", 5):
        with pytest.raises(errors.InputRefused, match="it asks what cannot be read"):
            answers.check(spec, 1, "it")


@pytest.mark.parametrize(("count", "end"), [(12, '"11"'), (13, " and 1 more")])
def test_twelve_options_are_named(count: int, end: str) -> None:
    said = reason([str(n) for n in range(count)], "x")
    assert said.endswith(end)
    assert '"11"' in said and '"12"' not in said


def test_a_long_value_is_cut_after_eighty_characters() -> None:
    assert f'take "{"x" * 78}": it' in reason(["a"], "x" * 78)
    assert f'take "{"x" * 76}...: it' in reason(["a"], "x" * 79)


def test_an_option_is_shown_with_its_label_unless_that_says_the_same() -> None:
    said = reason([{"label": "Five", "value": 5}, "x", {"label": "r", "value": {"a": 1}}], "z",
                  "turnout")  # fmt: skip
    assert said.endswith('5 (Five), "x", {"a": 1}')


LABELS = [("7", "x"), ("9", "x"), ("s", "7")]
NAMED = {"widget": "turnout", "options": [{"label": a, "value": b} for a, b in LABELS]}


def test_what_is_typed_means_a_value_then_a_text_then_a_label() -> None:
    cases: list[Any] = [
        ({"options": ["7", 7, 8]}, 7, 7), (NAMED, 7, "7"), (NAMED, 9, "x"),
        ({"options": ["7", 8]}, 7, "7"), ({"options": ["7", 8]}, "8", 8),
        ({"options": ["7", 8]}, 8, 8), ({"options": ["true"]}, True, "true"),
        ({"options": ["a"], "multiple": True}, "a", ["a"]),
        ({"options": ["a", 5], "multiple": True}, ["5", "b"], [5, "b"]),
        ({"options": ["a", 5], "multiple": False}, ["5"], ["5"]),
        ({"options": [{"label": "7", "x": 1}]}, 7, {"label": "7", "x": 1}),
    ]  # fmt: skip
    for spec, typed, meant in cases:
        with tabled.case(spec, typed, meant):
            found = answers.meant(spec, typed)
            assert (found, type(found)) == (meant, type(meant))


SAME = object()


def test_a_text_is_decoded_if_its_question_takes_the_value() -> None:
    cases: list[Any] = [
        ({"type": "number"}, "1" + "0" * 308, 10**308), ({"type": "number"}, "1" + "0" * 309, SAME),
        ({"type": "integer"}, "5.0", SAME), ({"type": "boolean"}, "0", SAME),
        ({"type": "number"}, "true", SAME), ({"type": "json"}, "null", None),
        ({"type": "json"}, "5", 5), ({"type": "str"}, "5", SAME),
        ({"widget": "file_upload"}, "null", None), ({"widget": "pick_or_upload"}, "[1]", [1]),
        ({"widget": "file_upload"}, "5", SAME), ({}, "null", SAME), ({}, "5", SAME),
        ({"widget": "choose_one", "options": [5]}, "5", 5),
        ({"widget": "choose_one", "options": ["5", 5]}, "5", SAME),
        ({"widget": "choose_one", "options": [5]}, "6", SAME),
        ({"widget": "amount", "$answer_type": "integer"}, "5", 5),
        ({"widget": "amount", "$answer_type": "integer"}, "5.0", 5),
        ({"widget": "amount", "$answer_type": "integer"}, 5.0, 5),
        ({"widget": "amount", "$answer_type": "integer"}, "5.5", SAME),
        ({"widget": "amount", "$answer_type": "integer"}, "true", SAME),
        ({"widget": "amount", "$answer_type": "integer"}, "null", None),
        ({"widget": "amount", "$answer_type": "number"}, "5.0", 5.0),
        ({"widget": "agree", "$answer_type": "boolean"}, "true", True),
        ({"widget": "agree", "$answer_type": "boolean"}, "1", SAME),
        ({"widget": "tags", "$answer_type": "array"}, "[1]", [1]),
        ({"widget": "number", "$answer_type": "string"}, "5", SAME),
        ({"widget": "turnout", "turnout_options": [5], "$answer_type": "string"}, "5", SAME),
        ({"widget": "number", "$answer_type": "colour"}, "5", 5),
        ({"widget": "amount", "answer_type": "integer"}, "5", SAME),
    ]  # fmt: skip
    for spec, text, value in cases:
        with tabled.case(spec, text, value):
            found, expected = answers.decoded(spec, text), text if value is SAME else value
            assert (found, type(found)) == (expected, type(expected))


def test_a_type_takes_its_values_and_no_answer() -> None:
    cases: list[Any] = [
        ("integer", (5, 5.0, None), (5.5, True, "5", [])), ("string", ("5", None), (5, True)),
        ("number", (5, 0.5, None), (True, "5")), ("boolean", (True, None), (1, 0, "true")),
        ("array", ([], None), ({}, "[]")), ("object", ({}, None), ([], "{}")),
        ("colour", (5, "5"), ()), (["string"], (5,), ()),
    ]  # fmt: skip
    for named, taken, refused in cases:
        with tabled.case(named, taken, refused):
            for value in taken:
                answers.check_type({"$answer_type": named}, value, "q")
            for value in refused:
                answers.check_type({"answer_type": named}, value, "q")
                with pytest.raises(errors.InputRefused, match=f"its answer is of type {named}"):
                    answers.check_type({"$answer_type": named}, value, "q")
