"""Store the items of maps, count those that ended, open the next ones, and end the maps' nodes.

Each function takes part in the transaction of its connection, which holds the lock on the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from queue_workflows import db, errors
from queue_workflows.db import statements
from queue_workflows.types import Unreadable


class Limits(NamedTuple):
    """How many items are open at most, how many follow at once, and how many may fail."""

    at_once: int
    refill: int
    may_fail: int


class Item(NamedTuple):
    """The value of an item; `error`: why it fails or has failed, None if nothing of it has."""

    value: Any
    error: str | None


class Step(NamedTuple):
    """The counters of a map, and the items that were opened, as `{"key", "item"}`."""

    items: list[dict[str, Any]]
    total: int
    done: int
    failed: int
    open: int
    may_fail: int


def open_map(
    conn: db.Connection,
    run_id: str,
    map_id: str,
    items_json: str,
    limits: Limits,
    nodes: int,
    root: str,
) -> str:
    """Seal the items of a map, a JSON array of `{"key", "item"}`, unless that was done.

    Returns `sealed`, `again` (a new generation of the run counts its items again) or `open` (it
    was opened in this generation). `nodes`: how many nodes the items have; `root`: the map of the
    definition around it.
    """
    parameters = {"run_id": run_id, "map": map_id, "items": items_json, "nodes": nodes}
    parameters |= {**limits._asdict(), "root": root}
    row = conn.execute(statements.maps.open_map, parameters).fetchone()
    assert row is not None
    return row["done"]


def step(
    conn: db.Connection, run_id: str, map_id: str, done: Iterable[str], failed_json: str
) -> Step | None:
    """Count items that have ended (`failed_json`: errors by key) and open the next ones.

    Returns None if there is no such map. Raises `UnreadableRow` for items that cannot be loaded.
    """
    parameters = {"run_id": run_id, "map": map_id, "done": list(done), "failed": failed_json}
    row = conn.execute(statements.maps.step, parameters, prepare=True).fetchone()
    found: Any = row["step"] if row else None
    if isinstance(found, Unreadable):
        raise errors.UnreadableRow(f"items of map {map_id!r} cannot be read: {found.reason}")
    return None if found is None else Step(**found)


def close(conn: db.Connection, run_id: str, map_id: str, key: str, count: int) -> None:
    """Let the last `count` opened items of a map wait to be opened again, from this key on."""
    parameters = {"run_id": run_id, "map": map_id, "key": key, "count": count}
    conn.execute(statements.maps.close, parameters)


def complete(
    conn: db.Connection, run_id: str, map_id: str, result: str, path: Iterable[str], limit: int
) -> int:
    """Complete the node of a map; return the size of its output in bytes.

    Writes nothing if the size exceeds `limit`. `result`, `path`: see `graph.Map`.
    """
    parameters = {"run_id": run_id, "map": map_id, "result": result}
    parameters |= {"path": list(path), "limit": limit}
    row = conn.execute(statements.maps.complete, parameters).fetchone()
    assert row is not None
    return row["size"]


def fail(conn: db.Connection, run_id: str, map_id: str, error: str) -> None:
    """Fail the node of a map."""
    conn.execute(statements.maps.fail, {"run_id": run_id, "map": map_id, "error": error})


def count_nodes(conn: db.Connection, run_id: str, maps: Iterable[str]) -> int:
    """Return how many nodes the items of these maps have, with those of maps in the items."""
    parameters = {"run_id": run_id, "maps": list(maps)}
    row = conn.execute(statements.maps.nodes, parameters).fetchone()
    return row["n"] if row else 0


def generation(conn: db.Connection, run_id: str, map_id: str) -> int | None:
    """Return the generation in which a map was opened last; None: it was not opened."""
    parameters = {"run_id": run_id, "map": map_id}
    row = conn.execute(statements.maps.generation, parameters, prepare=True).fetchone()
    return row["generation"] if row else None


def opened(conn: db.Connection, run_id: str, map_id: str) -> dict[str, Item]:
    """Return the items that were opened and have not ended, by key."""
    rows = conn.execute(statements.maps.opened, {"run_id": run_id, "map": map_id}).fetchall()
    return {row["key"]: Item(row["item"], row["error"]) for row in rows}


def items(conn: db.Connection, run_id: str, map_id: str, keys: Iterable[str]) -> dict[str, Item]:
    """Return the items with these keys, by key."""
    parameters = {"run_id": run_id, "map": map_id, "keys": list(keys)}
    rows = conn.execute(statements.maps.items, parameters, prepare=True).fetchall()
    return {row["key"]: Item(row["item"], row["error"]) for row in rows}


def note_errors(conn: db.Connection, run_id: str, map_id: str, errors_json: str) -> None:
    """Store why items fail (`errors_json`: errors by key) that still have open nodes.

    An item that has such an error already keeps it. One that has ended is left alone.
    """
    parameters = {"run_id": run_id, "map": map_id, "errors": errors_json}
    conn.execute(statements.maps.note_errors, parameters)


def first_failure(conn: db.Connection, run_id: str, map_id: str) -> tuple[str, str] | None:
    """Return key and error of the first item that failed; None if none did."""
    parameters = {"run_id": run_id, "map": map_id}
    row = conn.execute(statements.maps.first_failure, parameters).fetchone()
    return (row["key"], row["error"] or "no error was given") if row else None


def reopen_item(conn: db.Connection, run_id: str, map_id: str, key: str) -> None:
    """Let an item of a map wait again; the map counts its items again in the next generation."""
    conn.execute(statements.maps.reopen_item, {"run_id": run_id, "map": map_id, "key": key})


def drop(conn: db.Connection, run_id: str, map_id: str) -> None:
    """Delete the items of a map, with their nodes and the maps inside them."""
    parameters = {"run_id": run_id, "inside": f"{map_id}["}
    conn.execute(statements.maps.drop_nodes, parameters)
    conn.execute(statements.maps.drop, {"run_id": run_id, "map": map_id, "inside": f"{map_id}["})


def running_inside(conn: db.Connection, run_id: str, map_id: str) -> str | None:
    """Return a node of an item of this map that runs, or None."""
    parameters = {"run_id": run_id, "inside": f"{map_id}["}
    row = conn.execute(statements.maps.running_inside, parameters).fetchone()
    return row["node_id"] if row else None


def states(
    conn: db.Connection, run_id: str, nodes: Iterable[str]
) -> Mapping[str, tuple[str, str | None]]:
    """Return status and error of those of these nodes that have a row."""
    parameters = {"run_id": run_id, "nodes": list(nodes)}
    rows = conn.execute(statements.maps.states, parameters, prepare=True).fetchall()
    return {row["node_id"]: (row["status"], row["error"]) for row in rows}
