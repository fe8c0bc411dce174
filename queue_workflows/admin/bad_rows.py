"""Find the rows that the engine cannot work on: failing, blocked, unreadable or out of range."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements

LATE_S = 60
"""A row that is due for so long was tried several times: sweeps come every few seconds."""
EXAMINED = 20_000
"""Live rows of a table whose payloads and times are read; more would make it a slow command."""


class BadRow(NamedTuple):
    """A row, what is wrong with it in a sentence, and the command that ends or removes it."""

    kind: str
    id: str
    text: str
    command: str


def stuck(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return rows that keep failing or are blocked as `set_aside`, at most `limit` of a kind."""
    return _found(conn, "stuck_", limit)


def out_of_range(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return live rows with times, counters or payloads that cannot be used, at most `limit` each.

    Reads EXAMINED live rows of each table.
    """
    return _found(conn, "out_of_range_", limit)


def _found(conn: db.Connection, prefix: str, limit: int) -> list[BadRow]:
    """Return what the statements of this prefix find: ingest jobs by name, else rows of a run."""
    found: list[BadRow] = []
    for name, query in vars(statements.bad_rows).items():
        if name.startswith(prefix):
            kind, command = "run", "cancel"
            if name.endswith("_ingest_jobs"):
                kind, command = "job", "jobs cancel" if "lapsed" in name else "jobs delete"
            for row in query(conn, limit=limit, late_s=LATE_S, examined=EXAMINED):
                # The id is one word of a shell command; the display escapes control characters.
                words = f"queue-workflows {command} {shlex.quote(row['id'])}"
                found.append(BadRow(kind, row["id"], row["text"], words))
    return found
