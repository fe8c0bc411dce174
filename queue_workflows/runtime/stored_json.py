"""Read stored JSON of unchecked shape, without raising."""

from __future__ import annotations

import re
from typing import Any, cast

from queue_workflows.types import Row

_KEY = re.compile(r"\[[^\]]*\]")
"""The key of an item in the id of a node."""


def mapping(value: Any) -> Row:
    """Return the value if it is a JSON object, else an empty dict."""
    return cast("Row", value) if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Return the value if it is a JSON array, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def text(value: Any) -> str | None:
    """Return the value if it is a string, else None."""
    return value if isinstance(value, str) else None


def texts(value: Any) -> list[str]:
    """Return the strings of a JSON array; without any other value, an empty list."""
    return [each for each in sequence(value) if isinstance(each, str)]


def number(value: Any) -> float | None:
    """Return the value if it is a number that a float can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def graph_nodes(definition: Any) -> dict[str, Row]:
    """Return the nodes of a stored definition by id, in the order of the definition.

    Each has `deps`, a list of strings. Entries whose id is not a string are skipped.
    """
    found: dict[str, Row] = {}
    for entry in map(mapping, sequence(mapping(definition).get("nodes"))):
        node_id = text(entry.get("id"))
        if node_id is not None:
            deps = [dep for dep in sequence(entry.get("deps")) if isinstance(dep, str)]
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
        for entry in map(mapping, sequence(mapping(owner).get(key))):
            place = f"{prefix}{entry.get('id')}"
            found[place] = entry
            if "map" in entry:
                todo.append((f"{place}[]/", entry["map"], "body"))
    return found
