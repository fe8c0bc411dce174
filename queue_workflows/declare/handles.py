"""Define the placeholders that a node's call returns while a workflow's graph is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn, TypedDict, TypeVar, cast

from queue_workflows import errors, refs
from queue_workflows.dag import graph, payload

L = TypeVar("L", bound="list[Any]")
_TO_COME = " of a run to come>"


@dataclasses.dataclass(slots=True, eq=False)
class Origin:
    """Where a handle comes from: a graph being built, and in it a step and node, or the run.

    `what` names it for messages; `keys` are the outputs that its function is known to return, or
    None for any. `stores` is False for a function that returns nothing. `body` is the step of a map
    whose items have the value, or None if the run has it.
    """

    graph: object
    _: dataclasses.KW_ONLY
    what: str
    step: str | None = None
    node: str | None = None
    keys: frozenset[str] | None = None
    stores: bool = True
    body: object = None


class Handle:
    """A value of a future run; editors and checkers see it with that value's type.

    `[key]` selects from it; `== x` and `!= x` are conditions for `skip_if`. It can only be passed
    on, since it has no value while the graph is built.
    """

    __slots__ = ("_origin", "_parent", "_ref")

    def __init__(self, origin: Origin, ref: dict[str, Any], parent: Handle | None = None) -> None:
        self._origin = origin
        self._ref = ref
        self._parent = parent

    def __getitem__(self, key: Any) -> Any:
        where = self._origin.what
        if self._ref.keys() & {*refs.OPERATORS}:
            raise errors.InvalidWorkflow(f"{where}: a condition has no members")
        index = isinstance(key, int) and not isinstance(key, bool)
        if not index and (not isinstance(key, str) or not key or "." in key):
            raise errors.InvalidWorkflow(
                f"{where}: [{key!r:.80}]: select by a text without '.', or by a number"
            )
        keys = self._origin.keys
        if keys is not None and self._ref["$from"] == self._origin.node and key not in keys:
            raise errors.InvalidWorkflow(
                f"{where} returns no {key!r:.80}; it returns {', '.join(sorted(keys))}"
            )
        return Handle(self._origin, {"$from": f"{self._ref['$from']}.{key}"}, self)

    def __eq__(self, other: object) -> Any:
        return self._compared("$eq", other)

    def __ne__(self, other: object) -> Any:
        return self._compared("$ne", other)

    __hash__ = object.__hash__

    def _compared(self, operator: str, other: object) -> Handle:
        if self._ref.keys() & {"$eq", "$ne"}:
            raise errors.InvalidWorkflow(
                f"{self._origin.what}: a condition cannot be compared again"
            )
        ref = {**self._ref, operator: constant(other, self._origin.what)}
        return Handle(self._origin, ref, self if self._parent is None else self._parent)

    def __repr__(self) -> str:
        """Return a text for debuggers; a definition refuses texts that contain it (`shown_in`)."""
        return f"<{self._ref['$from']}{_TO_COME}"

    def _no_value(self, *_: object) -> NoReturn:
        raise errors.InvalidWorkflow(
            f"{self._origin.what} has no value while the graph is built: work with it inside a "
            "node; use options(skip_if=... == ...) for what depends on it"
        )

    __bool__ = __iter__ = __len__ = __contains__ = __call__ = _no_value
    __str__ = __format__ = __int__ = __float__ = __index__ = __fspath__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_value
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = _no_value
    __neg__ = __and__ = __or__ = __invert__ = _no_value

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Protocols (copy, pickle, typing) must find no special method here.
            raise AttributeError(name)
        self._no_value()


def origin(handle: Handle) -> Origin:
    """Return the graph, step and node of a handle."""
    return handle._origin  # pyright: ignore[reportPrivateUsage]


def selected_from(handle: Handle) -> Handle:
    """Return the handle from which one was selected by a key or a comparison, else itself."""
    parent = handle._parent  # pyright: ignore[reportPrivateUsage]
    return handle if parent is None else parent


def head(handle: Handle) -> str:
    """Return the first segment of a handle's path."""
    return refs.segments(handle._ref["$from"])[0]  # pyright: ignore[reportPrivateUsage]


class FailedItem(TypedDict):
    """An item that failed in a map which lets some fail: its key and its error."""

    key: str
    error: str


def failures(results: list[Any]) -> list[FailedItem]:
    """Return the items that failed in a map, out of what its `map()` returned."""
    handle: Any = results
    made = origin(handle) if isinstance(handle, Handle) else None
    ref: Any = handle._ref if isinstance(handle, Handle) else {}  # pyright: ignore[reportPrivateUsage]
    if made is None or made.step is None or ref != {"$from": f"{made.step}.{graph.MAP_RESULTS}"}:
        raise errors.InvalidWorkflow("failures() takes the result of a call of map()")
    return cast("Any", Handle(made, {"$from": f"{made.step}.{graph.MAP_FAILED}"}))


def filtered(items: L, conditions: dict[str, Any]) -> L:
    """Return the matching members of a future list, as in refs: `{"kind:eq": "csv"}`.

    Raise `InvalidRef` for unknown conditions.
    """
    handle: Any = items
    if not isinstance(handle, Handle):
        raise errors.InvalidWorkflow("filtered() takes the output of a node")
    ref = handle._ref  # pyright: ignore[reportPrivateUsage]
    if ref.keys() & {*refs.OPERATORS}:
        raise errors.InvalidWorkflow(f"{origin(handle).what}: a condition cannot be filtered")
    refs.resolve_ref({"$from": "list", "$filter": conditions}, {"list": []})
    return cast("Any", Handle(origin(handle), {**ref, "$filter": dict(conditions)}))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values in a value, through dicts, lists and tuples."""
    if isinstance(value, dict):
        value = [each for pair in cast("dict[Any, Any]", value).items() for each in pair]
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for member in cast("list[Any]", value):
        yield from _leaves(member)


def inside(value: Any) -> list[Handle]:
    """Return every handle in a value, through dicts, lists and tuples."""
    return [each for each in _leaves(value) if isinstance(each, Handle)]


def shown_in(value: Any) -> str | None:
    """Return the first text or key in a value that contains a handle's repr."""
    found = (each for each in _leaves(value) if isinstance(each, str) and _TO_COME in each)
    return next(found, None)


def template(value: Any, where: str) -> Any:
    """Return the value as a template: handles become refs, texts that look like refs are quoted.

    Raises `InvalidWorkflow` that starts with `where` for a handle that a template cannot contain.
    """
    if isinstance(value, Handle):
        if not origin(value).stores:
            raise errors.InvalidWorkflow(
                f"{where}: {origin(value).what} returns nothing; use options(after=...) to wait "
                "for it, or annotate what it returns"
            )
        return value._ref  # pyright: ignore[reportPrivateUsage]
    if not isinstance(value, dict):
        if inside(value):
            raise errors.InvalidWorkflow(
                f"{where}: a list cannot hold the output of a node: pass a dict, or let the node "
                "take **keywords"
            )
        return constant(value, where)
    members = cast("dict[Any, Any]", value)
    if "$from" in members or "$value" in members:
        return {"$value": constant(members, where)}
    return {key: template(member, where) for key, member in members.items()}


def constant(value: Any, where: str) -> Any:
    """Return a value without handles in JSON terms: paths, dates and the like as text.

    What JSON cannot represent stays as it is, and is refused on expanding. Raises `InvalidWorkflow`
    that starts with `where` for a handle.
    """
    if isinstance(value, Handle):
        raise errors.InvalidWorkflow(
            f"{where}: an output of a node is used where only a constant is allowed"
        )
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        return {key: constant(member, where) for key, member in members.items()}
    if isinstance(value, (list, tuple)):
        return [constant(member, where) for member in cast("list[Any]", value)]
    try:
        return payload.plain(value, where)
    except errors.InvalidPayload:
        return value
