"""Reopen a run that is over, so that its failed nodes or those from one node on run again."""

from __future__ import annotations

from queue_workflows import db, errors
from queue_workflows.dag import graph
from queue_workflows.engine import job_tables, node_names, nodes, retry_maps, runs
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row


def reopen(conn: db.Connection, run_id: str, *, from_node: str | None) -> Row:
    """Queue a finished run in a new generation; return its row.

    Completed nodes keep their outputs, except `from_node` and the nodes that depend on it; it may
    be an item of a map, as `cut[clip-7]`. Raises `UnknownJob` for no such run, node or item, and
    `InvalidConfig` for a run that is not over, a completed one without `from_node`, and while a
    node that would run again still runs.
    """
    run = runs.lock(conn, run_id)
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    if run["status"] not in TERMINAL_RUN_STATUSES:
        raise errors.InvalidConfig(
            f"run {run_id!r} is {run['status']}: only a finished one is retried"
        )
    if run["generation"] > job_tables.LAST_GENERATION - 2:
        raise errors.InvalidConfig(
            f"run {run_id!r} is in generation {run['generation']}, the last one that can be "
            "stored: submit it again as a new run"
        )
    if from_node is not None:
        again = _again(conn, run_id, from_node)
        _refuse_running(conn, run_id, again.nodes)
        retry_maps.refuse(conn, run_id, again)
        reopened = runs.reopen_nodes(conn, run_id, sorted(again.nodes))
        retry_maps.reset(conn, run_id, again)
    elif run["status"] == "completed":
        raise errors.InvalidConfig(f"run {run_id!r} is completed: name the node to retry from")
    else:
        reopened = runs.reopen(conn, run_id)
    assert reopened is not None
    return reopened


def _again(conn: db.Connection, run_id: str, node_id: str) -> retry_maps.Again:
    """Return a node and all that depends on it."""
    stored = runs.definition(conn, run_id)
    walk = None if stored is None else graph.read(stored)
    found = None if walk is None else retry_maps.find(walk, node_id)
    if found is None:
        meant = node_names.hint(conn, run_id, node_id)
        raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}{meant}")
    return found


def _refuse_running(conn: db.Connection, run_id: str, again: set[str]) -> None:
    """Raise `InvalidConfig` if one of these nodes still runs.

    It would record a result of the old generation beside the new one.
    """
    for node_id in sorted(nodes.running_among(conn, run_id, again)):
        raise errors.InvalidConfig(
            f"node {node_id!r} of run {run_id!r} still runs: retry once it has ended"
        )
