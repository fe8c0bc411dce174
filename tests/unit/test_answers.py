"""An answer is checked against its widget, and typed text is read as a value."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import answers

TURNOUT = {
    "widget": "turnout",
    "turnout_options": [{"label": "Left", "value": 0}, {"label": "Right", "value": "r"}],
}
FILES = [{"rel_path": "a/one.csv", "size_bytes": 3}, {"rel_path": "a/two.csv", "size_bytes": 5}]
CHOOSE = {"widget": "choose_one", "options": FILES, "multiple": False}
SOME = {"widget": "choose_one", "options": ["red", "7", 7.5], "multiple": True}
UPLOAD = {"widget": "file_upload", "accept": [".csv", "image/*"]}
PICK = {"widget": "pick_or_upload", "accept": "csv, .json", "library": ["stock.bin"]}


@pytest.mark.parametrize(
    ("spec", "value"),
    [
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
    ],
)
def test_an_answer_that_fits_is_accepted(spec: dict[str, Any], value: Any) -> None:
    answers.check(spec, value, "node 'q'")


@pytest.mark.parametrize(
    ("spec", "value", "said"),
    [
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
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    spec: dict[str, Any] | None, value: Any, said: str
) -> None:
    with pytest.raises(errors.InputRefused) as refused:
        answers.check(spec, value, "node 'q'")
    assert said in str(refused.value)
    assert "node 'q'" in str(refused.value)


def test_a_refusal_names_only_some_of_many_options() -> None:
    with pytest.raises(errors.InputRefused, match="and 88 more"):
        answers.check({"widget": "choose_one", "options": list(range(100))}, "x", "it")


@pytest.mark.parametrize(
    ("spec", "typed", "meant"),
    [
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
    ],
)
def test_a_label_means_its_option(spec: dict[str, Any] | None, typed: Any, meant: Any) -> None:
    assert answers.meant(spec, typed) == meant


def test_a_value_comes_before_a_label() -> None:
    swapped = [{"label": "b", "value": "a"}, {"label": "a", "value": "b"}]
    assert answers.meant({"widget": "turnout", "turnout_options": swapped}, "a") == "a"
