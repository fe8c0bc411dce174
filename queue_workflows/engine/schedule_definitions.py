"""Store, mark and read the rows of `schedules`.

Each function takes part in the transaction of its connection. Only the app that stored a schedule
of its code replaces it or marks it as gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.schedule import definition
from queue_workflows.types import Row, Rows

PATIENCE_S = 60.0
"""Seconds after which an instant that no scheduler fires counts as late."""


def encoded(schedule: definition.Schedule) -> tuple[dict[str, Any], str]:
    """Return the columns of a schedule and their digest; raise for what JSON cannot carry."""
    values = {name: getattr(schedule, name) for name in definition.COLUMNS}
    for name in ("args", "inputs"):
        values[name] = payload.encode(dict(values[name] or {}), f"{name} of {schedule.name!r}")
    if values["headers"] is not None:
        values["headers"] = payload.encode(dict(values["headers"]), f"headers of {schedule.name!r}")
    values["on_failure"] = schedule.on_failure is not None
    whole = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    return values, whole[:32]


def put(conn: db.Connection, schedule: definition.Schedule, app: str | None = None) -> Row | None:
    """Insert a schedule, or replace its definition; return `inserted`, or None if it is the same.

    `app`: whose code has it; None for a schedule of the table. Raises `InvalidConfig` if the name
    is that of a schedule of the table, or of another app that still has it.
    """
    values, digest = encoded(schedule)
    source = "table" if app is None else "code"
    values |= {"source": source, "app": app, "definition_hash": digest}
    values["columns"] = [*definition.COLUMNS]
    found = statements.schedule_definitions.put(conn, **values)
    if found is not None:
        return found
    owner = statements.schedule_definitions.owner(conn, name=schedule.name)
    if owner is not None and (owner["source"], owner["app"]) != (source, app):
        raise errors.InvalidConfig(_taken(schedule.name, owner))
    return None


def _taken(name: str, owner: Mapping[str, Any]) -> str:
    whose = "the table" if owner["app"] is None else f"code, of app {owner['app']!r:.100}"
    return (
        f"schedule {name!r} exists, from {whose}: rename it, or, if that one is not needed any "
        f"more, `queue-workflows schedules remove {name!r}`"
    )


def find(
    conn: db.Connection,
    name: str | None = None,
    *,
    troubled: bool = False,
    limit: int | None = None,
) -> Rows:
    """Return schedules by name, with the outcomes of their last fires.

    `troubled`: only those that fire, or should, and have a problem.
    """
    return statements.schedule_definitions.find(
        conn, name=name, troubled=troubled, limit=limit, patience_s=PATIENCE_S
    )
