"""Make the nodes of one item of a map out of the map's body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors, refs
from queue_workflows.dag import bindings, graph, item_ids


class Scope(NamedTuple):
    """One item: its map, the id of the map's node, its key and its value."""

    of: graph.Map
    map_id: str
    key: str
    item: Any

    @property
    def id(self) -> str:
        """Return the id of the item, `cut[clip-7]`."""
        return item_ids.folder(self.map_id, self.key)


def instance(scopes: Sequence[Scope]) -> graph.Graph:
    """Return the nodes of the last of these items, which the others enclose, the outermost first.

    Refs to an item become its value, refs to nodes of the body get their full ids. Raises
    `InvalidPayload` that names the node and the ref for a ref into an item that lacks it, and for
    an id that is too long.
    """
    own = scopes[-1]
    return graph.Graph.of(
        {made.id: made for made in (_node(node, scopes) for node in own.of.body.nodes.values())}
    )


def ids(scope: Scope) -> list[str]:
    """Return the full ids of an item's nodes."""
    return [f"{scope.id}/{node_id}" for node_id in scope.of.body.nodes]


def _node(node: graph.Node, scopes: Sequence[Scope]) -> graph.Node:
    prefix = f"{scopes[-1].id}/"
    node_id = prefix + node.id
    if len(node_id.encode(errors="replace")) > item_ids.MAX_ID_BYTES:
        raise errors.InvalidPayload(
            f"node {node_id!r:.120} ...: an id of more than {item_ids.MAX_ID_BYTES} bytes"
        )
    where = f"node {node_id!r}"
    inputs = {
        name: _input(value, scopes, f"{where}: input {name!r}")
        for name, value in node.inputs.items()
    }
    return node._replace(
        id=node_id,
        deps=tuple(prefix + dep for dep in node.deps),
        inputs=inputs,
        skip_if=_bound(node.skip_if, scopes, f"{where}: skip_if"),
    )


def _input(value: Any, scopes: Sequence[Scope], where: str) -> Any:
    if not (isinstance(value, dict) and bindings.OUT in value):
        return _plain(_bound(value, scopes, where))
    marked = cast("dict[str, Any]", value)[bindings.OUT]
    if isinstance(marked, dict):
        inner = cast("dict[str, Any]", marked)["$value"]
        return {bindings.OUT: {"$value": _bound(inner, scopes, where)}}
    prefix = f"{scopes[-1].id}/"
    if isinstance(marked, list):
        return {bindings.OUT: [prefix + path for path in cast("list[str]", marked)]}
    return {bindings.OUT: f"{prefix}{marked}"}


def _plain(bound: Any) -> Any:
    """Return a bound template without the quotes that it does not need.

    A value that stands for itself saves the worker a look-up of the run's context.
    """
    if isinstance(bound, dict) and bound.keys() == {"$value"}:
        value = cast("dict[str, Any]", bound)["$value"]
        marked = isinstance(value, dict) and bindings.OUT in value
        return cast("Any", bound if marked or refs.has_refs(value) else value)
    return cast("Any", bound)


def _bound(value: Any, scopes: Sequence[Scope], where: str) -> Any:
    """Return a template with the refs into these items resolved; other refs stay."""
    if not isinstance(value, dict):
        return value
    record = cast("dict[str, Any]", value)
    if "$value" in record:
        return record
    if "$from" in record:
        return _ref(record, scopes, where)
    return {key: _bound(member, scopes, where) for key, member in record.items()}


def _ref(ref: dict[str, Any], scopes: Sequence[Scope], where: str) -> Any:
    path = ref["$from"]
    if not isinstance(path, str):
        return ref
    head = refs.segments(path)[0]
    for scope in reversed(scopes):
        if head == scope.of.item:
            try:
                return {"$value": refs.resolve_ref(ref, {head: scope.item})}
            except (errors.QueueWorkflowsError, TypeError) as error:
                raise errors.InvalidPayload(f"{where}: {error}") from None
        if head in scope.of.body.nodes:
            return {**ref, "$from": f"{scope.id}/{path}"}
    return ref
