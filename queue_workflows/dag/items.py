"""Find the ids of an item's nodes, and resolve their refs to the item and its nodes.

For each item the map's body is planned with its own ids. Only rows have full ids such as
`cut[clip-7]/encode`.
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
    """Return the nodes of a map's body whose state is needed to plan the followers of these nodes.

    These are all nodes outside of loops, and in loops the followers and their dependencies.
    """
    found = dict.fromkeys(of.once)
    if len(found) < len(of.nodes):
        for node_id in node_ids:
            for follower in of.downstream(node_id):
                found |= dict.fromkeys([follower, *of.nodes[follower].deps])
    return [*found]


def owner(head: str, scopes: Sequence[Scope]) -> Scope | None:
    """Return the innermost item that a ref with this head names, itself or by one of its nodes.

    `scopes` begins with the outermost item. Returns None for a head outside of all items.
    """
    for scope in reversed(scopes):
        if head == scope.of.item or head in scope.of.body.nodes:
            return scope
    return None


def named(heads: Iterable[str], scopes: Sequence[Scope]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of heads that name items, and the names of other heads in the context."""
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

    Call it after its refs were resolved, so that items have the values. Other refs are unchanged. A
    value that cannot be a ref is not quoted, so the worker need not read the run's context.
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
