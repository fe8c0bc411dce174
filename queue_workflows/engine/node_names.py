"""Suggest the node or item of a run that a wrong name perhaps stands for."""

from __future__ import annotations

from queue_workflows import db, errors
from queue_workflows.dag import item_ids, payload
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json


def hint(conn: db.Connection, run_id: str, name: str) -> str:
    """Return "; did you mean ...?" for the id of a node that a run does not have, or "".

    In the id of an item, or of an item's node, the key may be wrong, or what is around it. A node
    that has no job yet has the right name.
    """
    if len(name) > errors.COMPARED_CHARS or not payload.is_storable(run_id):
        return ""
    entries = stored_json.all_entries(statements.runs.definition(conn, run_id=run_id))
    known = {*entries, *(f"{each}[]" for each, entry in entries.items() if "map" in entry)}
    shape, keys = stored_json.without_keys(name)
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
    """Return "; did you mean ...?" for a key that no item of the map has, or of all maps, or ""."""
    return errors.hint(key, _keys(conn, run_id, key, map_id))


def _keys(conn: db.Connection, run_id: str, like: str, map_id: str | None) -> list[str]:
    given = {"run_id": run_id, "map": map_id, "key": like}
    if not all(each is None or payload.is_storable(each) for each in given.values()):
        return []
    return [row["key"] for row in statements.maps.keys_like(conn, **given)]
