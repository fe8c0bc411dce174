"""Read the nodes of a stored definition, whatever SQL has written there."""

from __future__ import annotations

import re
from typing import Any

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
    """Return the entry of a node, or of a node of an item, out of what `all_entries` returned."""
    return entries.get(_KEY.sub("[]", node_id))


def without_keys(node_id: str) -> tuple[str, list[str]]:
    """Return a node's id as `all_entries` has it, `cut[]/encode`, and the keys, each as `[key]`."""
    return _KEY.sub("[]", node_id), _KEY.findall(node_id)


def all_entries(definition: Any) -> dict[str, Row]:
    """Return the entries of a stored definition, with those in the bodies of maps.

    The key is the node's id, in a body that of a node of any item: `cut[]/encode`. The ids in an
    entry of a body are relative to the item.
    """
    found: dict[str, Row] = {}
    todo = [("", definition, "nodes")]
    while todo:
        prefix, owner, key = todo.pop()
        for entry in _entries(owner, key):
            place = f"{prefix}{entry.get('id')}"
            found[place] = entry
            if "map" in entry:
                todo.append((f"{place}[]/", entry["map"], "body"))
    return found


def _entries(owner: Any, key: str) -> list[Row]:
    listed = stored_json.sequence(stored_json.mapping(owner).get(key))
    return [stored_json.mapping(each) for each in listed]
