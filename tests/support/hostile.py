"""Rows that no writer of ours makes: one extreme value a row, for every column of every table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from psycopg import Error, sql

from queue_workflows import db

ESCAPES = "\x1b[31m[red]x[/]\u202e\u200b\x9b\x07\n2026-01-01T00:00:00.000Z ERROR root: %s forged \\"
DEEP = "[" * 1200 + "]" * 1200
GRAPHS = (
    '{"nodes": 5}',
    '{"nodes": [5, {"id": 5}, {"id": "n", "deps": 5}, {"id": "m", "deps": [[], "n", "gone"]}]}',
    '{"version": 1, "workflow": "w", "nodes": [{"id": "n", "deps": ["n"]}]}',
)
VALUES: dict[str, tuple[str | None, ...]] = {
    "text": (ESCAPES, "", "-rf --json", "x" * 2000),
    "jsonb": (
        "null", "[]", "5", '"x"', "{}", '{"n": 1e5000}', "1e5000", DEEP, f'{{"a": {DEEP}}}',
        '{"n": ' + "9" * 5000 + "}", '[{"prompt": []}]', *GRAPHS,
        '{"prompt": {"\\u001b": []}, "options": 7, "traceback": [], "reason": {}, "claim": 3,'
        ' "model": 3, "request": [], "signal": {}, "exit_code": "\\u001b", "gpus": [1, {"id": []}]}',
    ),
    "timestamptz": ("infinity", "-infinity", "294276-12-31", "4713-01-01 BC", "0001-01-01"),
    "int2": ("-32768", "32767", "0"),
    "int4": ("-2147483648", "2147483647", "0"),
    "int8": ("-9223372036854775808", "9223372036854775807", "0"),
    "float4": ("NaN", "Infinity", "-Infinity", "0"),
    "float8": ("NaN", "Infinity", "-Infinity", "1e308", "-1"),
    "numeric": ("NaN", "Infinity", "1e5000", "-1"),
    "interval": ("178000000 years",),
    "bool": ("true", "false"),
    "_text": ("{}", "{NULL}", '{"\x1b[31m","[/]"}'),
}  # fmt: skip


class Written(NamedTuple):
    """A row with an extreme value, by its id; `what`: the column and the value."""

    id: str
    what: str


def without_checks(conn: db.Connection) -> None:
    """Let the database take every value that its types have, as rows of before the checks do."""
    rows = conn.execute(
        "SELECT c.conrelid::regclass::text AS name, c.conname FROM pg_constraint c"
        " JOIN pg_class t ON t.oid = c.conrelid WHERE c.contype = 'c'"
        " AND t.relnamespace = 'public'::regnamespace"
    ).fetchall()
    for row in rows:
        conn.execute(
            sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(
                sql.Identifier(row["name"]), sql.Identifier(row["conname"])
            )
        )
    conn.execute("SET session_replication_role = replica")


def fill(conn: db.Connection, table: str, base: dict[str, Any], key: str) -> Iterator[Written]:
    """Insert a row for each column and extreme value beside what `base` says of the others.

    `key`: the column of `base` with the id, which each row has of its own. What the types or
    indexes of the database refuse is left out.
    """
    for name, kind, nullable in columns(conn, table):
        values = VALUES.get(kind, ())
        for number, value in enumerate([*values, *([None] if nullable else [])]):
            row_id = f"{table}.{name}.{number}"
            given = base | {key: row_id}
            if name == key:
                if value in (None, ""):
                    continue
                row_id = str(value)
            given |= {name: value}
            if _inserted(conn, table, given):
                yield Written(row_id, f"{table}.{name} = {str(value)[:60]!r}")


def columns(conn: db.Connection, table: str) -> list[tuple[str, str, bool]]:
    """The columns of a table that can be written: name, type, whether it may be NULL."""
    rows = conn.execute(
        "SELECT column_name, udt_name, is_nullable = 'YES' AS nullable"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s"
        " AND is_generated = 'NEVER' AND identity_generation IS DISTINCT FROM 'ALWAYS'"
        " ORDER BY ordinal_position",
        (table,),
    ).fetchall()
    return [(row["column_name"], row["udt_name"], row["nullable"]) for row in rows]


def _inserted(conn: db.Connection, table: str, values: dict[str, Any]) -> bool:
    kinds = {name: kind for name, kind, _ in columns(conn, table)}
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Placeholder(name), sql.SQL(kinds[name]))
            for name in values
        ),
    )
    try:
        with conn.transaction():
            conn.execute(statement, values)
    except Error:
        return False
    return True
