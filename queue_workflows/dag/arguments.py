"""Bind inputs, converted by annotation, and what the engine offers to a handler's parameters."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, cast

from queue_workflows.dag import typed_values

ENGINE_OBJECTS = frozenset({"out", "inputs", "model_handle", "cancel_event", "status_callback"})
"""The names under which a handler always gets the engine's object, whatever its inputs hold."""
_NAMES_PATH = re.compile(r"(?:\w+\.)*Path")


class Signature:
    """The parameters of a callable. Raises ValueError or TypeError if it has no signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = tuple(p.name for p in named)
        self.defaulted = frozenset(p.name for p in named if p.default is not p.empty)
        self.takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        scope = scope_of(function)
        self.paths = frozenset(p.name for p in named if _takes_path(p.annotation, scope))
        self._kinds = {p.name: typed_values.read(p.annotation, scope) for p in named}
        rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        self._rest = typed_values.read(rest[0].annotation, scope) if rest else Any

    def bind(
        self,
        inputs: Mapping[str, Any],
        offers: Mapping[str, Callable[[], Any]],
        *,
        where: str | None = None,
    ) -> dict[str, Any]:
        """Return keyword arguments: the inputs by name, then the offers that it has parameters for.

        An input does not replace an offer of `ENGINE_OBJECTS`. None leaves a parameter to its
        default. A missing argument is the call's own TypeError. With `where`, each input is
        converted by its annotation (`typed_values.taken`), or raises `ArgsRefused` that starts
        with it. Without it, only a text for a `Path` is converted.
        """
        if where is not None:
            inputs = self._converted(inputs, where)
        bound: dict[str, Any] = {}
        for name in self.names:
            if name in inputs and not (name in ENGINE_OBJECTS and name in offers):
                value = inputs[name]
                if value is None and name in self.defaulted:
                    continue
                if isinstance(value, str) and name in self.paths:
                    value = Path(value)
                bound[name] = value
            elif name in offers:
                bound[name] = offers[name]()
        if self.takes_rest:
            bound |= {name: value for name, value in inputs.items() if name not in self.names}
        return bound

    def _converted(self, inputs: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {
            name: value
            if value is None and name in self.defaulted
            else typed_values.taken(value, self._kinds.get(name, self._rest), f"{where}: {name!r}")
            for name, value in inputs.items()
        }


@functools.lru_cache(maxsize=512)
def _cached(function: Callable[..., Any]) -> Signature:
    return Signature(function)


def signature(function: Callable[..., Any]) -> Signature:
    """Return the signature of a callable, cached if the callable is hashable."""
    try:
        hash(function)
    except TypeError:
        return Signature(function)
    return _cached(function)


def scope_of(function: Any) -> dict[str, Any]:
    """Return where the annotations of a function, method, partial or callable object are read."""
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


def _takes_path(annotation: Any, scope: dict[str, Any]) -> bool:
    """Return whether an annotation is `Path`, alone or in a union, or such a text."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        try:
            # The text is the app's own source, evaluated as `typing.get_type_hints` does.
            annotation = eval(annotation, scope)  # noqa: S307
        except Exception:  # noqa: BLE001  a name that only a type checker knows
            return _says_path(annotation)
        return not isinstance(annotation, str) and _takes_path(annotation, scope)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _takes_path(typing.get_args(annotation)[0], scope)
    if origin in (typing.Union, UnionType):
        return any(_takes_path(member, scope) for member in typing.get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, PurePath)


def _says_path(text: str) -> bool:
    inner = re.sub(r"^(?:\w+\.)*(?:Optional|Union)\[(.*)\]$", r"\1", text.strip())
    return any(_NAMES_PATH.fullmatch(part.strip()) for part in re.split(r"[|,]", inner))
