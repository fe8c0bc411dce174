"""Record workers' reports and ends and their hosts' heartbeats; list workers, flag stale hosts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import claims
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

Needed: TypeAlias = tuple[str, str, str | None]
"""A queue, a node module, and the version that is needed of it or None: `<module>@<version>`."""


def claim_detail(who: claims.Claimant) -> dict[str, Any]:
    """Return how a worker chooses jobs, for the detail of its report."""
    chosen: dict[str, Any] = {"newest": who.newest, "obey": who.obey}
    if who.versions:
        chosen["versions"] = who.versions
    if who.queue in config.DAG_QUEUES and (nodes := config.node_names()) is not None:
        chosen["nodes"] = nodes
    if who.queue == "gpu":
        chosen |= {"policy": who.policy, "grace_s": who.grace_s, "bound_s": who.bound_s}
    return chosen


def unknown_nodes(conn: db.Connection, needed: Collection[Needed], stale_s: float) -> set[Needed]:
    """Return what of `needed` no live worker may know: queue, node module, version key or None.

    A worker that is switched off counts as live. One that does not list its nodes may know any.
    """
    missing = set(needed)
    for row in statements.workers.list(conn, stale_s=stale_s):
        claim = stored_json.mapping(stored_json.mapping(row["detail"]).get("claim"))
        nodes, versions = claim.get("nodes"), stored_json.texts(claim.get("versions"))
        for each in [each for each in missing if each[0] == row["queue"]]:
            _, module, version = each
            knows = nodes is None or module in stored_json.texts(nodes)
            if row["state"] != "dead" and knows and (version is None or version in versions):
                missing.discard(each)
    return missing


def last_detail(conn: db.Connection, prefix: str) -> Row:
    """Return what the worker of a process reported of itself last; `prefix` begins its id.

    Empty if it never reported.
    """
    detail = statements.workers.last_detail(conn, prefix=prefix)
    return detail if isinstance(detail, dict) else {}  # pyright: ignore[reportUnknownVariableType]
