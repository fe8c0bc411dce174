"""Read the schema of a database as plain data, to compare two ways of creating one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import psycopg

_TEXT = (Path(__file__).parent / "schema_snapshot.sql").read_text(encoding="utf-8")
_PARTS = {part.partition("\n")[0]: part.partition("\n")[2] for part in _TEXT.split("-- kind: ")[1:]}

Snapshot: TypeAlias = "dict[str, dict[str, str]]"
"""kind → name of the object → its text."""


def snapshot(conn: psycopg.Connection[Any], schema: str = "public") -> Snapshot:
    """Return every object of a schema by kind and name, as the server describes it.

    The kinds are the keys of `_PARTS`. The order of columns is left out, as a table that grew by
    ALTER TABLE has another one than a table that was created whole.
    """
    found: Snapshot = {}
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        for kind, query in _PARTS.items():
            rows = cursor.execute(query.encode(), {"schema": schema}).fetchall()
            found[kind] = {row["name"]: row["text"] or "" for row in rows}
    return found


def difference(old: Snapshot, new: Snapshot) -> list[tuple[str, str, str | None, str | None]]:
    """Return (kind, name, old text, new text) of all that differs; None: no such object."""
    found: list[tuple[str, str, str | None, str | None]] = []
    for kind in _PARTS:
        before, after = old.get(kind, {}), new.get(kind, {})
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                found.append((kind, name, before.get(name), after.get(name)))
    return found
