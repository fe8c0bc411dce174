"""Checked values at their edges: keywords that are left out, nested types, long refusals."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import pathlib
import types
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import payload, typed_values
from tests.support import tabled, typed_app


def keywords(function: Any, *, strict: bool = True) -> typed_values.Keywords:
    parameters = [*inspect.signature(function).parameters.values()]
    return typed_values.Keywords(parameters, globals(), strict=strict)


def plain(a: int, b: str = "x") -> None: ...


def resting(a: int, **rest: str) -> None: ...


def untyped(a, **rest) -> None: ...


def nothing() -> None: ...


def bound(function: Any, given: Any, **more: Any) -> Any:
    return keywords(function, strict=more.pop("strict", True)).bound(given, "it", **more)


def refusal(function: Any, given: Any) -> str:
    with pytest.raises(errors.ArgsRefused) as refused:
        bound(function, given)
    return str(refused.value)


def test_keywords_are_the_given_ones() -> None:
    assert bound(plain, {"a": 1}) == {"a": 1}
    assert bound(plain, {"b": "y", "a": 1}) == {"b": "y", "a": 1}
    assert bound(resting, {"a": 1, "c": "z"}) == {"a": 1, "c": "z"}
    assert bound(untyped, {"a": object, "c": 5}) == {"a": object, "c": 5}
    assert [bool(keywords(each)) for each in (plain, resting, nothing)] == [True, True, False]


def test_unknown_names_are_dropped_where_it_is_not_strict() -> None:
    assert bound(plain, {"a": 1, "c": 2}, strict=False) == {"a": 1}
    assert bound(plain, [1], strict=False) == {}
    assert bound(resting, {"a": 1, "c": "z"}, strict=False) == {"a": 1, "c": "z"}
    with pytest.raises(errors.ArgsRefused, match="it: 'a' missing"):
        bound(plain, {"c": 2}, strict=False)


def test_further_names_may_be_given_and_are_checked() -> None:
    assert bound(plain, {"a": 1, "c": 2}, optional={"c": int}) == {"a": 1, "c": 2}
    with pytest.raises(errors.ArgsRefused, match="it: 'c': int, not 'x'"):
        bound(plain, {"a": 1, "c": "x"}, optional={"c": int})


def test_a_refusal_names_ten_unknown_names() -> None:
    unknown = {f"k{n}": 1 for n in range(10)}
    assert "more" not in refusal(plain, {"a": 1, **unknown})
    said = refusal(plain, {"a": 1, **unknown, "k10": 1, "k11": 1})
    assert "'k9' and 2 more unknown; it takes 'a', 'b'" in said
    assert "k10" not in said
    assert refusal(nothing, {"zz": 1}).endswith("'zz' unknown; it takes nothing")
    assert refusal(plain, {"bb": 1}) == "it: 'a' missing; 'bb' unknown; it takes 'a', 'b'"
    assert refusal(resting, {"c": 5, "a": 1}) == "it: 'c': str, not 5"


def test_a_value_fits_its_name_or_the_name_is_another() -> None:
    assert [keywords(plain).accepts("a", value) for value in (1, "x")] == [True, False]
    assert keywords(plain).accepts("other", object)


@pytest.mark.parametrize(
    ("annotation", "found"),
    [
        (inspect.Parameter.empty, Any), (int, int), ("int", int), ("datetime.date", datetime.date),
        (None, None),
    ],
)  # fmt: skip
def test_an_annotation_is_read_from_its_source(annotation: Any, found: Any) -> None:
    assert typed_values.read(annotation, globals()) is found


class Model:
    """A model of any library."""

    @classmethod
    def model_validate(cls, given: Any) -> Any:
        error: Any = ValueError("no")
        if given == "listed":
            error.errors = lambda: [
                {"loc": ("a", 0), "msg": "bad"}, {"loc": (), "msg": "worse"}, {"msg": "worst"},
            ]  # fmt: skip
        if given == "odd":
            error.errors = "not a function"
        raise error


@dataclasses.dataclass
class Span:
    """A record of the standard library."""

    first: datetime.date
    days: int = 1


def test_a_record_is_a_model_or_a_dataclass() -> None:
    kinds = (Model, Span, Span(datetime.date.min), int, "Model")
    assert [typed_values.is_record(kind) for kind in kinds] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [("x", "it: no"), ("odd", "it: no"), ("listed", "it: a.0: bad; worse; worst")],
)
def test_a_models_complaint_is_told_without_values(given: str, said: str) -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        typed_values.taken(given, Model, "it")
    assert str(refused.value) == said


def test_a_value_that_fits() -> None:
    cases: list[Any] = [
        (pathlib.Path | str, "a", "a"), (float | int, 1, 1), (int | float, 1.5, 1.5),
        (datetime.date | None, "2024-05-01", datetime.date(2024, 5, 1)),
        (datetime.date | str, "x", "x"), (pathlib.PurePosixPath, "a", pathlib.PurePosixPath("a")),
        (tuple[()], [], ()), (tuple[int, ...], [], ()), (tuple[int, ...], (1, 2), (1, 2)),
        (list[int], (1, 2), [1, 2]), (dict[str, int], {}, {}), (frozenset[int], [1], [1]),
        (Callable[[], int], 5, 5), (type[int], 5, 5), (typing.Literal["a", None], None, None),
        (typing.TypeVar("T"), 5, 5), (Decimal, "1", Decimal(1)), (types.NoneType, None, None),
        (bool | int, True, True), (int, 0, 0), (str, "", ""),
    ]  # fmt: skip
    for kind, value, got in cases:
        with tabled.case(kind, value, got):
            found = typed_values.taken(value, kind, "it")
            assert (found, type(found)) == (got, type(got))


def test_a_value_that_does_not_fit_is_named() -> None:
    cases: list[Any] = [
        (tuple[int, str], [1, "a", 2], "it: tuple[int, str], not [1, 'a', 2]"),
        (tuple[int, ...], ["a"], "it[0]: int, not 'a'"),
        (tuple[int, str], [1, 2], "it[1]: str, not 2"),
        (list[int], [1, "a"], "it[1]: int, not 'a'"),
        (dict[str, int], {"k": "a"}, "it['k']: int, not 'a'"),
        (dict[int, str], [1], "it: dict[int, str], not [1]"),
        (list[int], 5, "it: list[int], not 5"),
        (list[int], {"a": 1}, "it: list[int], not {'a': 1}"),
        (Decimal, [1], "it: Decimal, not [1]"),
        (int | None, "x", "it: int | None, not 'x'"), (bool, 1, "it: bool, not 1"),
        (typing.Annotated[int, str], "x", "it: int, not 'x'"),
        (Decimal, Decimal(1), "it: Decimal, not Decimal('1')"),
        (typing.Optional[int], "x", "it: Optional[int], not 'x'"),  # noqa: UP045
        (typing.Literal[1], True, "it: Literal[1], not True"), (int, True, "it: int, not True"),
        (typing.Literal[1, 2], 1.0, "it: Literal[1, 2], not 1.0"),
        (types.NoneType, 0, "it: NoneType, not 0"),
        (pathlib.Path, 5, "it: Path, not 5"), (datetime.date, "x", "it: date, not 'x'"),
    ]  # fmt: skip
    for kind, value, said in cases:
        with tabled.case(kind, value, said):
            with pytest.raises(errors.ArgsRefused) as refused:
                typed_values.taken(value, kind, "it")
            assert str(refused.value) == said


def test_a_long_value_is_cut_after_two_hundred_characters() -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        typed_values.taken("x" * 300, int, "it")
    assert str(refused.value) == f"it: int, not '{'x' * 199}"


def test_what_is_refused_is_checked_once_more_as_it_is_stored() -> None:
    seen: list[Any] = []

    def check(given: Any, where: str) -> None:
        seen.append(given)
        typed_values.taken(given, datetime.date, where)

    typed_values.check_as_stored(check, datetime.date(2024, 5, 1), "it")
    typed_values.check_as_stored(check, "2024-05-01", "it")
    assert seen == [datetime.date(2024, 5, 1), "2024-05-01", "2024-05-01"]
    with pytest.raises(errors.ArgsRefused, match="it: date, not 5"):
        typed_values.check_as_stored(check, 5, "it")
    assert seen[3:] == [5]


def test_each_documented_type_is_stored_and_comes_back() -> None:
    for name, case in typed_app.CASES.items():
        with tabled.case(name):
            function = typed_app.taking({"x": case.annotation}, "...")
            kind = typed_values.read(
                inspect.signature(function).parameters["x"].annotation, scope(function)
            )
            assert payload.plain(typed_app.GIVEN[name], "it") == case.stored
            found = typed_values.taken(case.stored, kind, "it")
            assert (found, type(found)) == (case.value, type(case.value))
            assert typed_values.unfit(kind) is None


@pytest.mark.parametrize("name", typed_app.NEVER)
def test_each_annotation_that_no_input_can_have_is_known(name: str) -> None:
    function = typed_app.taking({"x": typed_app.NEVER[name]}, "...")
    kind = typed_values.read(
        inspect.signature(function).parameters["x"].annotation, scope(function)
    )
    assert typed_values.unfit(kind) is not None


def scope(function: Any) -> dict[str, Any]:
    return function.__globals__


class Shy(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise OSError


@dataclasses.dataclass
class Failing:
    what: str

    def __post_init__(self) -> None:
        raise {"shy": Shy(), "exit": SystemExit("a\nb"), "value": ValueError("v")}[self.what]


@pytest.mark.parametrize(
    ("what", "said"),
    [("shy", "Shy"), ("exit", "SystemExit: a b"), ("value", "v"), ("other", "KeyError: 'other'")],
)
def test_whatever_an_app_raises_is_a_refusal(what: str, said: str) -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        typed_values.taken({"what": what}, Failing, "it")
    assert str(refused.value) == f"it: {said}"


def handler(
    out: Any, a: int, b: pathlib.Path | None = None, *, d: str = "d", **rest: int
) -> None: ...


def test_a_handler_gets_its_inputs_by_name_and_what_it_is_offered() -> None:
    signature = typed_values.signature(handler)
    assert typed_values.signature(handler) is signature
    assert (signature.names, signature.defaulted) == (("out", "a", "b", "d"), {"b", "d"})
    assert (signature.takes_rest, signature.paths) == (True, {"b"})
    offers = {"out": lambda: "engine's", "a": lambda: "offer", "unknown": lambda: 1}
    bound = signature.bind({"out": 1, "a": "2", "b": "f", "d": None, "e": 5}, offers)
    assert bound == {"out": "engine's", "a": "2", "b": pathlib.Path("f"), "e": 5}
    assert signature.bind({"d": "x"}, {}) == {"d": "x"}
    assert signature.bind({"out": 1}, offers) == {"out": "engine's", "a": "offer"}


def test_inputs_are_converted_where_errors_have_a_place() -> None:
    signature = typed_values.signature(handler)
    given = {"a": 2, "b": "f", "d": None, "e": 5}
    assert signature.bind(given, {}, where="here") == {"a": 2, "b": pathlib.Path("f"), "e": 5}
    for name, value in (("a", "2"), ("e", "x"), ("a", None)):
        with pytest.raises(errors.ArgsRefused, match=f"here: '{name}'"):
            signature.bind({"a": 1, name: value}, {}, where="here")


@pytest.mark.parametrize(
    ("annotation", "is_path"),
    [
        (pathlib.Path, True), (pathlib.PurePosixPath, True), (pathlib.Path | None, True),
        ("pathlib.Path", True), ("Path", True), ("Unknown | Path", True),
        ("Optional[Path]", True), ("Optional['Path']", True), ("typing.Union[Path, X]", True),
        (str, False), ("Unknown", False), ("list[Path]", False), (list[pathlib.Path], False),
        (Any, False),
    ],
)  # fmt: skip
def test_a_text_becomes_a_path_for_an_annotation_that_says_so(
    annotation: Any, is_path: bool
) -> None:
    def one(x: Any) -> None: ...

    one.__annotations__["x"] = annotation
    found = typed_values.Signature(one).bind({"x": "f"}, {})
    assert found == {"x": pathlib.Path("f") if is_path else "f"}


def test_a_callable_that_cannot_be_hashed_has_a_signature() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, a: int) -> None: ...

    assert typed_values.signature(Unhashable()).names == ("a",)
