"""Read, close and postpone the outbox's events: finished nodes that wait to be dispatched.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row


def runs_with_events(
    conn: db.Connection, limit: int, *, undefined: bool = True, aside: Sequence[str] = ()
) -> list[str]:
    """Return the runs that have events to dispatch, the oldest event first.

    `undefined`: also runs that have no definition yet. `aside`: ids of runs to leave out.
    """
    parameters = {"undefined": undefined, "set_aside": list(aside), "limit": limit}
    rows = conn.execute(statements.outbox.runs_with_events, parameters, prepare=True).fetchall()
    return [row["run_id"] for row in rows]


def open_events(conn: db.Connection, run_id: str, limit: int, only: int | None = None) -> list[Row]:
    """Return a run's open events that are due, the oldest first; `only`: the one with this id.

    Each has `node_status` and `node_error`, those of its node now.
    """
    parameters = {"run_id": run_id, "only": only, "limit": limit}
    return conn.execute(statements.outbox.open_events, parameters, prepare=True).fetchall()


def close(conn: db.Connection, event_ids: Sequence[int], error: str | None = None) -> None:
    """Close events; `error`: why they are poison."""
    parameters = {"events": list(event_ids), "error": error}
    conn.execute(statements.outbox.close, parameters, prepare=True)


def postpone(conn: db.Connection, event_id: int, *, error: str, after_s: float) -> int:
    """Count a failed dispatch and make the event due again later; return how many failed."""
    parameters = {"event": event_id, "error": error, "after_s": after_s}
    row = conn.execute(statements.outbox.postpone, parameters).fetchone()
    return row["attempts"] if row else 0


def unprocessed(conn: db.Connection, limit: int) -> list[Row]:
    """Return open events, the oldest first."""
    return conn.execute(statements.outbox.unprocessed, {"limit": limit}).fetchall()


def count_unprocessed(conn: db.Connection) -> int:
    """Return how many events are open."""
    row = conn.execute(statements.outbox.count_unprocessed).fetchone()
    return row["n"] if row else 0
