"""What JSON or the database cannot carry is refused before anything is written."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pydantic
import pytest

from queue_workflows import errors
from queue_workflows.dag import graph, payload, plan
from tests.support import tabled


def nested(levels: int, leaf: Any = 1) -> Any:
    for _ in range(levels):
        leaf = {"a": leaf}
    return leaf


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    cases: list[Any] = [
        {"a": "b\x00c"},
        {"a\x00": 1},
        "\x00",
        [["deep", {"x": "\x00"}]],
        {"a": "\ud800"},
        ["\udfff and text"],
        {"\udc00": 1},
        {"a": math.nan},
        [math.inf],
        -math.inf,
        {"a": {1, 2}},
        {"a": b"bytes"},
        {"a": timedelta(1)},
        {"a": object()},
        {1: "int key"},
        {None: 1},
        {"a": [{True: 1}]},
        {("t",): 1},
        10**5000,
    ]
    for value in cases:
        with tabled.case(value):
            with pytest.raises(errors.InvalidPayload, match="the thing") as caught:
                payload.encode(value, "the thing")
            assert isinstance(caught.value, ValueError)


def test_what_json_carries_round_trips() -> None:
    cases: list[Any] = [
        None,
        {},
        [],
        0,
        -0.0,
        1e308,
        10**30,
        True,
        "text",
        "🎬 and \\u0000 as letters and \t\n\x01\x7f",
        {"a": [1, {"b": None}], "ключ": "значение", "": ""},
        {"a": "\\ud800 spelled out"},
        {"$from": "looks like a ref"},
    ]
    for value in cases:
        with tabled.case(value):
            assert json.loads(payload.encode(value, "it")) == value


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@dataclass
class Span:
    first: date
    parts: list[Any] = field(default_factory=list[Any])


class Order(pydantic.BaseModel):
    day: date
    price: Decimal = Decimal("1.50")


ID = UUID("12345678-1234-5678-1234-567812345678")


def test_values_of_common_types_are_encoded() -> None:
    cases: list[Any] = [
        (date(2026, 3, 1), "2026-03-01"),
        (datetime(2026, 3, 1, 10, 30), "2026-03-01T10:30:00"),
        (datetime(2026, 3, 1, 10, tzinfo=timezone.utc), "2026-03-01T10:00:00+00:00"),
        (datetime(2026, 3, 1, 10).time(), "10:00:00"),
        (ID, str(ID)),
        (Decimal("1.10"), "1.10"),
        (Path("a/b"), "a/b"),
        (PurePosixPath("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Level.LOW, 1),
        (Span(date(2026, 3, 1), [Span(date(2026, 3, 2))]), {
            "first": "2026-03-01", "parts": [{"first": "2026-03-02", "parts": []}],
        }),
        (Order(day=date(2026, 3, 1)), {"day": "2026-03-01", "price": "1.50"}),
        ({"a": [1, {"b": (ID, None, 1.5, True)}]}, {"a": [1, {"b": [str(ID), None, 1.5, True]}]}),
    ]  # fmt: skip
    for value, stored in cases:
        with tabled.case(value, stored):
            assert json.loads(payload.encode(value, "it")) == stored
            assert json.loads(payload.encode({"k": [value]}, "it")) == {"k": [stored]}


def test_a_refusal_names_the_place_in_one_line() -> None:
    cases: list[Any] = [
        ({"a": [1, 2, 3, {4}]}, "result['a'][3]: a set, which JSON cannot carry"),
        ({1, 2}, "result: a set, which JSON cannot carry"),
        ({"a": {"b": (1, object())}}, "result['a']['b'][1]: an object, which JSON cannot carry"),
        ({"a": Span(date(2026, 3, 1), [b"x"])}, "result['a']['parts'][0]: a bytes, which"),
        ({"a": Span}, "result['a']: a type, which JSON cannot carry"),
        ({"a": [math.nan]}, "result['a'][0]: nan, which JSON cannot carry"),
        ({"a": {1: 2}}, "result['a']: key 1 is not a string"),
        ({"a": [10**5000]}, "result['a'][0]: a number beyond 1.7976931348623157e308"),
        ({"a": ["b\x00"]}, "result['a'][0]: text with a NUL character or a lone surrogate"),
        ({"a": [ID, Path("b\x00")]}, "result['a'][1]: text with a NUL character"),
    ]
    for value, words in cases:
        with tabled.case(value, words):
            with pytest.raises(errors.InvalidPayload) as refused:
                payload.encode(value, "result of node 's/n'")
            text = str(refused.value)
            assert text.startswith(f"result of node 's/n': {words}")
            assert "\n" not in text
            assert refused.value.__cause__ is None
            assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_what_dataclasses_hold_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Span(date(2026, 3, 1))
    for _ in range(100):
        span = Span(date(2026, 3, 1), [span])
    with pytest.raises(errors.InvalidPayload, match="it: nested deeper than 64 levels"):
        payload.encode(span, "it")
    loop = Span(date(2026, 3, 1))
    loop.parts.append(loop)
    with pytest.raises(errors.InvalidPayload, match="deeper"):
        payload.encode(loop, "it")
    monkeypatch.setattr(payload, "MAX_DEPTH", 100000)
    with pytest.raises(errors.InvalidPayload, match="deeper than Python can follow"):
        payload.encode(loop, "it")
    monkeypatch.setattr(payload, "MAX_DEPTH", 100)
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "4")
    span = Span(date(2026, 3, 1))
    for _ in range(30):
        span = Span(date(2026, 3, 1), [span, span])
    with pytest.raises(errors.InvalidPayload, match="too many values"):
        payload.encode(span, "it")


def test_a_tuple_is_stored_as_a_list() -> None:
    assert payload.encode({"a": (1, (2,))}, "it") == '{"a": [1, [2]]}'


def test_nesting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload.encode(nested(64), "it")
    with pytest.raises(errors.InvalidPayload, match="it: nested deeper than 64 levels"):
        payload.encode(nested(65), "it")
    with pytest.raises(errors.InvalidPayload, match="deeper"):
        payload.encode(nested(100_000), "it")
    monkeypatch.setattr(payload, "MAX_DEPTH", 2)
    payload.encode([[1]], "it")
    with pytest.raises(errors.InvalidPayload, match="deeper than 2"):
        payload.encode([[[]]], "it")


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(errors.InvalidPayload, match="deeper"):
        payload.encode(loop, "it")


def test_a_value_that_holds_itself_twice_is_refused_before_it_explodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "16")
    value: Any = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(errors.InvalidPayload, match="lists and objects"):
        payload.encode(value, "it")


def test_size_is_bounded_and_the_text_has_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    payload.encode("x" * (1024 * 1024 - 2), "it")
    with pytest.raises(errors.InvalidPayload, match=r"it: 1024 KiB .* 1024 KiB of MAX_PAYLOAD_KB"):
        payload.encode("x" * (1024 * 1024 - 1), "it")
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "1")
    with pytest.raises(errors.InvalidPayload, match="store a path instead"):
        payload.encode({"a": "é" * 200}, "it")


def test_the_check_costs_a_large_flat_dict_less_than_writing_it_thrice() -> None:
    value = {f"key{i}": f"text {i}" for i in range(20_000)}

    def best(call: Any) -> float:
        times: list[float] = []
        traced = sys.gettrace()
        sys.settrace(None)  # what measures coverage counts every line of ours, and none of json's
        try:
            for _ in range(5):
                started = time.thread_time()
                call()
                times.append(time.thread_time() - started)
        finally:
            sys.settrace(traced)
        return min(times)

    assert best(lambda: payload.encode(value, "it")) < 3 * best(lambda: json.dumps(value)) + 0.005


def test_an_error_text_is_storable_and_cut() -> None:
    text = payload.error_text("a\x00b\ud800" + "x" * 9000)
    assert text.startswith("a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}x")
    assert len(text) == 8000


def test_an_error_that_cannot_be_printed_is_still_an_error_text() -> None:
    class Spiteful(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert payload.error_text(Spiteful()) == "Spiteful that cannot be printed"


def test_a_plan_is_written_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "PART_BYTES", 1000)
    node = graph.Node("n", "ok", "cpu", None, (), {}, None, None, None)
    rows = [
        plan.NewNode(node, "queued", {"text": "x" * size}, {}) for size in (10, 20, 900, 5000, 10)
    ]
    parts = [json.loads(text) for text in payload.arrays(map(plan.encode_row, rows))]
    assert [[len(row["inputs"]["text"]) for row in part] for part in parts] == [
        [10, 20],
        [900],
        [5000],
        [10],
    ]
    assert list(payload.arrays([])) == []
