"""Check JSON values against annotations, and convert them to what a handler expects."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from queue_workflows import errors
from queue_workflows.dag import jsonable, key_names

_PLAIN: dict[type, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    dict: (dict,),
    list: (list, tuple),
    type(None): (type(None),),
}
"""The types that JSON has, and their Python types; a bool is not a number."""
_SHOWN = 200
_NAMED = 10
"""The most unknown names in an error, since a row may have a million."""


def read(annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Return the annotation of a source text; `Any` if it is empty."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        # The text is the app's own source, evaluated as `typing.get_type_hints` does.
        return eval(annotation, dict(scope))  # noqa: S307
    except Exception:  # noqa: BLE001  a name that only a type checker knows
        return Any


def is_record(kind: Any) -> bool:
    """Return whether it stands for a whole dict: a model (`model_validate`) or a dataclass."""
    return isinstance(kind, type) and (
        hasattr(kind, "model_validate") or dataclasses.is_dataclass(kind)
    )


class Keywords:
    """Parameters that take values by name; falsy without any.

    `strict`: an unknown name is refused unless `**rest` takes it; otherwise it is dropped, and so
    is a value that has no names.
    """

    def __init__(
        self,
        parameters: Sequence[inspect.Parameter],
        scope: Mapping[str, Any],
        *,
        strict: bool = True,
    ) -> None:
        self._strict = strict
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._kinds = {p.name: read(p.annotation, scope) for p in named}
        self._needed = [p.name for p in named if p.default is p.empty]
        rest = [read(p.annotation, scope) for p in parameters if p.kind is p.VAR_KEYWORD]
        self._rest = rest[0] if rest else None
        self._takes_rest = bool(rest)

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def bound(
        self, given: Any, where: str, optional: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the keywords; raise `ArgsRefused` that starts with `where`.

        It names missing and unknown keys (with the closest known name) and wrong types. `optional`:
        further names that may be given, with their annotations.
        """
        if not isinstance(given, dict):
            if not self._strict:
                return {}
            raise errors.ArgsRefused(f"{where}: a dict, not {type(given).__name__}")
        given = cast("dict[str, Any]", given)
        kinds = {**self._kinds, **optional} if optional else self._kinds
        self._refuse_names(given, kinds, where)
        return {
            name: taken(value, kinds.get(name, self._rest), f"{where}: {name!r}")
            for name, value in given.items()
            if name in kinds or self._takes_rest
        }

    def _refuse_names(self, given: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
        missing = [name for name in self._needed if name not in given]
        unknown: list[str] = []
        if self._strict and not self._takes_rest:
            unknown = [name for name in given if name not in kinds]
        reasons = [f"{_listed(missing)} missing"] if missing else []
        if unknown:
            names = ", ".join(
                f"{name!r:.80}{_suggestion(name, kinds)}" for name in unknown[:_NAMED]
            )
            if len(unknown) > _NAMED:
                names += f" and {len(unknown) - _NAMED} more"
            reasons.append(f"{names} unknown; it takes {_listed([*kinds]) or 'nothing'}")
        if reasons:
            raise errors.ArgsRefused(f"{where}: {'; '.join(reasons)}")

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether the value fits the annotation of this name; True for another name."""
        try:
            taken(value, self._kinds.get(name, Any), name)
        except errors.ArgsRefused:
            return False
        return True


def check_as_stored(check: Callable[[Any, str], object], given: Any, where: str) -> None:
    """Call `check(given, where)`; if it refuses, check the values as JSON stores them.

    So a date, a path or a dataclass may be given for a parameter with that annotation. Raises
    `ArgsRefused`, and `InvalidPayload` for what JSON cannot represent.
    """
    try:
        check(given, where)
    except errors.ArgsRefused:
        stored = jsonable.plain(given, where)
        if stored == given:
            raise
    else:
        return
    check(stored, where)


def _suggestion(name: str, known: Iterable[str]) -> str:
    meant = key_names.closest(name, known)
    return f" (did you mean {meant!r}?)" if meant else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def taken(value: Any, kind: Any, where: str) -> Any:
    """Return what a handler gets for a JSON value; raise `ArgsRefused` if it does not fit.

    Paths, dates, times, UUIDs, Decimals, enum members, tuples, dataclasses and models are
    converted. Any other annotation takes any value. The error starts with `where`.
    """
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return taken(value, typing.get_args(kind)[0], where)
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, typing.get_args(kind), kind, where)
    if origin is typing.Literal:
        if not any(type(value) is type(one) and value == one for one in typing.get_args(kind)):
            raise _refused(value, kind, where)
        return value
    if origin is not None:
        return _filled(value, origin, typing.get_args(kind), kind, where)
    kind = type(None) if kind is None else kind
    if not isinstance(kind, type):
        return value
    if kind not in _PLAIN:
        return _made(value, kind, where)
    if not isinstance(value, _PLAIN[kind]) or (isinstance(value, bool) and kind is not bool):
        raise _refused(value, kind, where)
    return value


def _any_of(value: Any, kinds: Sequence[Any], kind: Any, where: str) -> Any:
    # A text for `Path | str` stays a text, and 1 for `float | int` stays 1.
    for one in sorted(kinds, key=lambda each: each not in _PLAIN):
        try:
            return taken(value, one, where)
        except errors.ArgsRefused:
            continue
    raise _refused(value, kind, where)


def _filled(value: Any, origin: Any, inner: Sequence[Any], kind: Any, where: str) -> Any:
    """Return a list, tuple or dict with converted members."""
    if not isinstance(origin, type):
        return value
    if issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _refused(value, kind, where)
        members = cast("dict[str, Any]", value)
        return {key: taken(each, inner[-1], f"{where}[{key!r}]") for key, each in members.items()}
    if not issubclass(origin, Sequence):
        return value
    if not isinstance(value, (list, tuple)):
        raise _refused(value, kind, where)
    listed = [*cast("Sequence[Any]", value)]
    if origin is not tuple:
        return [taken(each, inner[0], f"{where}[{n}]") for n, each in enumerate(listed)]
    kinds = [inner[0]] * len(listed) if inner[-1:] == (...,) else list(inner)
    if len(kinds) != len(listed):
        raise _refused(value, kind, where)
    pairs = enumerate(zip(listed, kinds, strict=True))
    return tuple(taken(each, one, f"{where}[{n}]") for n, (each, one) in pairs)


def _made(value: Any, kind: type, where: str) -> Any:
    """Return a value of a class that JSON cannot represent."""
    if is_record(kind):
        return _record(value, kind, where)
    if issubclass(kind, pathlib.PurePath):
        make: Callable[[Any], Any] = pathlib.Path if kind is pathlib.Path else kind
    elif issubclass(kind, enum.Enum):
        return _converted(value, kind, kind, where)
    elif issubclass(kind, (datetime.date, datetime.time)):
        make = kind.fromisoformat
    elif issubclass(kind, uuid.UUID):
        make = kind
    elif issubclass(kind, decimal.Decimal):
        return _decimal(value, kind, where)
    else:
        return value
    if not isinstance(value, str):
        raise _refused(value, kind, where)
    return _converted(value, make, kind, where)


def _decimal(value: Any, kind: type[decimal.Decimal], where: str) -> decimal.Decimal:
    """Return the number that a text or a JSON number writes."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _refused(value, kind, where)
    try:
        return kind(str(value))
    except (decimal.InvalidOperation, ValueError):
        raise _refused(value, kind, where) from None


def _converted(value: Any, make: Callable[[Any], Any], kind: Any, where: str) -> Any:
    try:
        return make(value)
    except ValueError:
        raise _refused(value, kind, where) from None


def _record(value: Any, kind: Any, where: str) -> Any:
    if hasattr(kind, "model_validate"):
        try:
            return kind.model_validate(value)
        except (ValueError, TypeError) as error:
            raise errors.ArgsRefused(f"{where}: {_model_error(error)}") from error
    scope = getattr(inspect.getmodule(kind), "__dict__", {})
    fields = Keywords(list(inspect.signature(kind).parameters.values()), scope)
    return kind(**fields.bound(value, where))


def _model_error(error: Exception) -> str:
    """Return a model's complaint; if it lists errors as pydantic does, without values: secrets."""
    listed = getattr(error, "errors", None)
    if not callable(listed):
        return str(error)
    complaints: list[str] = []
    for each in cast("list[dict[str, Any]]", listed()):
        place = ".".join(map(str, each.get("loc", ())))
        complaints.append(f"{place}: {each.get('msg')}" if place else str(each.get("msg")))
    return "; ".join(complaints)


def _refused(value: Any, kind: Any, where: str) -> errors.ArgsRefused:
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return errors.ArgsRefused(f"{where}: {name}, not {repr(value)[:_SHOWN]}")
