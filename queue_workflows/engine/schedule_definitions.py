"""Store, mark and read the rows of `schedules`.

Each function takes part in the transaction of its connection. Only the app that stored a schedule
of its code replaces it or marks it as gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.schedule import definition
from queue_workflows.types import Row, Rows

PATIENCE_S = 60.0
"""Seconds after which an instant that no scheduler fires counts as late."""


def digests(conn: db.Connection, app: str) -> dict[str, str]:
    """Return the digest of each schedule that an app's code has stored, by name."""
    rows = conn.execute(statements.schedule_definitions.stored, {"app": app}).fetchall()
    return {row["name"]: row["definition_hash"] for row in rows}


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
    found = conn.execute(statements.schedule_definitions.put, values).fetchone()
    if found is not None:
        return found
    owner = conn.execute(statements.schedule_definitions.owner, {"name": schedule.name}).fetchone()
    if owner is not None and (owner["source"], owner["app"]) != (source, app):
        raise errors.InvalidConfig(_taken(schedule.name, owner))
    return None


def _taken(name: str, owner: Mapping[str, Any]) -> str:
    whose = "the table" if owner["app"] is None else f"code, of app {owner['app']!r:.100}"
    return (
        f"schedule {name!r} exists, from {whose}: rename it, or, if that one is not needed any "
        f"more, `queue-workflows schedules remove {name!r}`"
    )


def mark_clash(conn: db.Connection, name: str, app: str) -> None:
    """Record on the schedule that has a name that another app's code names it too."""
    conn.execute(statements.schedule_definitions.clash, {"name": name, "app": app})


def end_clashes(conn: db.Connection, app: str, names: Iterable[str]) -> None:
    """Forget the clashes of an app, except those of `names`."""
    conn.execute(statements.schedule_definitions.end_clashes, {"app": app, "names": [*names]})


def begin(conn: db.Connection, name: str, now: datetime) -> None:
    """Let a schedule that the code has changed begin at `now`, the clock of the scheduler."""
    conn.execute(statements.schedule_definitions.begin, {"name": name, "now": now})


def adopt(conn: db.Connection, name: str, now: datetime) -> None:
    """Let the new row of an old-style entry continue from the last fire under its name, if any."""
    conn.execute(statements.schedule_definitions.adopt, {"name": name, "now": now})


def mark_gone(conn: db.Connection, app: str, names: Iterable[str]) -> list[str]:
    """Mark the schedules of an app's code that are none of `names`; return their names."""
    given = {"app": app, "names": sorted(names)}
    found = conn.execute(statements.schedule_definitions.mark_gone, given).fetchall()
    return [row["name"] for row in found]


def set_paused(conn: db.Connection, name: str, paused: bool) -> bool:
    """Pause or resume a schedule; return whether there is one."""
    values = {"name": name, "paused": paused}
    return conn.execute(statements.schedule_definitions.set_paused, values).fetchone() is not None


def remove(conn: db.Connection, name: str) -> bool:
    """Delete a schedule; return whether there was one."""
    given = {"name": name}
    return conn.execute(statements.schedule_definitions.remove, given).fetchone() is not None


def lock(conn: db.Connection, name: str) -> Row | None:
    """Lock a schedule and return it, or None."""
    return conn.execute(statements.schedule_definitions.lock, {"name": name}).fetchone()


def find(
    conn: db.Connection,
    name: str | None = None,
    *,
    troubled: bool = False,
    limit: int | None = None,
) -> Rows:
    """Return schedules by name, with the outcomes of their last fires.

    `last_status`, `failures` in a row (100 at most), `late_s` (None: not overdue), `missed`.
    `troubled`: only those that fire, or should, and have a problem.
    """
    given = {"name": name, "troubled": troubled, "limit": limit, "patience_s": PATIENCE_S}
    return conn.execute(statements.schedule_definitions.find, given).fetchall()
