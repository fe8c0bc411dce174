"""Count the statements that a cursor executes."""

from __future__ import annotations

from typing import Any

import psycopg


class Counter:
    """Statements of a connection, and the rows that they gave or touched."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.statements = 0
        self.rows = 0
        counter = self

        class Counting(psycopg.Cursor[Any]):
            def execute(self, *args: Any, **kwargs: Any) -> Any:
                result = super().execute(*args, **kwargs)
                counter.statements += 1
                counter.rows += max(0, self.rowcount)
                return result

        conn.cursor_factory = Counting
