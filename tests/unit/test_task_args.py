"""What a task takes of its job's args: shapes, models, keywords, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pydantic
import pytest

import queue_workflows
from queue_workflows import errors, tasks
from tests.support import tabled, task_calls
from tests.support.task_calls import called

Row = dict[str, Any]


class Order(pydantic.BaseModel):
    day: datetime.date
    rows: int = 10


@dataclasses.dataclass
class Span:
    first: datetime.date
    days: int = 1


class Colour(enum.Enum):
    RED = "red"


def model_alone(order: Order) -> Any:
    return order


def model_as_args(reason: str, args: Order) -> Any:
    return args


def record(span: Span) -> Any:
    return span


def keywords(*, day: str, limit: int = 10) -> Any:
    return {"day": day, "limit": limit}


def reason_and_keywords(reason: str, *, day: str) -> Any:
    return {"reason": reason, "day": day}


def rest(*, day: str, **others: int) -> Any:
    return {"day": day, **others}


def injected(reason: str, *, client: Any = "its own") -> Any:
    return [reason, client]


def both_and_keyword(reason: str, args: Row, *, client: Any = "its own") -> Any:
    return [reason, args, client]


DAY = datetime.date(2026, 3, 1)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def test_a_task_gets_the_model_or_the_keywords_that_it_takes() -> None:
    cases: list[Any] = [
        (model_alone, {"day": "2026-03-01"}, Order(day=DAY)),
        (model_as_args, {"day": "2026-03-01", "rows": 3}, Order(day=DAY, rows=3)),
        (record, {"first": "2026-03-01"}, Span(DAY)),
        (keywords, {"day": "x"}, {"day": "x", "limit": 10}),
        (reason_and_keywords, {"day": "x"}, {"reason": "boot", "day": "x"}),
        (rest, {"day": "x", "n": 1}, {"day": "x", "n": 1}),
        (injected, {"unasked": 1}, ["boot", "its own"]),
        (both_and_keyword, {"client": 1}, ["boot", {"client": 1}, "its own"]),
    ]
    for task, args, got in cases:
        with tabled.case(task, args, got):
            assert called(task, args) == got


def test_what_a_task_does_not_take_is_refused_and_named() -> None:
    cases: list[Any] = [
        (model_alone, {}, "day"),
        (model_as_args, {"day": "2026-03-01", "rows": "many"}, "rows"),
        (record, {"first": "yesterday"}, "args of task 't': 'first': date, not 'yesterday'"),
        (record, {}, "args of task 't': 'first' missing"),
        (keywords, {}, "args of task 't': 'day' missing"),
        (keywords, {"dya": "x"}, "'day' missing; 'dya' unknown; it takes 'day', 'limit'"),
        (keywords, {"day": 1}, "args of task 't': 'day': str, not 1"),
        (
            keywords,
            {"day": "x", "limt": 1},
            "args of task 't': 'limt' (did you mean 'limit'?) unknown; it takes 'day', 'limit'",
        ),
        (keywords, ["day"], "args of task 't': a dict, not list"),
        (rest, {"day": "x", "n": "one"}, "args of task 't': 'n': int, not 'one'"),
    ]
    for task, args, words in cases:
        with tabled.case(task, args, words):
            with pytest.raises(errors.ArgsRefused) as refused:
                called(task, args)
            assert words in str(refused.value)


def test_a_value_that_fits_its_annotation() -> None:
    cases: list[Any] = [
        (int, 3, 3),
        (float, 3, 3),
        (bool, True, True),
        (None, None, None),
        (list, [1], [1]),
        (list, (1,), (1,)),
        (dict, {"a": 1}, {"a": 1}),
        (Any, object, object),
        (Optional[int], None, None),  # noqa: UP045
        (int | None, 3, 3),
        (Union[Path, str], "a/b", "a/b"),  # noqa: UP007
        (Path | None, "a/b", Path("a/b")),
        (Literal["a", 1], 1, 1),
        (Annotated[int, "rows"], 3, 3),
        (list[int], [1, 2], [1, 2]),
        (Sequence[Path], ["a"], [Path("a")]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (dict[str, datetime.date], {"a": "2026-03-01"}, {"a": DAY}),
        (Mapping[str, list[int]], {"a": [1]}, {"a": [1]}),
        (datetime.datetime, "2026-03-01T10:00:00", datetime.datetime(2026, 3, 1, 10)),
        (datetime.time, "10:30:00", datetime.time(10, 30)),
        (uuid.UUID, str(ID), ID),
        (Decimal, "1.10", Decimal("1.10")),
        (Decimal, 3, Decimal(3)),
        (Decimal | None, "1.10", Decimal("1.10")),
        (Colour, "red", Colour.RED),
        (list[Span], [{"first": "2026-03-01"}], [Span(DAY)]),
        (set[int], [1], [1]),
        (object, 3, 3),
        ("a text", 3, 3),
    ]
    for kind, value, got in cases:
        with tabled.case(kind, value, got):
            made = task_calls.taken(value, kind, "x")
            assert (type(made), made) == (type(got), got)


def test_a_value_that_does_not() -> None:
    cases: list[Any] = [
        (int, 3.5),
        (int, True),
        (float, True),
        (float, "3"),
        (bool, 1),
        (str, None),
        (None, 0),
        (int | None, "x"),
        (Literal["a", 1], True),
        (Literal["a"], "b"),
        (list[int], [1, "2"]),
        (list[int], "12"),
        (tuple[int, str], [1]),
        (dict[str, int], {"a": "b"}),
        (dict[str, int], []),
        (Path, 3),
        (datetime.date, "2026-13-01"),
        (datetime.date, 20260301),
        (Colour, "blue"),
        (uuid.UUID, "no"),
        (uuid.UUID, 5),
        (Decimal, "1,5"),
        (Decimal, True),
        (Decimal, 1.5),
        (Decimal, None),
        (datetime.time, "soon"),
        (Span, 3),
        (list[Span], [{"first": "2026-03-01", "more": 1}]),
    ]
    for kind, value in cases:
        with tabled.case(kind, value), pytest.raises(errors.ArgsRefused, match=r"^x"):
            task_calls.taken(value, kind, "x")


def test_an_annotation_that_only_a_type_checker_knows_takes_anything() -> None:
    def task(*, day: NotHere, limit: int) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return [day, limit]

    assert called(task, {"day": object, "limit": 3}) == [object, 3]
    with pytest.raises(errors.ArgsRefused):
        called(task, {"day": 1, "limit": "x"})


def test_a_typed_parameter_gets_back_what_was_encoded() -> None:
    cases: list[Any] = [
        (datetime.date, DAY),
        (datetime.datetime, datetime.datetime(2026, 3, 1, 10, 0, 0, 5, datetime.timezone.utc)),
        (datetime.time, datetime.time(10, 30)),
        (uuid.UUID, ID),
        (Decimal, Decimal("1.10")),
        (Path, Path("a/b")),
        (Colour, Colour.RED),
        (Span, Span(DAY, 3)),
        (Order, Order(day=DAY, rows=3)),
        (dict[str, list[Span]], {"a": [Span(DAY)]}),
        (tuple[uuid.UUID, ...], (ID, ID)),
    ]
    for kind, value in cases:
        with tabled.case(kind, value):
            stored = task_calls.stored(value)
            made = task_calls.taken(stored, kind, "x")
            assert (type(made), made) == (type(value), value)


# --- at enqueue -------------------------------------------------------------------------------


def test_args_are_checked_and_given_back_as_they_are_stored() -> None:
    queue_workflows.register_ingest_task("t", model_alone)
    assert tasks.check_args("t", {"day": "2026-03-01"}) == {"day": "2026-03-01"}
    assert tasks.check_args("t", Order(day=DAY)) == {"day": "2026-03-01", "rows": 10}
    with pytest.raises(errors.ArgsRefused, match="args of task 't': day: Field req") as refused:
        tasks.check_args("t", {"rows": 3})
    assert isinstance(refused.value, ValueError)


def test_args_may_be_what_their_parameters_are() -> None:
    def task(*, day: datetime.date, price: Decimal, spans: list[Span]) -> None: ...

    queue_workflows.register_ingest_task("t", task)
    given = {"day": DAY, "price": Decimal("1.10"), "spans": [Span(DAY)]}
    assert tasks.check_args("t", given) == given
    with pytest.raises(errors.ArgsRefused, match="'price': Decimal, not '2026-03-01'"):
        tasks.check_args("t", given | {"price": DAY})
    queue_workflows.register_ingest_task("r", record)
    assert tasks.check_args("r", Span(DAY)) == {"first": "2026-03-01", "days": 1}


def test_args_of_a_task_that_is_not_known_here_are_taken() -> None:
    assert tasks.check_args("elsewhere", {"a": 1}) == {"a": 1}


def test_args_are_a_dict() -> None:
    with pytest.raises(errors.ArgsRefused, match="a dict, not list"):
        tasks.check_args("t", [1])


def test_a_model_of_any_library_will_do() -> None:
    class Model:
        def __init__(self, given: Row) -> None:
            self.given = given

        @classmethod
        def model_validate(cls, given: Row) -> Model:
            if "day" not in given:
                raise TypeError("no day")
            return cls(given)

    def task(args: Model) -> Any:
        return args.given

    task.__annotations__["args"] = Model
    assert called(task, {"day": 1}) == {"day": 1}
    with pytest.raises(errors.ArgsRefused, match="args of task 't': no day"):
        called(task, {})


# --- registering ------------------------------------------------------------------------------


def test_the_decorator_gives_the_function_back() -> None:
    @queue_workflows.register_ingest_task("t", queue="load", retries=2)
    def task(reason: str) -> str:
        return reason

    assert task("boot") == "boot"
    assert queue_workflows.get_config().ingest_task_map == {"t": task}


def test_a_new_row_takes_of_its_task_what_the_enqueuer_does_not_say() -> None:
    queue_workflows.register_ingest_task(
        "t", keywords, queue="load", priority=5, lock_key="one", max_attempts=3, timeout_s=9
    )
    assert tasks.row_defaults("t") == {"queue": "load", "priority": 5, "lock_key": "one"}
    assert tasks.row_defaults("other") == {}


def test_a_task_that_is_registered_again_loses_its_policy() -> None:
    queue_workflows.register_ingest_task("t", keywords, queue="load", retries=2)
    queue_workflows.register_ingest_task("t", keywords)
    assert tasks.row_defaults("t") == {}
    assert queue_workflows.get_config().ingest_task_policies["t"] == {}


def test_a_policy_that_cannot_be_is_refused_and_nothing_registered() -> None:
    cases: list[Any] = [
        ({"retry": 1}, "unknown option 'retry'; known are"),
        ({"retries": -1}, "'retries' must be 0 to 1000"),
        ({"retries": 1, "max_attempts": 2}, "max_attempts is retries + 1"),
        ({"max_attempts": 0}, "max_attempts must be 1 or more"),
        ({"max_attempts": True}, "max_attempts must be 1 or more"),
        ({"max_attempts": 5000}, "'retries' must be 0 to 1000"),
        ({"backoff": {"kind": "slow"}}, "unknown kind 'slow'"),
        ({"timeout_s": 0}, "'timeout_s'"),
        ({"retry_on": ["no name"]}, "names of exceptions"),
        ({"priority": 40000}, "'priority'"),
        ({"queue": "cpu"}, "queue cpu belongs to workflow nodes"),
        ({"queue": "no queue"}, "is not a queue name"),
        ({"queue": 3}, "is not a queue name"),
        ({"callable_": "text"}, "is not callable"),
    ]
    for said, words in cases:
        with tabled.case(said, words):
            with pytest.raises(errors.InvalidConfig, match="ingest task 't'") as refused:
                queue_workflows.register_ingest_task("t", **{"callable_": keywords, **said})
            assert words in str(refused.value)
            assert "t" not in queue_workflows.get_config().ingest_task_map


def test_a_million_unknown_names_cost_no_more_than_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def close(name: str, *_: object, **__: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", close)
    given = dict.fromkeys([*(f"k{n}" for n in range(1_000_000)), "day"], 1)
    with pytest.raises(errors.ArgsRefused, match=r"'k9' and 999990 more unknown; it takes 'day'$"):
        task_calls.bound(given, "day")
    assert compared == [f"k{n}" for n in range(10)]


def test_a_name_of_megabytes_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: pytest.fail("did"))
    with pytest.raises(errors.ArgsRefused, match="unknown; it takes 'day'"):
        task_calls.bound({"day": 1, "d" * 4_000_000: 1}, "day")


def test_a_task_that_drops_args_drops_those_that_are_no_object() -> None:
    def told(reason: str, *, client: str = "none") -> tuple[str, str]:
        return reason, client

    for given in ([1, 2], "text", 5):
        assert called(told, given) == ("boot", "none")


class Named(TypedDict):
    day: str


def named_payload(payload: Row) -> Any:
    return payload


def mapping(given: Mapping[str, int]) -> Any:
    return given


def typed_dict(given: Named) -> Any:
    return given


def maybe_dict(given: dict[str, Any] | None = None) -> Any:
    return given


def maybe_model(order: Order | None) -> Any:
    return order


def annotated_model(order: Annotated[Order, "of a day"]) -> Any:
    return order


def args_first(args: Row, reason: str) -> Any:
    return {"args": args, "reason": reason}


def payload_first(payload: Row, why: str) -> Any:
    return {"args": payload, "reason": why}


def payload_and_more(payload: Row, dry_run: bool = False) -> Any:
    return {"args": payload, "dry_run": dry_run}


def args_and_more(args: Any, dry_run: bool = False) -> Any:
    return {"args": args, "dry_run": dry_run}


def payload_and_options(payload: Row, options: Row | None = None) -> Any:
    return {"args": payload, "options": options}


def model_and_more(order: Order, dry_run: bool = False) -> Any:
    return {"args": order, "dry_run": dry_run}


def payload_and_reason(payload: Row, reason: str = "none") -> Any:
    return {"args": payload, "reason": reason}


def two_dicts(reason: Row, args: Row) -> Any:
    return {"args": args, "reason": reason}


def text(why: str) -> Any:
    return why


def a_reason_of(reason: Mapping[str, int]) -> Any:
    return reason


def test_the_args_are_bound_by_annotation() -> None:
    cases: list[Any] = [
        (named_payload, {"day": "2026-03-01"}),
        (mapping, {"day": "2026-03-01"}),
        (typed_dict, {"day": "2026-03-01"}),
        (maybe_dict, {"day": "2026-03-01"}),
        (maybe_model, Order(day=DAY)),
        (annotated_model, Order(day=DAY)),
        (args_first, {"args": {"day": "2026-03-01"}, "reason": "boot"}),
        (payload_first, {"args": {"day": "2026-03-01"}, "reason": "boot"}),
        (payload_and_more, {"args": {"day": "2026-03-01"}, "dry_run": False}),
        (args_and_more, {"args": {"day": "2026-03-01"}, "dry_run": False}),
        (payload_and_options, {"args": {"day": "2026-03-01"}, "options": None}),
        (model_and_more, {"args": Order(day=DAY), "dry_run": False}),
        (payload_and_reason, {"args": {"day": "2026-03-01"}, "reason": "boot"}),
        (two_dicts, {"args": {"day": "2026-03-01"}, "reason": "boot"}),
        (text, "boot"),
        (a_reason_of, "boot"),
    ]
    for task, got in cases:
        with tabled.case(task, got):
            assert called(task, {"day": "2026-03-01"}) == got


def day_alone(day: str) -> None:
    """Take the reason, which its author did not mean."""


def source_and_args(source: Any, args: Any) -> None:
    """Take the reason and the args under other names than contract and docs have."""


def context_and_payload(context: Any, payload: Any) -> None:
    """The same, with no name that says so."""


def payload_and_source(payload: Row, source: Any) -> None:
    """The same in the other order."""


def anything(what: Any) -> None:
    """Take the reason; apps of 0.3.0 have such tasks, whose jobs may have args."""


def test_an_arg_that_its_parameter_would_not_get_is_refused() -> None:
    queue_workflows.register_ingest_task("load", day_alone)
    with pytest.raises(errors.ArgsRefused, match=r"parameter 'day' gets the job's reason; name it"):
        tasks.check_args("load", {"day": "2026-03-01", "limit": 1})
    assert tasks.check_args("load", {"other": 1}) == {"other": 1}


@pytest.mark.parametrize("task", [source_and_args, context_and_payload, payload_and_source])
def test_no_arg_is_refused_if_a_parameter_takes_all_of_them(task: Any) -> None:
    queue_workflows.register_ingest_task("load", task)
    given = {"source": 1, "context": 2}
    assert tasks.check_args("load", given) == given


def test_args_that_a_task_does_not_read_are_refused_where_0_3_0_did_not_queue_jobs() -> None:
    queue_workflows.register_ingest_task("load", anything)
    assert tasks.check_args("load", {"other": 1}) == {"other": 1}
    task_calls.refuse_dropped("load", {})
    task_calls.refuse_dropped("unknown", {"other": 1})
    with pytest.raises(errors.ArgsRefused, match="parameter 'what' gets the job's reason"):
        task_calls.refuse_dropped("load", {"other": 1})
