"""Read the ids of nodes that belong to items of maps, such as `cut[clip-7]/encode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from queue_workflows import errors

if TYPE_CHECKING:
    from queue_workflows.dag import graph

MAX_KEY_CHARS = 100
MAX_FOLDER_BYTES = 255
"""The longest folder name on common file systems, as an item's folder is named `cut[clip-7]`."""
MAX_ID_BYTES = 1000
"""The longest node id that fits into a row."""


class ItemNode(NamedTuple):
    """A node of an item: the id of its map's node, the item's key, and its id in the body."""

    map_id: str
    key: str
    inner: str
    """The node's id in the body, or `""` for the item itself."""


def split(node_id: str) -> ItemNode | None:
    """Return the parts of an item's node id, or of `cut[clip-7]`; None for any other node."""
    start, end = node_id.rfind("["), node_id.rfind("]")
    if not 0 < start < end - 1:
        return None
    return ItemNode(node_id[:start], node_id[start + 1 : end], node_id[end + 2 :])


def of_item(node_id: str) -> bool:
    """Return whether a node belongs to an item, which only ids with a bracket do."""
    return "[" in node_id


def folder(map_id: str, key: str) -> str:
    """Return the id of an item, which is also the path of its folder: `cut[clip-7]`."""
    return f"{map_id}[{key}]"


def node(of: graph.Graph, node_id: str) -> graph.Node | None:
    """Return the node of a definition for an id, which may be its id within an item."""
    parts = split(node_id)
    if parts is None:
        return of.nodes.get(node_id)
    owner = node(of, parts.map_id)
    return None if owner is None or owner.map is None else node(owner.map.body, parts.inner)


def keys(items: Any, field: str | None, map_id: str) -> list[str]:
    """Return the key of each item. Raises `InvalidPayload` that names the item and the reason.

    A key has 1 to 100 printable characters, without `/`, `[` and `]`, and no other item has it.
    """
    where = f"map {map_id!r}"
    if not isinstance(items, list):
        raise errors.InvalidPayload(f"{where}: a list is needed, not {_kind(items)}")
    found: dict[str, int] = {}
    for index, item in enumerate(cast("list[Any]", items)):
        key = _key(item, field, f"{where}: item {index + 1}")
        length = len(folder(map_id.rpartition("/")[2], key).encode(errors="replace"))
        if length > MAX_FOLDER_BYTES:
            raise errors.InvalidPayload(
                f"{where}: item {index + 1}: its key {key!r:.120} makes the name of its folder "
                f"{length} bytes long; at most {MAX_FOLDER_BYTES}"
            )
        if found.setdefault(key, index) != index:
            raise errors.InvalidPayload(
                f"{where}: items {found[key] + 1} and {index + 1} have the same key {key!r:.120}"
            )
    return list(found)


def _key(item: Any, field: str | None, where: str) -> str:
    value = item
    if field is not None:
        if not isinstance(item, Mapping) or field not in item:
            raise errors.InvalidPayload(f"{where} has no field {field!r}, which is the map's key")
        value = cast("Mapping[str, Any]", item)[field]
    elif isinstance(item, (dict, list)):
        raise errors.InvalidPayload(
            f"{where} is {_kind(value)}: name the field that is its key by 'key'"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise errors.InvalidPayload(f"{where}: its key is {_kind(value)}, not text or an integer")
    bad = not value.isprintable() or not {*"/[]"}.isdisjoint(value)
    if bad or not 1 <= len(value) <= MAX_KEY_CHARS:
        raise errors.InvalidPayload(
            f"{where}: {value!r:.120} is no key: 1 to {MAX_KEY_CHARS} printable characters "
            "without '/', '[' and ']'"
        )
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(cast("type[Any]", type(value)), "a number")
