"""Lock, change and drop a run's queued nodes, and store its new definition, for an upgrade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row


def hold_queued(conn: db.Connection, run_id: str) -> set[str]:
    """Lock the queued nodes of a run and return their ids, without those that others have locked.

    No worker claims them before the transaction ends.
    """
    rows = conn.execute(statements.upgrades.hold_queued, {"run_id": run_id}).fetchall()
    return {row["node_id"] for row in rows}


def nodes(conn: db.Connection, run_id: str) -> list[Row]:
    """Return node_id, status, generation and is_map of a run's nodes, in the order of the queue."""
    return conn.execute(statements.upgrades.nodes, {"run_id": run_id}).fetchall()


def set_versions(conn: db.Connection, run_id: str, versions: Mapping[str, str | None]) -> None:
    """Set `required_version` of queued nodes."""
    given = {"run_id": run_id, "nodes": [*versions], "versions": [*versions.values()]}
    conn.execute(statements.upgrades.set_versions, given)


def drop_nodes(conn: db.Connection, run_id: str, node_ids: Sequence[str]) -> None:
    """Delete queued nodes."""
    conn.execute(statements.upgrades.drop_nodes, {"run_id": run_id, "nodes": [*node_ids]})


def move(
    conn: db.Connection, run_id: str, *, definition: str, digest: str, change: str
) -> Row | None:
    """Store another definition (JSON) and queue the run; return its row, or None if it has ended.

    `change`: what differs, a JSON object for the run's `upgrades`.
    """
    given = {"run_id": run_id, "definition": definition, "digest": digest, "change": change}
    return conn.execute(statements.upgrades.move, given).fetchone()
