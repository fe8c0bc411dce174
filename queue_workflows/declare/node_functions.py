"""Inspect a node's function: its parameters, its result, and the handler that workers run."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from queue_workflows import errors, refs
from queue_workflows.dag import typed_values

OFFERS = frozenset(
    {
        "inputs", "out", "scratch", "model_handle", "model_load_seconds", "cancel_event",
        "status_callback",
    }
)  # fmt: skip
"""What `node_executor` passes to a function that has a parameter of that name."""

RESULT = "result"
"""The key under which a result that is not a dict is stored (as for ingest tasks)."""


class Offered:
    """The default of a parameter that the engine fills; see `OFFERED`."""

    def __repr__(self) -> str:
        return "OFFERED"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.InvalidConfig(
            "a parameter with the default OFFERED is filled by the worker: pass a value of your "
            "own when you call the function yourself"
        )


class Result(NamedTuple):
    """What a function returns: `nothing`, a `value`, a `dict` with `keys`, or `any` of these."""

    kind: str
    keys: frozenset[str] | None = None


class NodeFunction:
    """A function with its signature; `name` identifies it in messages."""

    isolation: str | None = None
    """`process`: each of its jobs has a fresh process, in a worker with slots."""
    version: int | None = None
    queue: str = "cpu"

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        if not inspect.isfunction(function):
            raise errors.InvalidConfig(f"node {name!r}: @node takes a function")
        self.function = function
        self.name = name
        self.signature = inspect.signature(function)
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise errors.InvalidConfig(
                    f"node {name!r}: inputs are bound by name, and {parameter.name!r} has none"
                )

    @property
    def place(self) -> tuple[str, str]:
        """Return module and qualified name of the function."""
        return self.function.__module__, self.function.__qualname__

    @functools.cached_property
    def result(self) -> Result:
        """Return the result's kind. Raises `InvalidWorkflow` for an unreadable annotation.

        A generator returns the type that its annotation names last. An async generator cannot
        return a value; any value may be passed to `set_result`.
        """
        written = inspect.unwrap(self.function)
        if inspect.isasyncgenfunction(written):
            return Result("any")
        annotation = self.signature.return_annotation
        if annotation is inspect.Signature.empty:
            return Result("any")
        annotation = typed_values.read(annotation, typed_values.scope_of(self.function))
        if isinstance(annotation, typed_values.Unread):
            raise errors.InvalidWorkflow(
                f"node {self.name!r}: its return annotation {annotation.text!r} cannot be read "
                f"({annotation.reason}): define what it names at the top of its module"
            )
        if not inspect.isgeneratorfunction(written):
            return _result(annotation)
        arguments = typing.get_args(annotation)
        if typing.get_origin(annotation) is not collections.abc.Generator:
            return Result("any")
        found = _result(arguments[2]) if len(arguments) > 2 else Result("nothing")
        # A decorator may return the items of a generator that itself returns no value.
        is_collected = written is not self.function and found.kind == "nothing"
        return Result("any") if is_collected else found

    @functools.cached_property
    def unfit_inputs(self) -> dict[str, str]:
        """Return why no input can be a value of a parameter's annotation, by the parameter."""
        scope = typed_values.scope_of(self.function)
        return {
            each.name: reason
            for each in self.signature.parameters.values()
            if (reason := typed_values.unfit(typed_values.read(each.annotation, scope))) is not None
        }

    @property
    def run(self) -> Callable[..., Any]:
        """Return the function, for a worker; `stored` turns its result into the stored value."""
        return self.function

    def stored(self, value: Any) -> Any:
        """Return a result as the dict that is stored; paths on its first level become text."""
        kind, is_dict = self.result.kind, isinstance(value, dict)
        if kind == "value" or (kind == "any" and value is not None and not is_dict):
            return {RESULT: _text(value)}
        if not is_dict:
            return value
        found = {key: _text(member) for key, member in cast("dict[str, Any]", value).items()}
        if kind != "any":
            return found
        if isinstance(inner := found.get("context_delta"), dict):
            return {**found, "context_delta": refs.marked(inner)}
        return refs.marked(found)

    def bind(self, where: str, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; `InvalidWorkflow` for unknown or missing ones."""
        try:
            bound = self.signature.bind_partial(*args, **given).arguments
        except TypeError as error:
            takes = [name for name in self.signature.parameters if name not in OFFERS]
            raise errors.InvalidWorkflow(
                f"{where}: {error}; {self.name} takes {', '.join(takes) or 'no inputs'}"
            ) from None
        found: dict[str, Any] = {}
        for parameter in self.signature.parameters.values():
            if parameter.name in bound and parameter.name in self.unfit_inputs:
                raise errors.InvalidWorkflow(
                    f"{where}: {self.name}'s {parameter.name!r}: "
                    f"{self.unfit_inputs[parameter.name]}"
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= bound.get(parameter.name, {})
            elif parameter.name in bound:
                found[parameter.name] = bound[parameter.name]
            elif parameter.default is parameter.empty and parameter.name not in OFFERS:
                raise errors.InvalidWorkflow(
                    f"{where}: {self.name} needs {parameter.name!r}, and the call does not give it"
                )
        return found


def _result(annotation: Any) -> Result:
    if annotation is None or annotation is type(None):
        return Result("nothing")
    if annotation is Any:
        return Result("any")
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [_result(member) for member in typing.get_args(annotation)]
        some = [member for member in members if member.kind != "nothing"]
        if len(some) == 1 and some[0].kind == "dict":
            return some[0]
        return Result("dict" if all(m.kind == "dict" for m in some) else "value")
    if origin is typing.Annotated:
        return _result(typing.get_args(annotation)[0])
    kind = origin or annotation
    if typing.is_typeddict(kind):
        return Result("dict", frozenset(typing.get_type_hints(kind)))
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return Result("dict")
    return Result("value")


def outputs(module: Any) -> frozenset[str] | None:
    """Return the keys of a node's result by its function's annotation, or None for any.

    A function that was not declared by `@node` stores dicts only: any other result is dropped.
    """
    declared = isinstance(module, NodeFunction)
    function = module.function if declared else inspect.unwrap(module.run)
    if not inspect.isfunction(function):
        return None
    try:
        result = NodeFunction(function, function.__name__).result
    except errors.QueueWorkflowsError:
        return None
    if result.kind == "value" and declared:
        return frozenset({RESULT})
    if result.kind == "any":
        return None
    if result.kind == "dict":
        return None if result.keys and "context_delta" in result.keys else result.keys
    return frozenset()


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else value
