"""Describe statements apart from the connection that runs them.

A script is a generator that yields statements and receives their rows. `run` runs it on a
connection of psycopg, a `db.link.Link` without ever blocking its thread.
"""

from __future__ import annotations

import contextlib
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

    What it has begun and not ended is rolled back if it raises.
    """
    blocks: list[AbstractContextManager[Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            statement = next(script)
            while True:
                try:
                    rows = _ran(conn, statement, stack, blocks)
                except psycopg.Error as error:
                    statement = script.throw(error)
                else:
                    statement = script.send(rows)
        except StopIteration as end:
            return end.value


class _Left:
    """Ends a transaction's block that a script has left open by an exception."""

    def __init__(
        self, block: AbstractContextManager[Any], blocks: list[AbstractContextManager[Any]]
    ) -> None:
        self._block, self._blocks = block, blocks

    def __enter__(self) -> None:
        return

    def __exit__(self, *raised: Any) -> None:
        if self._block in self._blocks:
            self._block.__exit__(*raised)


def _ran(
    conn: psycopg.Connection[Row],
    statement: Statement,
    stack: contextlib.ExitStack,
    blocks: list[AbstractContextManager[Any]],
) -> list[Any]:
    if statement is BEGIN:
        block = conn.transaction()
        block.__enter__()
        blocks.append(block)
        stack.enter_context(_Left(block, blocks))
    elif statement is COMMIT:
        blocks.pop().__exit__(None, None, None)
    elif statement is ROLLBACK:
        undone = _Undone()
        with contextlib.suppress(_Undone):
            blocks.pop().__exit__(_Undone, undone, None)
    else:
        found = conn.execute(statement.text, statement.parameters)
        return found.fetchall() if found.description is not None else []
    return []
