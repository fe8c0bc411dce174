"""Read what commands display: one run and its nodes, and the system in counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import runs
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

LISTED = 50
"""Rows of each list in `queue_lists`; apps rely on the number."""


# --- one run -----------------------------------------------------------------------------------


def run_head(conn: db.Connection, run_id: str) -> Row | None:
    """Return a run without definition and context, with `elapsed_s` since its submit; or None."""
    return conn.execute(statements.overview.run_head, {"run": run_id}).fetchone()


def steps(conn: db.Connection, run_id: str) -> list[Row]:
    """Return for each step how many nodes have each status; a map's nodes are those of its items.

    `elapsed_s` from the first start to the last end, or to now while a node has not ended; None
    before the first start.
    """
    return conn.execute(statements.overview.steps, {"run": run_id}).fetchall()


def nodes(conn: db.Connection, run_id: str, *, limit: int, live_only: bool) -> list[Row]:
    """Return a run's nodes as they are shown, those that run, wait for input or failed first.

    `elapsed_s` until the end, or now; None before the start. `live_only`: those alone, and the
    queued ones of which an attempt failed.
    """
    given = {"run": run_id, "live_only": live_only, "limit": limit}
    return conn.execute(statements.overview.nodes, given).fetchall()


def maps(conn: db.Connection, run_id: str) -> list[Row]:
    """Return the maps of a run's definition: node_id, total, done, failed, open, nodes."""
    return conn.execute(statements.overview.maps, {"run": run_id}).fetchall()


def failed_items(conn: db.Connection, run_id: str, map_id: str, *, limit: int) -> list[Row]:
    """Return the first items of a map that failed: key, error."""
    given = {"run": run_id, "map": map_id, "limit": limit}
    return conn.execute(statements.overview.failed_items, given).fetchall()


def nodes_of_item(conn: db.Connection, run_id: str, key: str) -> dict[str, str]:
    """Return the states of the nodes that the items with this key have, by node id."""
    rows = conn.execute(statements.overview.nodes_of_item, {"run": run_id, "key": key}).fetchall()
    return {row["node_id"]: row["status"] for row in rows}


def items(conn: db.Connection, run_id: str, keys: Iterable[str]) -> list[Row]:
    """Return the items with these keys: map_id, key, error, state.

    `state`: waiting, open, done, failed or cancelled. An open item with an error goes on no more.
    """
    given = {"run": run_id, "keys": list(keys)}
    return conn.execute(statements.overview.items, given).fetchall()


def nodes_of_round(conn: db.Connection, run_id: str, number: int) -> list[str] | None:
    """Return the ids of the nodes of this round, in all loops of a run's graph; None: no node."""
    definition = runs.definition(conn, run_id)
    entries = stored_json.graph_nodes(definition).items()
    return [name for name, entry in entries if entry.get("round") == number] or None


def map_state(conn: db.Connection, run_id: str, map_id: str) -> Row | None:
    """Return total, done, failed and open items of a map; None if it has none yet."""
    return conn.execute(statements.overview.map_state, {"run": run_id, "map": map_id}).fetchone()


def node_seconds(conn: db.Connection, run_id: str) -> dict[str, float]:
    """Return how long the handler of each completed node took, by node id."""
    rows = conn.execute(statements.overview.node_seconds, {"run": run_id}).fetchall()
    return {row["node_id"]: row["seconds"] for row in rows}


def node_counts(conn: db.Connection, run_id: str) -> dict[str, int]:
    """Return how many nodes of a run have each status."""
    rows = conn.execute(statements.overview.node_counts, {"run": run_id}).fetchall()
    return {row["status"]: row["n"] for row in rows}


def completed_by(conn: db.Connection, run_id: str) -> list[Row]:
    """Return who completed nodes of a run: host_label, queue, worker_id, nodes, seconds."""
    return conn.execute(statements.overview.completed_by, {"run": run_id}).fetchall()


def crashes(conn: db.Connection, run_id: str) -> int:
    """Return how often a node of the run was taken back from a worker that died."""
    return _count(conn, statements.overview.crashes, {"run": run_id})


def failures(conn: db.Connection, run_id: str, *, limit: int) -> list[Row]:
    """Return a run's failed nodes, the first to fail first: node_id, error, traceback (or None)."""
    return conn.execute(statements.overview.failures, {"run": run_id, "limit": limit}).fetchall()


def runs_ahead(conn: db.Connection, run_id: str) -> Row:
    """Return the earlier runs that are no less urgent and have work to do now: n, names, first.

    `first`: the id of the oldest. A run that only waits for a person does not count.
    """
    row = conn.execute(statements.overview.runs_ahead, {"run": run_id}).fetchone()
    assert row is not None
    return row


# --- any id ------------------------------------------------------------------------------------


def find(conn: db.Connection, any_id: str, *, jobs_first: bool = False) -> Row | None:
    """Return what has this id, a run before a job: kind, status, run_id, name; or None.

    `kind`: `run`, `node job` or `ingest job`. `name`: the workflow, node id or task. Ids
    are chosen at the insert, so a run and a job may share one.
    """
    given = {"id": any_id, "jobs_first": jobs_first}
    return conn.execute(statements.overview.find, given).fetchone()


def running_under(conn: db.Connection, any_id: str) -> list[Row]:
    """Return the running jobs that have this id or belong to the run that has it.

    job_id, name (node id or task), queue, worker_id, host_label, pid (None: its worker is unknown).
    """
    return conn.execute(statements.overview.running_under, {"id": any_id}).fetchall()


# --- answers -----------------------------------------------------------------------------------


def waiting_inputs(conn: db.Connection, run_id: str | None, *, limit: int) -> list[Row]:
    """Return the input nodes that wait in live runs (of one run, if named), the longest wait first.

    run_id, workflow_name, node_id, job_id, input_spec (None: not stored yet), waiting_s, answered
    (whether an answer was submitted and not taken yet).
    """
    given = {"run": run_id, "limit": limit}
    return conn.execute(statements.overview.waiting_inputs, given).fetchall()


def has_answer(conn: db.Connection, run_id: str, node_id: str) -> bool:
    """Return whether an answer to the node was submitted and not taken yet."""
    given = {"run": run_id, "node": node_id}
    row = conn.execute(statements.overview.has_answer, given).fetchone()
    return bool(row and row["found"])


def took_default(conn: db.Connection, run_id: str, node_id: str) -> bool:
    """Return whether a completed input node took the default of its time-out, not an answer."""
    given = {"run": run_id, "node": node_id}
    row = conn.execute(statements.overview.took_default, given).fetchone()
    return bool(row and row["found"])


# --- the system --------------------------------------------------------------------------------


def queues(conn: db.Connection) -> list[Row]:
    """Return the queues with work, `queued` or `running`: queue, state, n, blocked, oldest_s.

    `blocked` counts jobs that may not start yet; `n` and `oldest_s` leave them out.
    """
    both = (statements.overview.queues[table] for table in reversed(statements.JOB_TABLES))
    return [row for query in both for row in conn.execute(query).fetchall()]


def queue_lists(conn: db.Connection) -> dict[str, Any]:
    """Return running and queued nodes of each DAG queue, at most LISTED each, and `counts`."""
    result: dict[str, Any] = {
        queue: {status: _listed(conn, queue, status) for status in ("running", "queued")}
        for queue in ("cpu", "gpu")
    }
    counts = {
        f"{queue}_{status}": 0 for queue in ("cpu", "gpu") for status in ("queued", "running")
    }
    for row in conn.execute(statements.overview.live_nodes).fetchall():
        counts[f"{row['queue']}_{row['status']}"] = row["n"]
    return result | {"counts": counts}


def _listed(conn: db.Connection, queue: str, status: str) -> list[Row]:
    given = {"queue": queue, "status": status, "limit": LISTED}
    return conn.execute(statements.overview.listed_nodes, given).fetchall()


def runs_by_status(conn: db.Connection) -> dict[str, int]:
    """Return how many runs have each status."""
    rows = conn.execute(statements.overview.runs_by_status).fetchall()
    return {row["status"]: row["n"] for row in rows}


def orchestration(conn: db.Connection, *, patience_s: float) -> dict[str, Any]:
    """Return what orchestrators have not done yet.

    `open_events`, `lag_s` (age of the oldest that is due, 0.0 for none), `answers` not taken yet,
    `awaiting_input` nodes, and `not_started`: ids (at most 50) of startable runs older than
    `patience_s`.
    """
    events = conn.execute(statements.overview.open_events).fetchone()
    assert events is not None
    late = conn.execute(statements.overview.late_runs, {"patience_s": patience_s}).fetchall()
    return {
        "open_events": events["n"],
        "lag_s": events["lag_s"],
        "answers": _count(conn, statements.overview.open_answers),
        "awaiting_input": _count(conn, statements.overview.nodes_awaiting_input),
        "not_started": [row["id"] for row in late],
    }


def _count(conn: db.Connection, query: bytes, values: dict[str, Any] | None = None) -> int:
    row = conn.execute(query, values).fetchone()
    assert row is not None
    return row["n"]


def claims_in_flight(conn: db.Connection) -> dict[str, list[str]]:
    """Return the ids of the running jobs, of both families, by their worker."""
    rows = conn.execute(statements.overview.claims_in_flight).fetchall()
    return {row["worker_id"]: row["ids"] for row in rows}


def foreign_work(conn: db.Connection, workflows: Iterable[str], tasks: Iterable[str]) -> list[Row]:
    """Return unfinished runs of other workflows and ingest jobs of other tasks: kind, name, n."""
    given = {"workflows": list(workflows), "tasks": list(tasks)}
    return conn.execute(statements.overview.foreign_work, given).fetchall()


def unfinished(conn: db.Connection) -> list[Row]:
    """Return workflows with unfinished runs, the oldest first: name, n, ids (3 oldest at most)."""
    return conn.execute(statements.overview.unfinished).fetchall()
