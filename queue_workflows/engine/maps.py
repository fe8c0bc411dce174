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


def step(
    conn: db.Connection, run_id: str, map_id: str, done: Iterable[str], failed_json: str
) -> Step | None:
    """Count items that have ended (`failed_json`: errors by key) and open the next ones.

    Returns None if there is no such map. Raises `UnreadableRow` for items that cannot be loaded.
    """
    found = statements.maps.step(
        conn, run_id=run_id, map=map_id, done=list(done), failed=failed_json
    )
    if isinstance(found, Unreadable):
        raise errors.UnreadableRow(f"items of map {map_id!r} cannot be read: {found.reason}")
    return None if found is None else Step(**found)


def opened(conn: db.Connection, run_id: str, map_id: str) -> dict[str, Item]:
    """Return the items that were opened and have not ended, by key."""
    return {
        row["key"]: Item(row["item"], row["error"])
        for row in statements.maps.opened(conn, run_id=run_id, map=map_id)
    }


def items(conn: db.Connection, run_id: str, map_id: str, keys: Iterable[str]) -> dict[str, Item]:
    """Return the items with these keys, by key."""
    return {
        row["key"]: Item(row["item"], row["error"])
        for row in statements.maps.items(conn, run_id=run_id, map=map_id, keys=list(keys))
    }


def first_failure(conn: db.Connection, run_id: str, map_id: str) -> tuple[str, str] | None:
    """Return key and error of the first item that failed; None if none did."""
    row = statements.maps.first_failure(conn, run_id=run_id, map=map_id)
    return (row["key"], row["error"] or "no error was given") if row else None


def drop(conn: db.Connection, run_id: str, map_id: str) -> None:
    """Delete the items of a map, with their nodes and the maps inside them."""
    statements.maps.drop_nodes(conn, run_id=run_id, inside=f"{map_id}[")
    statements.maps.drop(conn, run_id=run_id, map=map_id, inside=f"{map_id}[")


def states(
    conn: db.Connection, run_id: str, nodes: Iterable[str]
) -> Mapping[str, tuple[str, str | None]]:
    """Return status and error of those of these nodes that have a row."""
    return {
        row["node_id"]: (row["status"], row["error"])
        for row in statements.maps.states(conn, run_id=run_id, nodes=list(nodes))
    }
