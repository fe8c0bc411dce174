"""Check JSON values against annotations, convert them, and bind them to a handler's parameters."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import itertools
import pathlib
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.runtime import masking

_PLAIN: dict[type, tuple[type, ...]] = {
    str: (str,), bool: (bool,), int: (int,), float: (int, float), dict: (dict,),
    list: (list, tuple), type(None): (type(None),),
}  # fmt: skip
"""The types that JSON has, and their Python types; a bool is not a number."""
_SHOWN = 200
_QUOTED = re.compile("'([^']*)'")
_NAMED = 10
"""The most unknown names in an error, since a row may have a million."""
_TEXTS = (pathlib.PurePath, enum.Enum, datetime.date, datetime.time, uuid.UUID, decimal.Decimal)
"""The classes whose values are stored as JSON values of another type, as `payload.plain` does."""
_MAPPINGS = (dict, Mapping, MutableMapping)
"""The annotations of a JSON object with members of one type."""
_WITHOUT_FRACTION = 10**16
"""The least float that is written in JSON as `1e+16`; jsonb makes it a whole number."""
_SAMPLES: tuple[Any, ...] = ("", 0, 0.5, True, None, [], {})
"""A value of each type that JSON has."""
_UNIONS = (typing.Union, types.UnionType)
"""The origins of `A | B` and `Optional[A]`."""
_PRESENCE = ("Required", "NotRequired", "ReadOnly")
"""The qualifiers of a key of a `TypedDict`."""
ENGINE_OBJECTS = frozenset({"out", "inputs", "model_handle", "cancel_event", "status_callback"})
"""Parameters for which a handler always gets the engine's object, even if an input has the name."""
_NAMES_PATH = re.compile(r"(?:\w+\.)*Path")
_FORWARD = re.compile(r"""ForwardRef\('([^']*)'[^)]*\)|['"]""")


class Unread(NamedTuple):
    """An annotation that the running program cannot evaluate, and why."""

    text: str
    reason: str


def read(annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Return an annotation with its names evaluated, `Any` for a missing one, or `Unread`."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return _evaluated(annotation, dict(scope))
    except Exception as error:  # noqa: BLE001  a name that only a type checker knows
        text = annotation if isinstance(annotation, str) else repr(annotation)
        return Unread(text, f"{type(error).__name__}: {error}")


def _evaluated(kind: Any, scope: dict[str, Any]) -> Any:
    if isinstance(kind, typing.ForwardRef):
        module = sys.modules.get(str(getattr(kind, "__forward_module__", None)))
        scope, kind = {**scope, **vars(module)} if module else scope, kind.__forward_arg__
    if isinstance(kind, str):
        # The text is the app's own source, evaluated as `typing.get_type_hints` does.
        return _evaluated(eval(kind, scope), scope)  # noqa: S307
    origin: Any = typing.get_origin(kind)
    members = typing.get_args(kind)
    if origin is typing.Annotated:
        return _evaluated(members[0], scope)
    if not members or origin is typing.Literal:
        return kind
    inner = tuple(_evaluated(member, scope) for member in members)
    if all(new is old for new, old in zip(inner, members, strict=True)):
        return kind
    if origin in _UNIONS:
        return typing.Union[inner]  # noqa: UP007
    return origin[inner[0] if _presence(origin) else inner]


def _presence(origin: Any) -> str | None:
    """Return `NotRequired` or its like for the origin of an annotation; None for another."""
    name = getattr(origin, "_name", None)
    return name if name in _PRESENCE else None


def _unwrapped(kind: Any) -> Any:
    """Return an annotation without its wrappers: a NewType, an alias, `Required`, `InitVar`."""
    while True:
        origin = typing.get_origin(kind)
        if origin is typing.Annotated or _presence(origin):
            kind = typing.get_args(kind)[0]
        elif type(kind).__name__ == "InitVar":
            kind = kind.type
        elif type(kind).__name__ == "TypeAliasType":
            kind = kind.__value__
        elif hasattr(kind, "__supertype__"):
            kind = kind.__supertype__
        elif kind is None:
            return type(None)
        elif not isinstance(kind, type) and not hasattr(kind, "__args__"):
            return typing.get_origin(kind) or kind  # `typing.List` stands for `list`
        else:
            return kind


def _name(kind: Any) -> str:
    """Return an annotation as its source writes it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def is_record(kind: Any) -> bool:
    """Return whether the type is a model (it has `model_validate`) or a dataclass."""
    return isinstance(kind, type) and (
        hasattr(kind, "model_validate") or dataclasses.is_dataclass(kind)
    )


class Keywords:
    """Parameters that take values by name; falsy without parameters.

    If `strict`, an unknown name is refused unless `**rest` takes it. Otherwise unknown names, and
    values that are not objects, are dropped.
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
        self._rest, self.takes_rest = rest[0] if rest else Any, bool(rest)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the annotations of the parameters."""
        return (*self._kinds.values(), *([self._rest] if self.takes_rest else []))

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def bound(
        self, given: Any, where: str, optional: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the keywords; raise `ArgsRefused` that starts with `where`.

        Its text names missing keys, unknown keys with the closest known name, and wrong types.
        `optional` has further names that may be given, with their annotations.
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
            if name in kinds or self.takes_rest
        }

    def _refuse_names(self, given: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
        missing = [name for name in self._needed if name not in given]
        unknown: list[str] = []
        if self._strict and not self.takes_rest:
            unknown = [name for name in given if name not in kinds]
        reasons = [f"{_listed(missing)} missing"] if missing else []
        if unknown:
            names = ", ".join(map(_suggestion, unknown[:_NAMED], itertools.repeat(kinds)))
            if len(unknown) > _NAMED:
                names += f" and {len(unknown) - _NAMED} more"
            reasons.append(f"{names} unknown; it takes {_listed([*kinds]) or 'nothing'}")
        if reasons:
            raise errors.ArgsRefused(f"{where}: {'; '.join(reasons)}")

    def accepts(self, name: str, value: Any, optional: Mapping[str, Any] | None = None) -> bool:
        """Return whether the value fits the annotation of this name; True for an unknown name."""
        try:
            taken(value, {**(optional or {}), **self._kinds}.get(name, Any), name)
        except errors.ArgsRefused:
            return False
        return True


def check_as_stored(check: Callable[[Any, str], object], given: Any, where: str) -> None:
    """Call `check(given, where)`; if it refuses, check the values as JSON stores them.

    So a date, a path or a dataclass may be given for a parameter with that annotation. Raises
    `ArgsRefused`, or `InvalidPayload` for values that JSON cannot represent.
    """
    try:
        check(given, where)
    except errors.ArgsRefused:
        stored = payload.plain(given, where)
        if stored == given:
            raise
    else:
        return
    check(stored, where)


def _suggestion(name: str, known: Iterable[str]) -> str:
    meant = errors.closest(name, known)
    return f"{name!r:.80} (did you mean {meant!r}?)" if meant else f"{name!r:.80}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def taken(value: Any, kind: Any, where: str) -> Any:
    """Return a JSON value converted for a handler; raise `ArgsRefused` if it does not fit.

    Paths, dates, times, UUIDs, Decimals, enum members, tuples, named tuples, dataclasses and models
    are converted, also inside of lists, dicts and `TypedDict`s; any other annotation takes any
    value. The error starts with `where`. Errors of the app's code count as refusals, too.
    """
    try:
        return _taken(value, kind, where)
    except errors.ArgsRefused:
        raise
    except (Exception, SystemExit) as error:
        said = type(error).__name__ if _is_secret(where) else _described(error)
        raise errors.ArgsRefused(f"{where}{' is refused' * _is_secret(where)}: {said}") from error


def _taken(value: Any, kind: Any, where: str) -> Any:
    kind = _unwrapped(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return _any_of(value, inner, kind, where)
    if origin is typing.Literal:
        return _one_of(value, inner, kind, where)
    if (fields := _fields(kind)) is not None:
        return _record(value, kind, fields, where)
    if origin is not None:
        return _filled(value, origin, inner, kind, where)
    return _of_class(value, kind, where)


def _of_class(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, Unread):
        raise errors.ArgsRefused(f"{where}: {unfit(kind)}")
    if kind is Any or not isinstance(kind, type):
        return value  # a type variable accepts any value, too
    if hasattr(kind, "model_validate"):
        return cast("Any", kind).model_validate(value)
    if issubclass(kind, _TEXTS):
        return _made(value, kind, where)
    if kind is tuple:
        return tuple(taken(value, list, where))
    if kind not in _PLAIN:
        return value
    if not isinstance(value, _PLAIN[kind]) or (isinstance(value, bool) and kind is not bool):
        raise _refused(value, kind, where)
    return float(value) if kind is float and abs(value) >= _WITHOUT_FRACTION else value


def _any_of(value: Any, kinds: Sequence[Any], kind: Any, where: str) -> Any:
    """Return the value as the first type of a union that it fits, preferring its own JSON type."""
    found: list[Any] = []
    # A text for `Path | str` stays a text, and 1 for `float | int` stays 1.
    for one in sorted(kinds, key=lambda each: (each is not type(value), each not in _PLAIN)):
        try:
            found.append(taken(value, one, where))
        except errors.ArgsRefused:
            continue
        if found[-1] is value or _is_stored_as(found[-1], value):
            return found[-1]
    if not found:
        raise _refused(value, kind, where)
    return found[0]


def _one_of(value: Any, members: Iterable[Any], kind: Any, where: str) -> Any:
    for one in members:
        if _is_stored_as(one, value):
            return one
    if isinstance(kind, type) and not isinstance(value, bool):
        return _converted(value, kind, kind, where)  # flags that are combined, `_missing_`
    raise _refused(value, kind, where)


def _is_stored_as(one: Any, value: Any) -> bool:
    try:
        stored = payload.plain(one, "a value")
    except errors.InvalidPayload:
        return False
    return type(stored) is type(value) and stored == value


def _filled(value: Any, origin: Any, inner: Sequence[Any], kind: Any, where: str) -> Any:
    """Return a list, tuple or dict with converted members."""
    if origin in _MAPPINGS:
        if not isinstance(value, dict):
            raise _refused(value, kind, where)
        members = cast("dict[str, Any]", value)
        return {
            taken(key, inner[0], f"{where}: key {key!r:.80}"): taken(
                each, inner[1], f"{where}[{key!r}]"
            )
            for key, each in members.items()
        }
    if origin is not tuple and not issubclass(list, origin):
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


def _made(value: Any, kind: Any, where: str) -> Any:
    """Return a value converted to a class of `_TEXTS`."""
    if issubclass(kind, enum.Enum):
        return _one_of(value, kind, kind, where)
    if issubclass(kind, decimal.Decimal):
        if isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if isinstance(value, float):
            remedy = 'write it as text, as in "1.10": JSON numbers with a fraction lose digits'
            raise errors.ArgsRefused(f"{_refused(value, kind, where)}; {remedy}")
    if not isinstance(value, str):
        raise _refused(value, kind, where)
    make = getattr(kind, "fromisoformat", kind)  # of dates and times
    return _converted(value, make, kind, where)


def _converted(value: Any, make: Callable[[Any], Any], kind: Any, where: str) -> Any:
    try:
        return make(value)
    except (ValueError, decimal.InvalidOperation):
        raise _refused(value, kind, where) from None


def _record(value: Any, kind: Any, fields: _Fields, where: str) -> Any:
    """Return a dataclass, a named tuple, or the dict of a `TypedDict`."""
    if fields.names is None:
        found = fields.keywords.bound(value, where)
        late = {name: found.pop(name) for name in fields.later if name in found}
        made = kind(**found)
        for name, each in late.items():
            object.__setattr__(made, name, each)
        return {**value, **made} if fields.is_dict else made
    if not isinstance(value, (list, tuple)) or len(cast("list[Any]", value)) > len(fields.names):
        raise _refused(value, kind, where)
    listed = cast("list[Any]", value)
    return kind(**fields.keywords.bound(dict(zip(fields.names, listed, strict=False)), where))


class _Fields(NamedTuple):
    """The fields of a record. A named tuple, which is stored as a list, also has `names`, in order.

    `later` are fields of a dataclass that its `__init__` does not take.
    """

    keywords: Keywords
    names: tuple[str, ...] | None = None
    later: tuple[str, ...] = ()
    is_dict: bool = False


def _fields(kind: Any) -> _Fields | None:
    """Return the fields of a dataclass, a named tuple or a `TypedDict`; None for another type."""
    origin: Any = typing.get_origin(kind) or kind
    named = tuple in getattr(origin, "__mro__", ()) and hasattr(origin, "_fields")
    record = named or typing.is_typeddict(origin) or dataclasses.is_dataclass(origin)
    return _fields_of(kind) if record and isinstance(origin, type) else None


@functools.lru_cache(maxsize=512)
def _fields_of(kind: Any) -> _Fields:
    origin: Any = typing.get_origin(kind) or kind
    kinds: dict[str, Any] = {}
    for base in reversed(origin.__mro__):
        scope = {**vars(sys.modules.get(base.__module__, types)), base.__name__: base}
        found = inspect.get_annotations(base)
        kinds |= {name: read(annotation, scope) for name, annotation in found.items()}
    known = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(kind), strict=False))
    kinds = {name: _specialised(each, known) for name, each in kinds.items()}
    make, later, needed = inspect.Parameter, tuple[str, ...](), list[inspect.Parameter]()
    if is_dict := typing.is_typeddict(origin):
        for name, each in kinds.items():
            may = name in origin.__optional_keys__
            may = may or _presence(typing.get_origin(each)) == "NotRequired"
            default = None if may else make.empty
            needed.append(make(name, make.KEYWORD_ONLY, default=default, annotation=each))
    else:
        needed = [
            each.replace(annotation=kinds.get(each.name, make.empty))
            for each in inspect.signature(origin).parameters.values()
            if each.kind is not make.VAR_POSITIONAL
        ]
    names = getattr(origin, "_fields", None)
    if dataclasses.is_dataclass(origin):
        later = tuple(each.name for each in dataclasses.fields(origin) if not each.init)
        needed += [
            make(name, make.KEYWORD_ONLY, default=None, annotation=kinds[name]) for name in later
        ]
    return _Fields(Keywords(needed, {}, strict=not is_dict), names, later, is_dict)


def _specialised(kind: Any, known: Mapping[Any, Any]) -> Any:
    """Return an annotation with the type variables of a generic class replaced."""
    if isinstance(kind, typing.TypeVar):
        return known.get(kind, kind)
    variables: tuple[Any, ...] = getattr(kind, "__parameters__", ()) if known else ()
    return kind[tuple(known.get(each, each) for each in variables)] if variables else kind


def unfit(kind: Any, seen: tuple[Any, ...] = ()) -> str | None:
    """Return why no JSON value fits this annotation, or None if some value can."""
    if isinstance(kind, Unread):
        return (
            f"its annotation {kind.text!r:.200} cannot be read ({kind.reason}): define what it "
            "names at the top of its module"
        )
    kind = _unwrapped(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        reasons = [unfit(one, seen) for one in inner if one is not type(None)]
        return None if None in reasons else next(iter(reasons), None)
    if kind is Any or origin is typing.Literal or kind in seen:
        return None
    if (fields := _fields(kind)) is not None:
        inner = fields.keywords.kinds
    elif not isinstance(origin or kind, type):
        return None
    elif origin in _MAPPINGS and inner[0] in (int, float, bool):
        return f"the keys of a JSON object are texts, and {_name(kind)} has others"
    elif not hasattr(kind, "model_validate") and not _is_of_json(origin or kind):
        return f"JSON has no {_name(origin or kind)}"
    reasons = (unfit(one, (*seen, kind)) for one in inner if one is not ...)
    return next((reason for reason in reasons if reason is not None), None)


def _is_of_json(kind: type) -> bool:
    if kind in _PLAIN or kind is tuple or issubclass(kind, _TEXTS):
        return True
    try:
        return any(isinstance(sample, kind) for sample in _SAMPLES)
    except TypeError:  # a protocol
        return False


def _described(error: BaseException) -> str:
    """Return an error of the app's code as one line, without values if it lists errors."""
    try:
        listed = getattr(error, "errors", None)
        if not callable(listed):
            name = "" if type(error) in (ValueError, TypeError) else f"{type(error).__name__}: "
            return f"{name}{' '.join(str(error).split())}"
        complaints: list[str] = []
        for each in cast("list[dict[str, Any]]", listed()):  # as pydantic does
            names = [*map(str, each.get("loc", ()))]
            place, said = ".".join(names), str(each.get("msg"))
            if any(map(masking.is_secret, names)):
                complaints.append(f"{place} is refused")
            else:
                complaints.append(f"{place}: {said}" if place else said)
        return "; ".join(complaints)
    except Exception:  # noqa: BLE001  the boundary around app code: an error's own text
        return type(error).__name__


def _refused(value: Any, kind: Any, where: str) -> errors.ArgsRefused:
    if _is_secret(where):
        return errors.ArgsRefused(f"{where} takes {_name(kind)}, not a {type(value).__name__}")
    shown = repr(masking.mask_values(value))[:_SHOWN]
    return errors.ArgsRefused(f"{where}: {_name(kind)}, not {shown}")


def _is_secret(where: str) -> bool:
    """Return whether any name in the path of a value marks it as a secret."""
    names = _QUOTED.findall(where.partition(": ")[2])
    return any(map(masking.is_secret, names))


class Signature(Keywords):
    """The parameters of a callable. Raises ValueError or TypeError if it lacks a signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
        super().__init__(named, scope_of(function))
        self.names = tuple(self._kinds)
        self.defaulted = frozenset(self.names).difference(self._needed)
        self.paths = frozenset(name for name, kind in self._kinds.items() if _takes_path(kind))

    def bind(
        self,
        inputs: Mapping[str, Any],
        offers: Mapping[str, Callable[[], Any]],
        *,
        where: str | None = None,
    ) -> dict[str, Any]:
        """Return keyword arguments from the inputs and from the offers that match parameters.

        An input does not replace an offer of `ENGINE_OBJECTS`. For an input of None, a parameter
        keeps its default. A missing argument raises the call's own TypeError. With `where`, each
        input is converted by its annotation (`taken`), or raises `ArgsRefused` that starts with it.
        Without it, only a text for a `Path` is converted.
        """
        if where is not None:
            inputs = {
                name: value
                if value is None and name in self.defaulted
                else taken(value, self._kinds.get(name, self._rest), f"{where}: {name!r}")
                for name, value in inputs.items()
            }
        bound: dict[str, Any] = {}
        for name in self.names:
            if name in inputs and not (name in ENGINE_OBJECTS and name in offers):
                value = inputs[name]
                if value is None and name in self.defaulted:
                    continue
                if isinstance(value, str) and name in self.paths:
                    value = pathlib.Path(value)
                bound[name] = value
            elif name in offers:
                bound[name] = offers[name]()
        if self.takes_rest:
            bound |= {name: value for name, value in inputs.items() if name not in self.names}
        return bound


_cached = functools.lru_cache(maxsize=512)(Signature)


def signature(function: Callable[..., Any]) -> Signature:
    """Return the signature of a callable, cached if the callable is hashable."""
    try:
        return _cached(function)
    except TypeError:
        return Signature(function)


def scope_of(function: Any) -> dict[str, Any]:
    """Return the global names that the annotations of a callable of any kind refer to."""
    while True:
        if isinstance(function, functools.partial):
            function = cast("functools.partial[Any]", function).func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif hasattr(function, "__globals__") or not hasattr(function, "__call__"):  # noqa: B004
            return getattr(function, "__globals__", {})
        elif inspect.isclass(function):
            return getattr(function.__init__, "__globals__", {})
        else:
            call = type(function).__call__
            return getattr(getattr(function, "__func__", call), "__globals__", {})


def _takes_path(kind: Any) -> bool:
    """Return whether an annotation or the text of an `Unread` one is `Path` or a union with it."""
    if isinstance(kind, Unread):
        inner = _FORWARD.sub(r"\1", kind.text.strip())
        inner = re.sub(r"^(?:\w+\.)*(?:Optional|Union)\[(.*)\]$", r"\1", inner)
        return any(_NAMES_PATH.fullmatch(part.strip()) for part in re.split(r"[|,]", inner))
    if typing.get_origin(kind) in _UNIONS:
        return any(map(_takes_path, typing.get_args(kind)))
    return isinstance(kind, type) and issubclass(kind, pathlib.PurePath)
