"""Find the rows that the engine cannot work on: failing, blocked, unreadable or out of range."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

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


_STUCK = (
    ("run", "cancel", statements.bad_rows.stuck_starts),
    ("run", "cancel", statements.bad_rows.stuck_late_starts),
    ("run", "cancel", statements.bad_rows.stuck_events),
    ("run", "cancel", statements.bad_rows.stuck_answers),
    ("run", "cancel", statements.bad_rows.stuck_input_timeouts),
    ("run", "cancel", statements.bad_rows.stuck_delayed_nodes),
    ("job", "jobs delete", statements.bad_rows.stuck_delayed_ingest_jobs),
    ("run", "cancel", statements.bad_rows.stuck_set_aside_nodes),
    ("job", "jobs delete", statements.bad_rows.stuck_set_aside_ingest_jobs),
    ("run", "cancel", statements.bad_rows.stuck_lapsed_nodes),
    ("job", "jobs cancel", statements.bad_rows.stuck_lapsed_ingest_jobs),
)
_OUT_OF_RANGE = (
    ("run", "cancel", statements.bad_rows.out_of_range_runs),
    ("run", "cancel", statements.bad_rows.out_of_range_nodes),
    ("job", "jobs delete", statements.bad_rows.out_of_range_ingest_jobs),
    ("run", "cancel", statements.bad_rows.out_of_range_answers),
)


def stuck(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return rows that keep failing or are blocked as `set_aside`, at most `limit` of a kind."""
    return _found(conn, _STUCK, limit)


def out_of_range(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return live rows with times, counters or payloads that cannot be used, at most `limit` each.

    Reads EXAMINED live rows of each table.
    """
    return _found(conn, _OUT_OF_RANGE, limit)


def _found(
    conn: db.Connection, checks: tuple[tuple[str, str, Callable[..., list[Row]]], ...], limit: int
) -> list[BadRow]:
    return [
        # The id is one word of a shell command; its control characters are left to the display.
        BadRow(kind, row["id"], row["text"], f"queue-workflows {command} {shlex.quote(row['id'])}")
        for kind, command, query in checks
        for row in query(conn, limit=limit, late_s=LATE_S, examined=EXAMINED)
    ]
