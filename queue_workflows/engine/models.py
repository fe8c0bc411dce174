"""Record GPU models' sizes and load times, flag unserved ones, store load and unload requests."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row


def flag(conn: db.Connection, row: Row) -> bool:
    """Flag a model of `unserved`, with an event for the first 100 of its jobs; False: it was."""
    if statements.models.flag(conn, **row) == 0:
        return False
    _log(conn, row | {"event": "unassignable"})
    return True


def unflag(conn: db.Connection, model: str) -> bool:
    """Delete the flag of a model, with an event for the first 100 of its jobs that still wait.

    False: it had none.
    """
    values: dict[str, Any] = {"model": model, "event": "assignable", "reason": None, "detail": None}
    if statements.models.unflag(conn, **values) == 0:
        return False
    _log(conn, values)
    return True


def _log(conn: db.Connection, values: dict[str, Any]) -> None:
    log = statements.models.log_for_model
    if not values["model"]:
        log = statements.models.log_without_model
    log(conn, **values)
