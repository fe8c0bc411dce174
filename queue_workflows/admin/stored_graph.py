"""Read the nodes of a stored definition and of its map items, even if it is damaged."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import item_ids, payload
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

_KEY = re.compile(r"\[[^\]]*\]")
"""The key of an item in the id of a node."""


def graph_nodes(definition: Any) -> dict[str, Row]:
    """Return the nodes of a stored definition by id, in the order of the definition.

    Each has `deps`, a list of strings. Entries whose id is not a string are skipped.
    """
    found: dict[str, Row] = {}
    for entry in _entries(definition, "nodes"):
        node_id = stored_json.text(entry.get("id"))
        if node_id is not None:
            deps = [dep for dep in stored_json.sequence(entry.get("deps")) if isinstance(dep, str)]
            found[node_id] = entry | {"deps": deps}
    return found


def entry_of(entries: Row, node_id: str) -> Row | None:
    """Return the entry of a node, which may be a node of an item, from `all_entries`."""
    return entries.get(_KEY.sub("[]", node_id))


def without_keys(node_id: str) -> tuple[str, list[str]]:
    """Return a node's id without keys, such as `cut[]/encode`, and the keys, each as `[key]`."""
    return _KEY.sub("[]", node_id), _KEY.findall(node_id)


def all_entries(definition: Any) -> dict[str, Row]:
    """Return the entries of a stored definition, and the entries in the bodies of maps.

    The key is the node's id; in a body the item's key is left out, as in `cut[]/encode`. The ids in
    an entry of a body are relative to the item. Entries whose id is not a string are skipped.
    """
    found: dict[str, Row] = {}
    todo = [("", definition, "nodes")]
    while todo:
        prefix, owner, key = todo.pop()
        for entry in _entries(owner, key):
            if (node_id := stored_json.text(entry.get("id"))) is None:
                continue
            place = prefix + node_id
            found[place] = entry
            if "map" in entry:
                todo.append((f"{place}[]/", entry["map"], "body"))
    return found


def _entries(owner: Any, key: str) -> list[Row]:
    listed = stored_json.sequence(stored_json.mapping(owner).get(key))
    return [stored_json.mapping(each) for each in listed]


# --- the nodes of a map's items ----------------------------------------------------------------


def listed(conn: db.Connection, run_id: str, key: str) -> list[str] | None:
    """Return the node ids of the items with this key; loops have only their first and begun rounds.

    Nodes of an open item that have no job yet come last. Returns None without such an item.
    """
    items = statements.overview.items(conn, run=run_id, keys=[key])
    if not items:
        return None
    entries = all_entries(statements.runs.definition(conn, run_id=run_id))
    states = {
        row["node_id"]: row["status"]
        for row in statements.overview.nodes_of_item(conn, run=run_id, key=key)
    }
    parts = map(item_ids.split, list(states))
    own = {part.map_id for part in parts if part is not None and part.key == key}
    for item in items:
        goes_on = item["state"] in ("open", "waiting") and item["error"] is None
        if goes_on and item["map_id"] in own:
            for node_id in _body(entries, item["map_id"]):
                name = f"{item_ids.folder(item['map_id'], key)}/{node_id}"
                states.setdefault(name, "waiting")
    rounds = {name: each for name in states if (each := _round(entries, name)) is not None}
    begun: dict[str, int] = {}
    for name, (loop, number) in rounds.items():
        if states[name] not in ("waiting", "skipped"):
            begun[loop] = max(begun.get(loop, 1), number)
    later = {name for name, (loop, number) in rounds.items() if number > begun.get(loop, 1)}
    return [name for name in states if name not in later]


def of_round(conn: db.Connection, run_id: str, number: int) -> list[str] | None:
    """Return the ids of the nodes of this round, in all loops of a run, or None without one."""
    definition = statements.runs.definition(conn, run_id=run_id)
    entries = graph_nodes(definition).items()
    return [name for name, entry in entries if entry.get("round") == number] or None


def waiting(
    conn: db.Connection, run_id: str, definition: Any, names: Collection[str]
) -> dict[str, Row]:
    """Return the entries of the `names` that are nodes of items and have no job yet."""
    found: dict[str, Row] = {}
    split = {name: parts for name in names if (parts := item_ids.split(name)) is not None}
    if not split:
        return found
    keys = {parts.key for parts in split.values()}
    items = {
        (row["map_id"], row["key"])
        for row in statements.overview.items(conn, run=run_id, keys=list(keys))
    }
    entries = all_entries(definition)
    for name, parts in split.items():
        entry = entry_of(entries, name)
        if entry is not None and (parts.map_id, parts.key) in items:
            found[name] = {**entry, "id": name, "deps": []}
    return found


def loops(definition: Any, names: Iterable[str]) -> dict[str, Row]:
    """Return the entries of the `names` that are rounds in items, and of their loops."""
    found: dict[str, Row] = {}
    names = [name for name in names if item_ids.of_item(name) and "#" in name]
    entries = all_entries(definition) if names else {}
    for name in names:
        if (found_round := _round(entries, name)) is not None:
            loop, number = found_round
            found[name] = {"arm": loop, "round": number}
            found[loop] = entry_of(entries, loop) or {}
    return found


def dependencies(definition: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the nodes that each node waits for, for the graph and for the items of `names`.

    The first nodes of an item wait for the nodes before its map. The map waits for the last nodes
    of its items.
    """
    entries = all_entries(definition)
    deps = {name: node["deps"] for name, node in graph_nodes(definition).items()}
    items: set[tuple[str, str]] = set()
    for name in names:
        while (parts := item_ids.split(name)) is not None:
            items.add((parts.map_id, parts.key))
            name = parts.map_id
    before: dict[str, list[str]] = {}
    for map_id, key in sorted(items, key=lambda item: item[0].count("[")):
        if map_id not in before:
            before[map_id] = deps.get(map_id, [])
            deps[map_id] = [*before[map_id]]
        first = before[map_id]
        start = f"{item_ids.folder(map_id, key)}/"
        own = {
            start + name: [start + dep for dep in d] for name, d in _body(entries, map_id).items()
        }
        inner = {dep for d in own.values() for dep in d}
        deps |= {name: d or first for name, d in own.items()}
        deps[map_id].extend(name for name in own if name not in inner)
    return deps


def _body(entries: Row, map_id: str) -> dict[str, list[str]]:
    """Return the ids of a map's nodes relative to an item, with their dependencies."""
    of_map = stored_json.mapping((entry_of(entries, map_id) or {}).get("map"))
    nodes = graph_nodes({"nodes": of_map.get("body")})
    return {name: node["deps"] for name, node in nodes.items()}


def _round(entries: Row, name: str) -> tuple[str, int] | None:
    """Return the loop and the number of the round that a node belongs to, or None."""
    entry = entry_of(entries, name) or {}
    arm, number = stored_json.text(entry.get("arm")), entry.get("round")
    if arm is None or not isinstance(number, int):
        return None
    # The ids of a map's body are relative to the item.
    return name.removesuffix(entry["id"]) + arm, number


def hint(conn: db.Connection, run_id: str, name: str) -> str:
    """Return "; did you mean ...?" for the id of a node that a run does not have, or "".

    In the id of an item or of its node, the key or another part may be wrong. The name of a node
    without a job yet counts as right.
    """
    if len(name) > errors.COMPARED_CHARS or not payload.is_storable(run_id):
        return ""
    entries = all_entries(statements.runs.definition(conn, run_id=run_id))
    known = {*entries, *(f"{each}[]" for each, entry in entries.items() if "map" in entry)}
    shape, keys = without_keys(name)
    parts = item_ids.split(name)
    if parts is None or shape not in known:
        meant = errors.closest(shape, known)
        if meant is None or meant == shape or meant.count("[]") != len(keys):
            return ""
        for key in keys:
            meant = meant.replace("[]", key, 1)
        return errors.hint(name, [meant])
    own = _keys(conn, run_id, parts.key, parts.map_id)
    meant = None if parts.key in own else errors.closest(parts.key, own)
    rest = name.removeprefix(item_ids.folder(parts.map_id, parts.key))
    return errors.hint(name, [item_ids.folder(parts.map_id, meant) + rest] if meant else [])


def key_hint(conn: db.Connection, run_id: str, key: str, map_id: str | None = None) -> str:
    """Return "; did you mean ...?" for a key that no item has, of one map or of all; else ""."""
    return errors.hint(key, _keys(conn, run_id, key, map_id))


def _keys(conn: db.Connection, run_id: str, like: str, map_id: str | None) -> list[str]:
    given = {"run_id": run_id, "map": map_id, "key": like}
    if not all(map(payload.is_storable, given.values())):
        return []
    return [row["key"] for row in statements.maps.keys_like(conn, **given)]
