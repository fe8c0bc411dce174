"""Insert rows with extreme values in every column, which no writer of ours creates."""

from __future__ import annotations

import random
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
        ' "model": 3, "request": [], "signal": {}, "exit_code": "\\u001b",'
        ' "throttle": {"\\u001b": []}, "memory": 7, "card": {"\\u001b": []},'
        ' "gpus": [1, {"id": []}]}',
        '{"throttle": "\\u001b[31m\\u202e", "memory": ["\\u001b"], "card": "\\u001b[31m\\u202e"}',
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


LEAVE = object()
"""Stands for no value: the column keeps its default."""


class Column(NamedTuple):
    """A column: its type, whether it may be NULL, and whether an INSERT must name it."""

    name: str
    kind: str
    nullable: bool
    required: bool


class Written(NamedTuple):
    """A row with extreme values, by its id; `what`: the columns and the values."""

    id: str
    what: str


def without_checks(conn: db.Connection) -> None:
    """Let the database take every value that its types have, as rows of before the checks do."""
    rows = conn.execute(
        "SELECT c.conname, c.contypid <> 0 AS of_domain, coalesce(t.relname, d.typname) AS name"
        " FROM pg_constraint c LEFT JOIN pg_class t ON t.oid = c.conrelid"
        " LEFT JOIN pg_type d ON d.oid = c.contypid"
        " WHERE c.contype = 'c' AND c.connamespace = 'public'::regnamespace"
    ).fetchall()
    for row in rows:
        conn.execute(
            sql.SQL("ALTER {} {} DROP CONSTRAINT {}").format(
                sql.SQL("DOMAIN" if row["of_domain"] else "TABLE"),
                sql.Identifier(row["name"]),
                sql.Identifier(row["conname"]),
            )
        )
    conn.execute("SET session_replication_role = replica")


def fill(
    conn: db.Connection, table: str, base: dict[str, Any], key: str, *, singles: int = 0
) -> list[Written]:
    """Insert rows of which every column has its first extreme value, its second, and so on.

    `base` has the values that stay ordinary; each row has an id of its own in column `key`, and two
    have extreme ones. `singles`: so many more rows, picked at random, with one extreme value each.
    What the types and indexes of the database refuse is left out.
    """
    kinds = [one for one in columns(conn, table) if one.name not in (*base, key)]
    most = max((len(VALUES.get(one.kind, ())) for one in kinds), default=0)
    wanted = [
        {one.name: value for one in kinds if (value := _value(one, number)) is not LEAVE}
        for number in range(most + 1)
    ]
    alone = [
        {one.name: value}
        for one in kinds
        for value in (*VALUES.get(one.kind, ()), *([None] if one.nullable else []))
    ]
    wanted += random.Random(13).sample(alone, min(singles, len(alone)))
    ids = [f"{table}.{number}" for number in range(len(wanted))] + [ESCAPES, "-rf --json"]
    written: list[Written] = []
    for row_id, given in zip(ids, [*wanted, *({}, {})], strict=True):
        needed = {one.name: row_id for one in kinds if one.required and one.kind == "text"}
        fixed = base | {key: row_id}
        kept = given
        if not _inserted(conn, table, needed | kept | fixed):
            # A value that is refused takes no other with it.
            tries = {name: needed | {name: value} | fixed for name, value in given.items()}
            kept = {name: given[name] for name, row in tries.items() if _taken(conn, table, row)}
            if not _inserted(conn, table, needed | kept | fixed):
                continue
        written.append(Written(row_id, str(kept)[:100]))
    return written


def _value(column: Column, number: int) -> Any:
    values = VALUES.get(column.kind, ())
    if not values:
        return LEAVE
    return None if column.nullable and number == len(values) else values[number % len(values)]


def columns(conn: db.Connection, table: str) -> list[Column]:
    """Return the columns of a table that can be written."""
    rows = conn.execute(
        "SELECT column_name, udt_name, is_nullable = 'YES' AS nullable,"
        " is_nullable = 'NO' AND column_default IS NULL AS required"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s"
        " AND is_generated = 'NEVER' AND identity_generation IS DISTINCT FROM 'ALWAYS'"
        " ORDER BY ordinal_position",
        (table,),
    ).fetchall()
    return [Column(*row.values()) for row in rows]


def _taken(conn: db.Connection, table: str, values: dict[str, Any]) -> bool:
    """Return whether the database accepts this row; it is not kept."""
    with conn.transaction(force_rollback=True):
        return _inserted(conn, table, values)


def _inserted(conn: db.Connection, table: str, values: dict[str, Any]) -> bool:
    kinds = {one.name: one.kind for one in columns(conn, table)}
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Placeholder(name), sql.SQL(kinds[name])) for name in values
        ),
    )
    try:
        with conn.transaction():
            conn.execute(statement, values)
    except Error:
        return False
    return True
