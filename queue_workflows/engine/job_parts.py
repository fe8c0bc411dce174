"""Store what handlers stream under the claims of their jobs, and read it."""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import JsonDict, Row


def add(lease: job_tables.Lease, request: JsonDict) -> db.Script[JsonDict]:
    """Add parts of a claimed job, and wake its readers: `done`, or `lost` if the claim is lost.

    `request`: `first`, the number of the first part, `names`, and `parts` as JSON texts. Parts that
    are stored already stay as they are, so the same request may come again. Raises `RowRefused` if
    parts before `first` are missing: a reader would miss them.
    """
    given = {name: request[name] for name in ("first", "names", "parts")}
    statement = statements.job_parts.add[lease.table.name]
    row = yield from db.one(statement, job_tables.fence(lease, **given))
    assert row is not None
    if not row["held"]:
        return {"state": "lost"}
    if not row["follows"]:
        raise errors.RowRefused(
            f"job {lease.job_id!r}: an earlier batch of its stream was refused, so the parts from "
            f"{request['first']} on are not stored"
        )
    return {"state": "done"}


def behind(
    conn: db.Connection,
    job_id: str,
    place: tuple[int, int],
    *,
    name: str | None,
    limit: int,
    max_bytes: int,
) -> list[Row]:
    """Return the next parts of a job behind a claim and number, with `status` and `job_claim`.

    `part` is JSON text. `last_claim` and `last_seq`: the place of its last part, or None. `found`:
    how many there are up to `limit`, of which those beyond `max_bytes` are left out. One row
    without a part if there is none; no row: no such job.
    """
    if not payload.is_storable(job_id):
        return []
    parameters = {
        "job": job_id, "claim": place[0], "seq": place[1], "name": name, "limit": limit,
        "bytes": max_bytes,
    }  # fmt: skip
    return conn.execute(statements.job_parts.behind, parameters).fetchall()


def job_of_node(conn: db.Connection, run_id: str, node_id: str) -> str | None:
    """Return the id of the job of a node; None if the run has no such node, or not yet."""
    if not (payload.is_storable(run_id) and payload.is_storable(node_id)):
        return None
    parameters = {"run_id": run_id, "node_id": node_id}
    row = conn.execute(statements.job_parts.job_of_node, parameters).fetchone()
    return None if row is None else row["id"]


def streaming_nodes(
    conn: db.Connection, run_id: str, nodes: Sequence[str] | None, *, live: bool
) -> list[Row]:
    """Return the nodes of a run that have streamed, with the place of the last part of each.

    `live`: only those that have not ended, or have just now. `nodes`: only these.
    """
    parameters = {"run_id": run_id, "nodes": None if nodes is None else [*nodes], "live": live}
    return conn.execute(statements.job_parts.streaming_nodes, parameters).fetchall()
