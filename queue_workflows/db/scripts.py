"""Describe statements independently of the connection that runs them.

A script is a generator that yields statements and receives their rows. `run` runs it on a
psycopg connection; a `db.link.Link` runs it without blocking its thread.
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

    If `is_raw`, a link returns its rows as tuples of bytes (None for NULL) instead of dicts.
    """

    text: bytes
    parameters: Mapping[str, Any] = {}
    is_raw: bool = False


BEGIN: Final = Statement(b"BEGIN")
"""Opens a transaction, or a savepoint inside the transaction of the caller."""
COMMIT: Final = Statement(b"COMMIT")
"""Commits the transaction or savepoint that BEGIN opened."""
ROLLBACK: Final = Statement(b"ROLLBACK")
"""Rolls it back, also after a refused statement."""
Script: TypeAlias = Generator[Statement, list[Any], T]


class _Undone(Exception):
    """Raised to leave a transaction's block so that it is rolled back."""


def run(conn: psycopg.Connection[Row], script: Script[T]) -> T:
    """Run a script on a connection, in its open transaction if there is one; return its result.

    Transactions that the script leaves open are committed if it returns, and rolled back if it
    raises. A ROLLBACK undoes the innermost one, even if a nested script has left it open.
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
