"""Submit runs; reopen those that are over, so that failed nodes or those from one on run again.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import graph
from queue_workflows.db import check_violations, statements
from queue_workflows.engine import job_tables, node_names, retry_maps
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row


def submit(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Insert a run and return its row; `context` and `headers` are JSON texts.

    A status or mode other than the default needs the right to insert these columns. Raises
    `InvalidConfig` for a value that is none of its column's type.
    """
    statement = statements.runs.insert
    if (values["status"], values["mode"]) == ("queued", "node"):
        plain = values.setdefault("headers", None) is None
        statement = statements.runs.submit if plain else statements.runs.submit_with_headers
    with check_violations.of_columns("workflow_runs", values):
        return statement(conn, **values)


def reopen(conn: db.Connection, run_id: str, *, from_node: str | None) -> Row:
    """Queue a finished run in a new generation; return its row.

    Completed nodes keep their outputs, except `from_node` and the nodes that depend on it; it may
    be an item of a map, as `cut[clip-7]`. Raises `UnknownJob` for no such run, node or item, and
    `InvalidConfig` for a run that is not over, a completed one without `from_node`, and while a
    node that would run again still runs.
    """
    run = statements.runs.lock(conn, run_id=run_id)
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
        reopened = _reopen_nodes(conn, run_id, sorted(again.nodes))
        retry_maps.reset(conn, run_id, again)
    elif run["status"] == "completed":
        raise errors.InvalidConfig(f"run {run_id!r} is completed: name the node to retry from")
    else:
        reopened = statements.runs.reopen(conn, run_id=run_id)
    assert reopened is not None
    return reopened


def _again(conn: db.Connection, run_id: str, node_id: str) -> retry_maps.Again:
    """Return a node and all that depends on it."""
    stored = statements.runs.definition(conn, run_id=run_id)
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
    for node_id in sorted(statements.nodes.running_among(conn, run_id=run_id, nodes=[*again])):
        raise errors.InvalidConfig(
            f"node {node_id!r} of run {run_id!r} still runs: retry once it has ended"
        )


def _reopen_nodes(conn: db.Connection, run_id: str, node_ids: list[str]) -> Row | None:
    """Queue a run that is over, with these nodes to be run again, and return its row, or None.

    The run goes two generations on, and the nodes are cancelled in the one between, so that the
    start that follows opens them. Requests to end the nodes that still run are withdrawn.
    """
    row = statements.runs.reopen_two_generations_on(conn, run_id=run_id)
    if row is not None:
        between = row["generation"] - 1
        statements.runs.cancel_nodes_again(conn, run_id=run_id, generation=between, nodes=node_ids)
        statements.runs.withdraw_cancel_requests(conn, run_id=run_id)
    return row
