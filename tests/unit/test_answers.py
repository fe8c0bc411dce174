"""An answer is checked against its widget, and typed text is read as a value."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import answers
from tests.support import tabled

TURNOUT = {
    "widget": "turnout",
    "turnout_options": [{"label": "Left", "value": 0}, {"label": "Right", "value": "r"}],
}
FILES = [{"rel_path": "a/one.csv", "size_bytes": 3}, {"rel_path": "a/two.csv", "size_bytes": 5}]
CHOOSE = {"widget": "choose_one", "options": FILES, "multiple": False}
SOME = {"widget": "choose_one", "options": ["red", "7", 7.5], "multiple": True}
UPLOAD = {"widget": "file_upload", "accept": [".csv", "image/*"]}
PICK = {"widget": "pick_or_upload", "accept": "csv, .json", "library": ["stock.bin"]}


def test_an_answer_that_fits_is_accepted() -> None:
    cases: list[Any] = [
        (TURNOUT, 0),
        (TURNOUT, "r"),
        (CHOOSE, {"size_bytes": 3.0, "rel_path": "a/one.csv"}),
        (SOME, ["red", 7.5]),
        (SOME, []),
        ({"widget": "choose_one", "options": []}, "anything"),
        (UPLOAD, "a.CSV"),
        (UPLOAD, ["a.csv", {"path": "b.png"}]),
        (UPLOAD, None),
        (PICK, "stock.bin"),
        (PICK, "x.json"),
        ({"widget": "file_upload", "accept": []}, "x.exe"),
        ({"widget": "slider", "options": [1, 2]}, 99),
    ]
    for spec, value in cases:
        with tabled.case(spec, value):
            answers.check(spec, value, "node 'q'")


def test_what_does_not_fit_is_refused_by_name() -> None:
    cases: list[Any] = [
        (TURNOUT, "Left", '"Left": it is one of 0 (Left), "r" (Right)'),
        (TURNOUT, False, "does not take false"),
        (TURNOUT, None, "does not take null"),
        (CHOOSE, {"rel_path": "a/one.csv"}, "does not take"),
        (SOME, "red", "takes a list"),
        (SOME, ["red", "blue"], 'does not take "blue"'),
        (UPLOAD, "a.exe", "it accepts .csv, image/*"),
        (UPLOAD, ["a.csv", {"name": "b.mp4"}], "'b.mp4'"),
        (PICK, "other.bin", "it accepts .csv, .json"),
        (None, 1, "asked nothing yet"),
    ]
    for spec, value, said in cases:
        with tabled.case(spec, value, said):
            with pytest.raises(errors.InputRefused) as refused:
                answers.check(spec, value, "node 'q'")
            assert said in str(refused.value)
            assert "node 'q'" in str(refused.value)


def test_a_refusal_names_only_some_of_many_options() -> None:
    with pytest.raises(errors.InputRefused, match="and 88 more"):
        answers.check({"widget": "choose_one", "options": list(range(100))}, "x", "it")


def test_a_label_means_its_option() -> None:
    cases: list[Any] = [
        (TURNOUT, "Left", 0),
        (TURNOUT, 0, 0),
        (TURNOUT, "r", "r"),
        (CHOOSE, "a/two.csv", FILES[1]),
        (SOME, "red", ["red"]),
        (SOME, 7, ["7"]),
        (SOME, ["red", 7.5], ["red", 7.5]),
        (TURNOUT, "nowhere", "nowhere"),
        ({"widget": "file_upload"}, "x", "x"),
        (None, "x", "x"),
    ]
    for spec, typed, meant in cases:
        with tabled.case(spec, typed, meant):
            assert answers.meant(spec, typed) == meant


def test_a_value_comes_before_a_label() -> None:
    swapped = [{"label": "b", "value": "a"}, {"label": "a", "value": "b"}]
    assert answers.meant({"widget": "turnout", "turnout_options": swapped}, "a") == "a"


DIGITS = {"widget": "turnout", "turnout_options": [{"label": "Five", "value": 5},
          {"label": "Text", "value": "7"}, {"label": "Seven", "value": 7},
          {"label": "On", "value": True}, {"label": "None", "value": None}]}  # fmt: skip


def typed(kind: str, **more: Any) -> dict[str, Any]:
    return {"widget": "mine", "type": kind, **more}


def test_a_text_that_is_json_is_decoded_where_no_text_is_taken() -> None:
    cases: list[Any] = [
        (DIGITS, "5", 5),
        (DIGITS, "5.0", 5.0),
        (DIGITS, "true", True),
        (DIGITS, "null", None),
        (CHOOSE, '{"rel_path": "a/one.csv", "size_bytes": 3}', FILES[0]),
        (SOME, '["red", 7.5]', ["red", 7.5]),
        (UPLOAD, '{"path": "b.exe"}', {"path": "b.exe"}),
        (UPLOAD, '["a.csv"]', ["a.csv"]),
        (PICK, "null", None),
        (typed("number"), "5", 5),
        (typed("number"), " -1.5e2 ", -150.0),
        (typed("float"), "0.5", 0.5),
        (typed("integer"), "5", 5),
        (typed("int"), "-7", -7),
        (typed("boolean"), "true", True),
        (typed("bool"), "false", False),
        (typed("object"), '{"a": [1]}', {"a": [1]}),
        (typed("array"), "[1, 2]", [1, 2]),
        (typed("list"), "[]", []),
        (typed("json"), "{}", {}),
        (typed("json"), "true", True),
        (typed("json"), "[5]", [5]),
        (typed("json"), '"5"', "5"),
        (typed("json"), "null", None),
        (typed("number"), "null", None),
        ({"widget": "slider", "type": "colour"}, "3", 3),
        ({"widget": "slider"}, "3", 3),
        ({"widget": "number"}, "3", 3),
        ({"widget": "confirm"}, "true", True),
        ({"widget": "checkbox"}, "false", False),
        ({"widget": "toggle"}, "true", True),
        ({"type": "number"}, "3", 3),
        ({"widget": "confirm", "type": "number"}, "3", 3),
    ]
    for spec, text, value in cases:
        with tabled.case(spec, text, value):
            found = answers.decoded(spec, text)
            assert (found, type(found)) == (value, type(value))


def test_any_other_text_stays_as_it_is() -> None:
    cases: list[Any] = [
        (DIGITS, "7"),
        (DIGITS, "6"),
        (DIGITS, "Five"),
        (DIGITS, '"5"'),
        (TURNOUT, "r"),
        ({"widget": "choose_one", "options": []}, "5"),
        ({**DIGITS, "type": "text"}, "5"),
        (SOME, "7"),
        (SOME, '["blue"]'),
        (UPLOAD, "5"),
        (UPLOAD, "true"),
        (UPLOAD, '"a.csv"'),
        (typed("text"), "5"),
        (typed("string"), "true"),
        ({"widget": "textarea"}, "[1]"),
        ({"widget": "slider", "type": "text"}, "3"),
        ({"widget": "mine"}, "5"),
        ({"widget": "confirm"}, "1"),
        ({"widget": "slider"}, "true"),
        (typed("number"), "five"),
        (typed("number"), '"5"'),
        (typed("number"), ""),
        (typed("number"), "[5]"),
        (typed("integer"), "5.5"),
        (typed("integer"), "true"),
        (typed("boolean"), "1"),
        (typed("object"), "[]"),
        (typed("array"), "{}"),
        (typed("text"), "null"),
        ({"widget": "mine"}, "null"),
        (typed("object"), '{"a": "\\u0000"}'),
        (typed("object"), '{"a": "\\ud800"}'),
        (typed("array"), "[" * 300 + "]" * 300),
        (typed("number"), "NaN"),
        (typed("number"), "Infinity"),
        (typed("number"), "-Infinity"),
        (typed("number"), "1e999"),
        (typed("number"), "1" * 400),
        (typed("number"), "1" * 5000),
        (typed("json"), "[NaN]"),
        (typed("json"), '{"a": 1e999}'),
        (typed("json"), "[" * 100_000 + "]" * 100_000),
        ({"type": ["number"]}, "5"),
        ({"widget": ["slider"]}, "5"),
        (None, "5"),
        ("number", "5"),
        ([], "5"),
    ]
    for spec, text in cases:
        with tabled.case(spec, text):
            assert answers.decoded(spec, text) == text


@pytest.mark.parametrize("value", [5, True, None, ["5"], {"a": "5"}, 0.5])
def test_only_a_text_is_decoded(value: Any) -> None:
    for spec in (typed("number"), typed("json"), DIGITS, UPLOAD):
        assert answers.decoded(spec, value) is value
