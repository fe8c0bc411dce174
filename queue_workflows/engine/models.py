"""Record GPU models' sizes and load times, flag unserved ones, store load and unload requests."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row


def publish_sizes(conn: db.Connection, host: str, sizes: dict[str, float]) -> None:
    """Write the GPU memory in GB that each model needs, as this host registers it; 0: unknown."""
    names = list(sizes)
    values: dict[str, Any] = {"host": host, "models": names}
    values["sizes"] = [sizes[name] or None for name in names]
    conn.execute(statements.models.publish_sizes, values)


def learn_load(conn: db.Connection, host: str | None, model: str | None, seconds: float) -> None:
    """Let the moving average of a host's loads of a model follow this one."""
    values = {"host": host, "model": model, "seconds": seconds}
    conn.execute(statements.models.learn_load, values, prepare=True)


def prune(conn: db.Connection) -> int:
    """Delete measured times that are older than 30 days, of hosts without a worker."""
    return conn.execute(statements.models.prune).rowcount


def unserved(conn: db.Connection) -> list[Row]:
    """Return the models ('': none) whose waiting jobs no live worker takes, or that are flagged so.

    Each has model, reason (no_worker, off, vram, model; None: a worker can take them), detail and
    flagged (the reason of its flag, or None).
    """
    return conn.execute(statements.models.unserved, prepare=True).fetchall()


def flag(conn: db.Connection, row: Row) -> bool:
    """Flag a model of `unserved`, with an event for the first 100 of its jobs; False: it was."""
    if conn.execute(statements.models.flag, row).rowcount == 0:
        return False
    _log(conn, row | {"event": "unassignable"})
    return True


def unflag(conn: db.Connection, model: str) -> bool:
    """Delete the flag of a model, with an event for the first 100 of its jobs that still wait.

    False: it had none.
    """
    values: dict[str, Any] = {"model": model, "event": "assignable", "reason": None, "detail": None}
    if conn.execute(statements.models.unflag, values).rowcount == 0:
        return False
    _log(conn, values)
    return True


def _log(conn: db.Connection, values: dict[str, Any]) -> None:
    with_model = statements.models.log_for_model
    conn.execute(with_model if values["model"] else statements.models.log_without_model, values)


def flagged(conn: db.Connection) -> list[Row]:
    """Return the flags: model (None: jobs without one), reason, detail, since, jobs (<= 10,000)."""
    return conn.execute(statements.models.flagged).fetchall()


def request(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Write the request for a host (worker "") or one worker; return its row.

    A trigger wakes the workers.
    """
    row = conn.execute(statements.models.request, values).fetchone()
    assert row is not None
    return row


def newest_request(conn: db.Connection, *, host: str, worker_id: str, after: int) -> Row | None:
    """Return the newest request for a worker past number `after`, or None.

    A request from before the worker started is not for it.
    """
    values = {"host": host, "worker": worker_id, "after": after}
    return conn.execute(statements.models.newest_request, values, prepare=True).fetchone()


def on_workers(conn: db.Connection, stale_after_s: float, host: str | None = None) -> list[Row]:
    """Return the gpu workers seen within a day, of one host or of all, with their models.

    `model` and `request` as the worker reported them, or None; `known_models` of its host; `gpus`
    of its host's latest sample within a minute, or None.
    """
    values = {"stale_s": stale_after_s, "host": host}
    return conn.execute(statements.models.on_workers, values).fetchall()
