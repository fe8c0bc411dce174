"""Describe statements apart from the connection that runs them.

A script is a generator that yields statements and receives their rows. `run` runs it on a
connection of psycopg, a `db.link.Link` without ever blocking its thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import psycopg

from queue_workflows.types import Row

T = TypeVar("T")


class Statement(NamedTuple):
    """The text of a statement and its parameters; `statements` has a `script` for each named one.

    `is_raw`: a link returns its rows as tuples of bytes (None for NULL) instead of dicts.
    """

    text: bytes
    parameters: Mapping[str, Any] = {}
    is_raw: bool = False


BEGIN: Final = Statement(b"BEGIN")
"""Opens a transaction, or a savepoint inside the transaction of the caller."""
COMMIT: Final = Statement(b"COMMIT")
"""Ends it."""
ROLLBACK: Final = Statement(b"ROLLBACK")
"""Undoes it, after a statement of it was refused."""
Script: TypeAlias = Generator[Statement, list[Any], T]


class _Undone(Exception):
    """Leaves a transaction's block so that it is rolled back."""


def run(conn: psycopg.Connection[Row], script: Script[T]) -> T:
    """Run a script on a connection whose transaction, if one is open, it joins; return its result.

    What it has begun and not ended is committed if it returns, and rolled back if it raises: a
    ROLLBACK undoes the innermost one, also where a script within this one has left it open.
    """
    blocks: list[AbstractContextManager[Any]] = []
    try:
        statement = next(script)
        while True:
            try:
                rows = _ran(conn, statement, blocks)
            except psycopg.Error as error:
                statement = script.throw(error)
            else:
                statement = script.send(rows)
    except StopIteration as end:
        while blocks:
            blocks.pop().__exit__(None, None, None)
        return end.value
    except BaseException:
        while blocks:
            blocks.pop().__exit__(*sys.exc_info())
        raise


def _ran(
    conn: psycopg.Connection[Row], statement: Statement, blocks: list[AbstractContextManager[Any]]
) -> list[Any]:
    if statement is BEGIN:
        block = conn.transaction()
        block.__enter__()
        blocks.append(block)
    elif statement is COMMIT:
        blocks.pop().__exit__(None, None, None)
    elif statement is ROLLBACK:
        with contextlib.suppress(_Undone):
            blocks.pop().__exit__(_Undone, _Undone(), None)
    else:
        found = conn.execute(statement.text, statement.parameters)
        return found.fetchall() if found.description is not None else []
    return []
