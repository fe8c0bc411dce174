"""Run the scripts of a worker on a connection of psycopg, with the rows that its links get."""

from __future__ import annotations

import json
from typing import Any

from queue_workflows import db


def run(conn: db.Connection, script: db.Script[Any]) -> Any:
    """Run a script of a worker's desk or leases; return its result."""
    return db.run(conn, _translated(script))


def _translated(script: db.Script[Any]) -> db.Script[Any]:
    try:
        step = next(script)
        while True:
            if step.parameters:  # BEGIN and COMMIT are known by their identity
                given = {name: _unpacked(value) for name, value in step.parameters.items()}
                step = step._replace(parameters=given)
            try:
                rows = yield step
            except db.Error as error:
                step = script.throw(error)
                continue
            if step.is_raw:
                rows = [[*map(_as_text, row.values())] for row in rows]
            step = script.send(rows)
    except StopIteration as end:
        return end.value


def _unpacked(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _as_text(value: Any) -> bytes | None:
    """A value as the server sends it to a worker."""
    if value is None:
        return None
    return (json.dumps(value) if isinstance(value, dict) else str(value)).encode()
