"""Find the ids of an item's nodes, and resolve what refs in them name.

The body of a map is planned as it is, for each item. Only rows have full ids, `cut[clip-7]/encode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors, refs
from queue_workflows.dag import graph, item_ids


class Scope(NamedTuple):
    """One item: its map, the id of the map's node, its key and its value."""

    of: graph.Map
    map_id: str
    key: str
    item: Any

    @property
    def id(self) -> str:
        """Return the id of the item, `cut[clip-7]`, which is also the path of its folder."""
        return item_ids.folder(self.map_id, self.key)

    @property
    def prefix(self) -> str:
        """Return the beginning of the ids of its nodes, `cut[clip-7]/`."""
        return f"{self.id}/"


def ids(scope: Scope) -> list[str]:
    """Return the full ids of an item's nodes."""
    return [scope.prefix + node_id for node_id in scope.of.body.nodes]


def check_ids(scope: Scope) -> None:
    """Raise `InvalidPayload` if the id of any node would be too long."""
    for node_id in ids(scope):
        if len(node_id.encode(errors="replace")) > item_ids.MAX_ID_BYTES:
            raise errors.InvalidPayload(
                f"node {node_id!r:.120} ...: an id of more than {item_ids.MAX_ID_BYTES} bytes"
            )


def near(of: graph.Graph, node_ids: Iterable[str]) -> list[str]:
    """Return the nodes of a map's body that matter for the followers of these nodes.

    These are all nodes outside of loops, and in loops the followers and their dependencies.
    """
    found = dict.fromkeys(of.once)
    if len(found) < len(of.nodes):
        for node_id in node_ids:
            for follower in of.downstream(node_id):
                found |= dict.fromkeys([follower, *of.nodes[follower].deps])
    return [*found]


def owner(head: str, scopes: Sequence[Scope]) -> Scope | None:
    """Return the innermost item that a ref with this head names, or of whose nodes it names one.

    `scopes` begins with the outermost item. Returns None for a head outside of all items.
    """
    for scope in reversed(scopes):
        if head == scope.of.item or head in scope.of.body.nodes:
            return scope
    return None


def named(heads: Iterable[str], scopes: Sequence[Scope]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the item that each head names; for each other head, its name in the run's context."""
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for head in heads:
        scope = owner(head, scopes)
        if scope is not None and head == scope.of.item:
            found[head] = scope.item
        else:
            names[head] = head if scope is None else scope.prefix + head
    return found, names


def bound(template: Mapping[str, Any], scopes: Sequence[Scope]) -> dict[str, Any]:
    """Return the template of inputs with the values of items, and the full ids of their nodes.

    Its refs have been resolved before, so that an item has what they name. Other refs stay. A value
    that stands for itself is not quoted, which saves the worker a look-up of the run's context.
    """
    return {name: _plain(_bound(value, scopes)) for name, value in template.items()}


def _plain(template: Any) -> Any:
    record = cast("dict[str, Any]", template if isinstance(template, dict) else {})
    if record.keys() == {"$value"} and not refs.has_refs(record["$value"]):
        return record["$value"]
    return cast("Any", template)


def _bound(template: Any, scopes: Sequence[Scope]) -> Any:
    def change(ref: dict[str, Any]) -> Any:
        head = refs.segments(ref["$from"])[0]
        scope = owner(head, scopes)
        if scope is None:
            return ref
        if head == scope.of.item:
            return {"$value": refs.resolve_ref(ref, {head: scope.item})}
        return {**ref, "$from": scope.prefix + ref["$from"]}

    return refs.replaced(template, change)
