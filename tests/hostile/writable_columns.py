"""Read from the database's catalog which columns a role may write."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

INSERT, UPDATE = "INSERT", "UPDATE"
_COLUMNS = sql.SQL("""
SELECT c.relname AS table_name, a.attname AS name,
       (CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END)::regtype::text AS base,
       format_type(a.atttypid, a.atttypmod) AS type,
       a.attnotnull AND d.oid IS NULL AND a.attidentity = '' AS required,
       has_column_privilege(%(role)s, c.oid, a.attnum, 'INSERT') AS may_insert,
       has_column_privilege(%(role)s, c.oid, a.attnum, 'UPDATE') AS may_update,
       coalesce((SELECT string_agg(pg_get_constraintdef(k.oid), ' ') FROM pg_constraint k
                  WHERE k.contype = 'c' AND (k.contypid = t.oid OR k.conrelid = c.oid
                        AND k.conkey = ARRAY[a.attnum])), '') AS checks,
       (SELECT array_agg(e.enumlabel::text) FROM pg_enum e WHERE e.enumtypid = t.oid) AS labels,
       coalesce((SELECT true FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'p'
                    AND a.attnum = ANY (k.conkey)), false) AS is_key,
       (SELECT k.confrelid::regclass::text FROM pg_constraint k WHERE k.conrelid = c.oid
           AND k.contype = 'f' AND k.conkey = ARRAY[a.attnum] LIMIT 1) AS refers_to
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
 ORDER BY c.relname, a.attnum
""")
_WORD = re.compile(r"'([^']*)'::text")


class Column(NamedTuple):
    """A column of a table, and what one role may do with it."""

    table: str
    name: str
    base: str
    """The type; of a domain the type below it."""
    type: str
    """The type as the table has it."""
    required: bool
    """A row cannot be inserted without a value for it."""
    may_insert: bool
    may_update: bool
    words: tuple[str, ...]
    """Values that its constraints or its enum name."""
    is_key: bool
    refers_to: str | None
    """The table that a foreign key of it refers to."""

    def may(self, verb: str) -> bool:
        """Return whether the role may INSERT or UPDATE it."""
        return self.may_insert if verb == INSERT else self.may_update


class Table(NamedTuple):
    """A table with all its columns."""

    name: str
    columns: dict[str, Column]

    @property
    def key(self) -> list[str]:
        """Return the columns of its primary key."""
        return [column.name for column in self.columns.values() if column.is_key]

    def writable(self, verb: str) -> list[Column]:
        """Return the columns that the role may INSERT or UPDATE."""
        return [column for column in self.columns.values() if column.may(verb)]

    @property
    def insertable(self) -> bool:
        """Return whether the role may give every required column."""
        return bool(self.writable(INSERT)) and all(
            column.may_insert for column in self.columns.values() if column.required
        )


def read(conn: psycopg.Connection[Any], role: str) -> dict[str, Table]:
    """Return the tables of the schema of which this role may write a column."""
    found: dict[str, Table] = {}
    for row in conn.execute(_COLUMNS, {"role": role}).fetchall():
        table, name, base, type_, required, insert, update, checks, labels, is_key, refers = row
        words = tuple(dict.fromkeys([*_WORD.findall(checks), *(labels or ())]))
        column = Column(
            table, name, base, type_, required, insert, update, words, is_key, refers
        )  # fmt: skip
        found.setdefault(table, Table(table, {})).columns[name] = column
    return {
        name: table
        for name, table in found.items()
        if table.writable(INSERT) or table.writable(UPDATE)
    }
