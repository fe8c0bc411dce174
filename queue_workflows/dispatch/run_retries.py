"""Queue a finished run again: what failed runs again, or a node with all that depends on it.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from queue_workflows import db, errors
from queue_workflows.admin import item_nodes
from queue_workflows.claim import manual_changes
from queue_workflows.dag import item_ids
from queue_workflows.db import statements
from queue_workflows.types import Row

if TYPE_CHECKING:
    from queue_workflows.dag import graph


def reopen(conn: db.Connection, run_id: str, *, from_node: str | None) -> Row:
    """Queue a finished run in a new generation; return its row.

    Completed nodes keep their outputs, except `from_node` and the nodes that depend on it; it may
    be an item of a map, as `cut[clip-7]`. Raises `UnknownJob` for no such run, node or item, and
    `InvalidConfig` for a run that is not over, a completed one without `from_node`, and while a
    node that would run again still runs.
    """
    if from_node is None:
        return manual_changes.reopen_run(conn, run_id)
    manual_changes.lock_over(conn, run_id)
    again = _again(conn, run_id, from_node)
    _refuse(conn, run_id, again)
    reopened = _reopen_nodes(conn, run_id, again)
    assert reopened is not None
    return reopened


def _again(conn: db.Connection, run_id: str, node_id: str) -> Again:
    """Return a node and all that depends on it."""
    from queue_workflows.dag import graph  # late: a process that queues jobs reads no graphs

    stored, again = statements.runs.definition(conn, run_id=run_id), Again()
    if stored is None or not again.add(graph.read(stored), node_id):
        meant = item_nodes.hint(conn, run_id, node_id)
        raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}{meant}")
    return again


def _refuse(conn: db.Connection, run_id: str, again: Again) -> None:
    """Raise `UnknownJob` for an item that does not exist, `InvalidConfig` for a node that runs.

    It would record a result of the old generation beside the new one.
    """
    running = sorted(statements.nodes.running_among(conn, run_id=run_id, nodes=[*again.nodes]))
    for map_id, key in again.items:
        if not running and not statements.maps.items(conn, run_id=run_id, map=map_id, keys=[key]):
            meant = item_nodes.key_hint(conn, run_id, key, map_id)
            raise errors.UnknownJob(f"run {run_id!r}: map {map_id!r} has no item {key!r}{meant}")
    for map_id in sorted(again.maps):
        inside = statements.maps.running_inside(conn, run_id=run_id, inside=f"{map_id}[")
        running += [] if inside is None else [inside]
    if running:
        raise errors.InvalidConfig(
            f"node {running[0]!r} of run {run_id!r} still runs: retry once it has ended"
        )


def _reopen_nodes(conn: db.Connection, run_id: str, again: Again) -> Row | None:
    """Queue a run that is over, with these nodes to be run again, and return its row, or None.

    The run goes two generations on, and the nodes are cancelled in the one between, so that the
    start that follows opens them. Requests to end the nodes that still run are withdrawn. Maps that
    get new items lose their items and nodes.
    """
    row = statements.runs.reopen_two_generations_on(conn, run_id=run_id)
    if row is not None:
        between = row["generation"] - 1
        nodes = sorted(again.nodes)
        statements.runs.cancel_nodes_again(conn, run_id=run_id, generation=between, nodes=nodes)
        statements.runs.withdraw_cancel_requests(conn, run_id=run_id)
    for map_id, key in again.items:
        statements.maps.reopen_item(conn, run_id=run_id, map=map_id, key=key)
    for map_id in sorted(again.maps):
        statements.maps.drop_nodes(conn, run_id=run_id, inside=f"{map_id}[")
        statements.maps.drop(conn, run_id=run_id, map=map_id, inside=f"{map_id}[")
    return row


class Again:
    """What runs again: nodes, maps that get new items, and items of maps that go on."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        """Nodes with a row that is kept."""
        self.maps: set[str] = set()
        """Maps whose items are dropped with their nodes: their list may be another one."""
        self.items: list[tuple[str, str]] = []
        """Map and key of items that run again in a map that keeps its others."""

    def add(self, of: graph.Graph, node_id: str) -> bool:
        """Add what runs again from a node, an item (`cut[clip-7]`) or a node of an item.

        Returns False if the definition has no such node. An item of that key may still be missing.
        """
        parts = item_ids.split(node_id)
        if parts is None:
            if node_id not in of.nodes:
                return False
            self._add_following(of, "", _with_own(of, node_id))
            return True
        body = _body(of, parts.map_id)
        if body is None or (parts.inner and parts.inner not in body.nodes):
            return False
        prefix = f"{item_ids.folder(parts.map_id, parts.key)}/"
        start = _with_own(body, parts.inner) if parts.inner else body.nodes
        self._add_following(body, prefix, start)
        self._add_around(of, parts)
        return True

    def _add_around(self, of: graph.Graph, item: item_ids.ItemNode) -> None:
        """Add an item, the map that counts it, what follows from that, and so on outwards."""
        self.items.append((item.map_id, item.key))
        self.nodes.add(item.map_id)
        above = item_ids.split(item.map_id)
        if above is None:
            self._add_following(of, "", of.downstream(item.map_id))
            return
        body = _body(of, above.map_id)
        if body is not None:
            prefix = f"{item_ids.folder(above.map_id, above.key)}/"
            self._add_following(body, prefix, body.downstream(above.inner))
        self._add_around(of, above)

    def _add_following(self, of: graph.Graph, prefix: str, start: Iterable[str]) -> None:
        """Add nodes and all that depend on them, by their ids behind the prefix."""
        todo = list(start)
        found = set(todo)
        while todo:
            following = set(of.downstream(todo.pop())) - found
            found |= following
            todo += following
        self.nodes |= {prefix + node_id for node_id in found}
        self.maps |= {prefix + node_id for node_id in found if of.nodes[node_id].map is not None}


def _with_own(of: graph.Graph, node_id: str) -> list[str]:
    """Return a node, and the nodes of the branch or loop that it ends: they decide again."""
    return [node_id, *(node.id for node in of.nodes.values() if node.arm == node_id)]


def _body(of: graph.Graph, map_id: str) -> graph.Graph | None:
    owner = item_ids.node(of, map_id)
    return None if owner is None or owner.map is None else owner.map.body
