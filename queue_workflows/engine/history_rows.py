"""Read a run or a job with its events, as the public `history` module shows it, and find ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

_UUID = "00000000-0000-0000-0000-000000000000"


def run(conn: db.Connection, run_id: str) -> Row | None:
    """Return the run with its `definition`, `elapsed_s` since it was queued, and `read_at`."""
    return conn.execute(statements.history_rows.run, {"run_id": run_id}).fetchone()


def nodes(conn: db.Connection, run_id: str, node_ids: Sequence[str] | None) -> list[Row]:
    """Return the jobs of a run in the order in which they were queued; None: of all its nodes."""
    parameters = {"run_id": run_id, "nodes": node_ids}
    return conn.execute(statements.history_rows.nodes, parameters).fetchall()


def node(conn: db.Connection, job_id: str) -> Row | None:
    """Return one node job, or None."""
    return conn.execute(statements.history_rows.node, {"job": job_id}).fetchone()


def ingest_job(conn: db.Connection, job_id: str) -> Row | None:
    """Return one ingest job, or None."""
    return conn.execute(statements.history_rows.ingest_job, {"job": job_id}).fetchone()


def node_events(conn: db.Connection, run_id: str, node_ids: Sequence[str] | None) -> list[Row]:
    """Return the events of a run's nodes, the oldest first; None: of all its nodes."""
    parameters = {"run_id": run_id, "nodes": node_ids}
    return conn.execute(statements.history_rows.node_events, parameters).fetchall()


def ingest_events(conn: db.Connection, job_id: str) -> list[Row]:
    """Return the events of an ingest job, the oldest first, each with its `actor`."""
    return conn.execute(statements.history_rows.ingest_events, {"job": job_id}).fetchall()


def further_node_ids(
    conn: db.Connection, run_id: str, but: Sequence[str], *, after: str, limit: int
) -> list[str]:
    """Return the ids of a run's queued nodes beside the given ones, behind `after`, in order."""
    values = {"run_id": run_id, "but": [*but], "after": after, "limit": limit}
    rows = conn.execute(statements.history_rows.further_node_ids, values).fetchall()
    return [row["node_id"] for row in rows]


def node_counts(conn: db.Connection, run_id: str) -> dict[str, int]:
    """Return how many nodes of a run have each status."""
    rows = conn.execute(statements.history_rows.node_counts, {"run_id": run_id}).fetchall()
    return {row["status"]: row["n"] for row in rows}


def count_item_nodes(conn: db.Connection, run_id: str) -> int:
    """Return how many nodes of a run belong to items of maps."""
    row = conn.execute(statements.history_rows.count_item_nodes, {"run_id": run_id}).fetchone()
    return row["n"] if row else 0


def starting_with(conn: db.Connection, prefix: str, *, limit: int) -> list[Row]:
    """Return runs and jobs whose id is a UUID with this prefix; at most `limit` of each kind.

    Each row has `kind` and `id`. The ids are ranges of the primary keys: UUIDs have one form, so
    that every collation orders them by their digits. Ids of another form, which apps give, are not
    found.
    """
    low, high = prefix + _UUID[len(prefix) :], prefix + _UUID.replace("0", "f")[len(prefix) :]
    if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", low):
        return []
    values = {"prefix": prefix, "low": low, "high": high, "limit": limit}
    return conn.execute(statements.history_rows.ids_in_range, values).fetchall()


def clock(conn: db.Connection) -> datetime:
    """Return the time of the database."""
    row = conn.execute(statements.history_rows.clock).fetchone()
    assert row is not None
    return row["now"]


def changes(conn: db.Connection, since: datetime, after: Row | None, limit: int) -> list[Row]:
    """Return events of jobs of both kinds from `since` on, in order, after the event `after`."""
    place = after or {"created_at": None, "kind": None, "id": None}
    values = {"since": since, "at": place["created_at"], "kind": place["kind"], "id": place["id"]}
    return conn.execute(statements.history_rows.changes, values | {"limit": limit}).fetchall()


def run_states(
    conn: db.Connection, ids: Sequence[str], *, recent_s: float, limit: int
) -> list[Row]:
    """Return the state of these runs, and of those that were queued within `recent_s` seconds."""
    values = {"ids": list(ids), "recent_s": recent_s, "limit": limit}
    return conn.execute(statements.history_rows.run_states, values).fetchall()
