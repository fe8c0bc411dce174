"""The configuration of a pool: read whole, or refused with one line per mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.worker import shapes

FINE = {"queue": "load.cbr", "concurrency": 2}


def test_a_list_is_read() -> None:
    text = json.dumps([FINE, {"queue": "fetch"}])
    assert shapes.parse(text, "W") == [("load.cbr", 2), ("fetch", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "W is empty: name the queues"),
        ("  ", "W is empty: name the queues"),
        ("{", "W is not valid JSON: Expecting"),
        ("{}", "W must be a list of at least one entry"),
        ("[]", "W must be a list of at least one entry"),
        ("null", "W must be a list of at least one entry"),
        (
            '[{"queue": "a", "queue": "b"}]',
            "W cannot be read: key 'queue' appears twice",
        ),
        ("[" * 100_000, "W cannot be read: nested too deeply"),
    ],
)
def test_what_is_no_list_of_entries_is_refused(text: str, said: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=said):
        shapes.parse(text, "W")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, "3 is not an object"),
        ({}, "`queue` is missing"),
        ({"queue": None}, "queue None is not a string"),
        ({"queue": "cpu"}, "start queue-claim-worker --queue cpu"),
        ({"queue": "a b"}, "'a b' is not a queue name"),
        ({"queue": "load.cbr"}, "is also in entry 0"),
        ({"queue": "a", "concurrency": 0}, "concurrency 0: a whole number from 1 to 500"),
        ({"queue": "a", "concurrency": 501}, "concurrency 501: "),
        ({"queue": "a", "concurrency": True}, "concurrency True: "),
        ({"queue": "a", "concurrency": "2"}, "concurrency '2': "),
        ({"queue": "a", "workers": 2}, "unknown key 'workers'; known are queue, concurrency"),
    ],
)
def test_a_wrong_entry_is_named(entry: Any, said: str) -> None:
    with pytest.raises(errors.InvalidConfig) as caught:
        shapes.check([FINE, entry], "W")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("W[1]: ")
    assert said in line


def test_each_wrong_entry_has_a_line() -> None:
    with pytest.raises(errors.InvalidConfig) as caught:
        shapes.check([{"queue": "gpu", "concurrency": -1}, FINE, "x"], "W")
    assert [line[:4] for line in str(caught.value).splitlines()] == ["W[0]", "W[0]", "W[2]"]


def test_a_process_has_a_limit() -> None:
    entries = [{"queue": name, "concurrency": 251} for name in "ab"]
    with pytest.raises(errors.InvalidConfig, match="502 jobs at once; one process runs at most"):
        shapes.check(entries, "W")
