"""Make a change of the schema, and return which tables, values and rows it has dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from psycopg import sql

from queue_workflows.db import pool, statements

_Columns: TypeAlias = "dict[tuple[str, str], str | None]"
"""(table, column) → default expression."""


def of(conn: pool.Connection, change: Callable[[], None], *, besides: set[str]) -> list[str]:
    """Make the change and return what it dropped; [] if nothing.

    Joins the transaction of the caller, who may roll it back. The change is rehearsed first; what
    it touched stays locked, so that no row is added meanwhile. Tables of `besides`, the engine's
    own records, do not count.
    """
    before = _columns(conn)
    with conn.transaction(force_rollback=True):
        change()
        touched = _touched(conn, {table for table, _ in before} - besides)
        after = _columns(conn)
    if touched:
        names = sql.SQL(", ").join(map(sql.Identifier, touched))
        conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names))
    kept = {table for table, _ in after}
    losses = _tables(conn, before, kept | besides) + _values(conn, before, after, kept)
    rows = {table: _count_rows(conn, table) for table in touched if table in kept}
    change()
    for table, count in rows.items():
        if gone := count - _count_rows(conn, table):
            losses.append(f"{gone} rows of table {table}")
    return losses


def _columns(conn: pool.Connection) -> _Columns:
    return {
        (row["table_name"], row["column_name"]): row["column_default"]
        for row in statements.downgrade_check.columns(conn)
    }


def _touched(conn: pool.Connection, tables: set[str]) -> list[str]:
    """Return those of `tables` that are dropped, or locked for writing by this transaction."""
    rows = statements.downgrade_check.untouched(conn)
    return sorted(tables - {row["name"] for row in rows})


def _tables(conn: pool.Connection, before: _Columns, kept: set[str]) -> list[str]:
    counts = {table: _count_rows(conn, table) for table in {t for t, _ in before} - kept}
    return [f"table {table} with {n} rows" for table, n in sorted(counts.items()) if n]


def _values(conn: pool.Connection, before: _Columns, after: _Columns, kept: set[str]) -> list[str]:
    losses: list[str] = []
    for (table, column), default in sorted(before.items()):
        # A default that differs in each row, such as now(), is never a value that a person chose.
        if table not in kept or (table, column) in after or _is_made(default or ""):
            continue
        query = sql.SQL("SELECT count(*) AS n FROM {} WHERE {} IS DISTINCT FROM {}").format(
            sql.Identifier(table),
            sql.Identifier(column),
            # The default's text comes from the catalogue.
            sql.SQL(cast("Any", default or "NULL")),
        )
        if count := _count(conn, query):
            losses.append(f"column {table}.{column} with {count} values")
    return losses


def _is_made(default: str) -> bool:
    return "nextval(" in default or "pg_current_xact_id(" in default


def _count_rows(conn: pool.Connection, table: str) -> int:
    return _count(conn, sql.SQL("SELECT count(*) AS n FROM {}").format(sql.Identifier(table)))


def _count(conn: pool.Connection, query: sql.Composed) -> int:
    return int((conn.execute(query).fetchone() or {"n": 0})["n"])
