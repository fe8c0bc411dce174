"""Find what runs again when a run is retried from a node, and reset the maps among it."""

from __future__ import annotations

from collections.abc import Iterable

from queue_workflows import db, errors
from queue_workflows.dag import graph, item_ids
from queue_workflows.db import statements
from queue_workflows.engine import maps, node_names


class Again:
    """What runs again: nodes, maps that get new items, and items of maps that go on."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        """Nodes with a row that is kept."""
        self.maps: set[str] = set()
        """Maps whose items are dropped with their nodes: their list may be another one."""
        self.items: list[tuple[str, str]] = []
        """Map and key of items that run again in a map that keeps its others."""


def find(of: graph.Graph, node_id: str) -> Again | None:
    """Return what runs again from a node, an item (`cut[clip-7]`) or a node of an item.

    Returns None if the definition has no such node. An item of that key may still be missing.
    """
    again = Again()
    if not _add(of, node_id, again):
        return None
    return again


def _add(of: graph.Graph, node_id: str, again: Again) -> bool:
    parts = item_ids.split(node_id)
    if parts is None:
        if node_id not in of.nodes:
            return False
        _add_following(of, "", _with_own(of, node_id), again)
        return True
    body = _body(of, parts.map_id)
    if body is None or (parts.inner and parts.inner not in body.nodes):
        return False
    prefix = f"{item_ids.folder(parts.map_id, parts.key)}/"
    start = _with_own(body, parts.inner) if parts.inner else body.nodes
    _add_following(body, prefix, start, again)
    _add_around(of, parts, again)
    return True


def _with_own(of: graph.Graph, node_id: str) -> list[str]:
    """Return a node, and the nodes of the branch or loop that it ends: they decide again."""
    return [node_id, *(node.id for node in of.nodes.values() if node.arm == node_id)]


def _add_around(of: graph.Graph, item: item_ids.ItemNode, again: Again) -> None:
    """Add an item, the map that counts it, what follows from that, and so on outwards."""
    again.items.append((item.map_id, item.key))
    again.nodes.add(item.map_id)
    above = item_ids.split(item.map_id)
    if above is None:
        _add_following(of, "", of.downstream(item.map_id), again)
        return
    body = _body(of, above.map_id)
    if body is not None:
        prefix = f"{item_ids.folder(above.map_id, above.key)}/"
        _add_following(body, prefix, body.downstream(above.inner), again)
    _add_around(of, above, again)


def _body(of: graph.Graph, map_id: str) -> graph.Graph | None:
    owner = item_ids.node(of, map_id)
    return None if owner is None or owner.map is None else owner.map.body


def _add_following(of: graph.Graph, prefix: str, start: Iterable[str], again: Again) -> None:
    """Add nodes and all that depend on them, by their ids behind the prefix."""
    todo = list(start)
    found = set(todo)
    while todo:
        following = set(of.downstream(todo.pop())) - found
        found |= following
        todo += following
    again.nodes |= {prefix + node_id for node_id in found}
    again.maps |= {prefix + node_id for node_id in found if of.nodes[node_id].map is not None}


def reset(conn: db.Connection, run_id: str, again: Again) -> None:
    """Let the items run again, and drop the maps that get new items with their nodes."""
    for map_id, key in again.items:
        statements.maps.reopen_item(conn, run_id=run_id, map=map_id, key=key)
    for map_id in sorted(again.maps):
        maps.drop(conn, run_id, map_id)


def refuse(conn: db.Connection, run_id: str, again: Again) -> None:
    """Raise `UnknownJob` for an item that does not exist, `InvalidConfig` while one still runs."""
    for map_id, key in again.items:
        if not maps.items(conn, run_id, map_id, [key]):
            meant = node_names.key_hint(conn, run_id, key, map_id)
            raise errors.UnknownJob(f"run {run_id!r}: map {map_id!r} has no item {key!r}{meant}")
    for map_id in sorted(again.maps):
        running = statements.maps.running_inside(conn, run_id=run_id, inside=f"{map_id}[")
        if running is not None:
            raise errors.InvalidConfig(
                f"node {running!r} of run {run_id!r} still runs: retry once it has ended"
            )
