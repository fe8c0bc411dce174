"""Record workers' reports and ends and their hosts' heartbeats; list workers, flag stale hosts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import claims
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

Needed: TypeAlias = tuple[str, str, str | None]
"""A queue, a node module, and the version that is needed of it or None: `<module>@<version>`."""


def beat(conn: db.Connection, values: dict[str, Any]) -> None:
    """Record that a host serves a queue, which clears the dead flag of its heartbeat."""
    conn.execute(statements.workers.beat, values)


def report(conn: db.Connection, values: dict[str, Any]) -> None:
    """Write a worker's own row and the heartbeat of its host and queue, in one statement.

    A worker that obeys controls and is off is `draining` while it has a job, else `paused` or
    `parked`; then the heartbeat is left to age.
    """
    conn.execute(statements.workers.report, values, prepare=True)


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
    for row in listing(conn, stale_s):
        claim = stored_json.mapping(stored_json.mapping(row["detail"]).get("claim"))
        nodes, versions = claim.get("nodes"), stored_json.texts(claim.get("versions"))
        for each in [each for each in missing if each[0] == row["queue"]]:
            _, module, version = each
            knows = nodes is None or module in stored_json.texts(nodes)
            if row["state"] != "dead" and knows and (version is None or version in versions):
                missing.discard(each)
    return missing


def fill_memory(
    conn: db.Connection, memory: Sequence[str], *, but: Sequence[str], stale_s: float
) -> bool:
    """Return whether live workers other than `but` have jobs that fill one of these memories.

    `memory`: ids as in the `memory` of their reports' detail.
    """
    values = {"memory": [*memory], "but": [*but], "stale_s": stale_s}
    return conn.execute(statements.workers.fill_memory, values).fetchone() is not None


def stop(conn: db.Connection, worker_id: str) -> None:
    """Record that a worker ended in good order."""
    conn.execute(statements.workers.stop, {"worker": worker_id})


def last_detail(conn: db.Connection, prefix: str) -> Row:
    """Return what the worker of a process reported of itself last; `prefix` begins its id.

    Empty if it never reported.
    """
    row = conn.execute(statements.workers.last_detail, {"prefix": prefix}).fetchone()
    detail: Any = row["detail"] if row else None
    return detail if isinstance(detail, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def record_death(conn: db.Connection, prefix: str, detail: str, *, orderly: bool = False) -> None:
    """Mark the workers of a process that has ended as dead, or as stopped if `orderly`.

    `prefix` begins their ids; `detail` is a JSON object with how the process ended.
    """
    values = {"prefix": prefix, "detail": detail, "orderly": orderly}
    conn.execute(statements.workers.record_death, values)


def clear_model(
    conn: db.Connection, host_label: str, queue: str, *, mark_stale: bool
) -> Row | None:
    """Clear the loaded model of a heartbeat; return the changed row, or None.

    `mark_stale` also sets `last_seen` back by an hour.
    """
    values = {"host": host_label, "queue": queue, "mark_stale": mark_stale}
    return conn.execute(statements.workers.clear_model, values).fetchone()


def clear_heartbeat(
    conn: db.Connection, host_label: str, queue: str, gone: str, live_s: float
) -> None:
    """Clear the model of a heartbeat and set it back by an hour for a worker that leaves.

    `gone` begins the worker's id. The heartbeat keeps its time while another worker of the host and
    queue lives, seen within `live_s` seconds: else that one would count as dead.
    """
    values = {"host": host_label, "queue": queue, "gone": gone, "live_s": live_s}
    conn.execute(statements.workers.clear_heartbeat, values)


def flag_stale(conn: db.Connection, stale_after_s: float) -> list[Row]:
    """Flag, once each, hosts with a stale heartbeat that own running jobs; return the flagged.

    Each row has `running_jobs`, the number of jobs that run under its label and queue.
    """
    return conn.execute(statements.workers.flag_stale, {"stale_s": stale_after_s}).fetchall()


def listing(conn: db.Connection, stale_after_s: float) -> list[Row]:
    """Return the worker processes seen within a day, each with age, model and what switches it off.

    A worker not seen for `stale_after_s` seconds is `dead`. `desired_state` is what is in force
    now; `until_s`: seconds until the switch ends, or None.
    """
    return conn.execute(statements.workers.list, {"stale_s": stale_after_s}).fetchall()


def switched_off(conn: db.Connection) -> list[Row]:
    """Return the control rows that are off now; queue `all` stands for every queue of its host."""
    return conn.execute(statements.workers.switched_off).fetchall()


def flagged(conn: db.Connection, host_label: str) -> list[Row]:
    """Return a host's queues that are flagged dead and not off: queue, flagged_at, age_s."""
    return conn.execute(statements.workers.flagged, {"host": host_label}).fetchall()


def count_heartbeats(conn: db.Connection, live_s: float) -> dict[str, int]:
    """Return the number of heartbeats of each queue that are younger than `live_s` seconds."""
    rows = conn.execute(statements.workers.count_heartbeats, {"live_s": live_s}).fetchall()
    return {row["queue"]: row["n"] for row in rows}


def prune(conn: db.Connection) -> int:
    """Delete worker rows that ended or were last seen over a day ago; return how many."""
    return conn.execute(statements.workers.prune).rowcount
