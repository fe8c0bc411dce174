"""Insert rows that the current checks refuse, as an older database may have them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from queue_workflows import db
from tests.support import constants

DEEP = "(repeat('[', 1200) || repeat(']', 1200))::jsonb"
DEEP_OBJECT = """(repeat('{"a":', 1200) || '1' || repeat('}', 1200))::jsonb"""
LONG_NUMBER = """'{"n":1e5000}'::jsonb"""
UNREADABLE = {"deep": DEEP_OBJECT, "array": DEEP, "digits": LONG_NUMBER}
"""jsonb values, as SQL, that no worker loads."""
_JSON = (
    *UNREADABLE.values(),
    "'null'::jsonb",
    "'[1]'::jsonb",
    """'"x"'::jsonb""",
    "'1'::jsonb",
    "'true'::jsonb",
    "'{}'::jsonb",
    """'{"retries": null, "backoff": 1e300, "timeout_s": "abc", "retry_on": 7}'::jsonb""",
    """'{"retries": null}'::jsonb""",
    """jsonb_build_object('$from', 'nowhere.at.all')""",
    """jsonb_build_object(U&'\\202e\\001b[31m', repeat('x', 100000))""",
)
_TIMES = (
    "'infinity'::timestamptz",
    "'-infinity'::timestamptz",
    "'294276-12-31 00:00:00+00'::timestamptz",
    "'4713-01-01 00:00:00+00 BC'::timestamptz",
    "'1999-12-31 00:00:00+00'::timestamptz",
)
_FLOATS = ("'NaN'", "'Infinity'", "'-Infinity'", "1e308", "-1", "0", "5e-324")
_TEXTS = (
    "''",
    "'%s %(x)s {0} ../../etc'",
    "E'\\x1b[31m[red]\\n--'",
    "U&'\\202e\\2066'",
    "repeat('x', 2000)",
    "'-x'",
)
EXTREMES = {
    "jsonb": _JSON,
    "timestamptz": _TIMES,
    "float8": _FLOATS,
    "text": _TEXTS,
    "int2": ("-32768", "-1", "0", "32767"),
    "int4": ("-2147483648", "-1", "0", "40000", "2147483647"),
    "int8": ("-9223372036854775808", "-1", "0", "9223372036854775806", "9223372036854775807"),
    "_text": ("'{}'", "'{NULL}'", "'{{a,b},{c,d}}'", "array_fill('x'::text, ARRAY[10000])"),
}
"""Values at the ends of a type and beyond what is meant, as SQL, by the name of the type."""


def columns(conn: db.Connection, table: str) -> dict[str, str]:
    """Return a table's columns and their types, of a domain the type below it."""
    rows = conn.execute(
        "SELECT a.attname AS name, coalesce(nullif(t.typbasetype, 0), t.oid)::regtype::oid AS kind,"
        " (SELECT b.typname FROM pg_type b WHERE b.oid = coalesce(nullif(t.typbasetype, 0), t.oid))"
        " AS type FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped"
        " ORDER BY a.attnum",
        (table,),
    ).fetchall()
    return {row["name"]: row["type"] for row in rows}


def put(conn: db.Connection, table: str, **values: str) -> None:
    """Insert a row of SQL expressions past every trigger and CHECK, which come back afterwards.

    Raises the server's other errors: a NOT NULL, a unique key, a value out of its type's range.
    """
    with _past_checks(conn) as execute:
        execute(_insert(table, values))


def put_each(conn: db.Connection, table: str, rows: Iterable[dict[str, str]]) -> list[bool]:
    """Insert each row as `put` does; return which of them the database took.

    Left out is a row with NULL where none may stand, or with a value out of its type's range.
    """
    taken: list[bool] = []
    with _past_checks(conn) as execute:
        for values in rows:
            try:
                execute(_insert(table, values))
            except (psycopg.errors.NotNullViolation, psycopg.errors.NumericValueOutOfRange):
                taken.append(False)
            else:
                taken.append(True)
    return taken


def _insert(table: str, values: dict[str, str]) -> sql.Composed:
    return sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(sql.SQL(value) for value in values.values()),  # pyright: ignore[reportArgumentType]
    )


def change(conn: db.Connection, table: str, row_id: str, *, key: str = "id", **values: str) -> None:
    """Set columns of one row to SQL expressions, past every trigger and CHECK, as `put` does."""
    given = [
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.SQL(value))  # pyright: ignore[reportArgumentType]
        for name, value in values.items()
    ]
    statement = sql.SQL("UPDATE {} SET {} WHERE {} = {}").format(
        sql.Identifier(table), sql.SQL(", ").join(given), sql.Identifier(key), sql.Literal(row_id)
    )
    with _past_checks(conn) as execute:
        assert execute(statement) == 1


def quoted(value: str) -> str:
    """Return a text as a literal of SQL, which takes the type of its column."""
    return "'" + value.replace("'", "''") + "'"


@contextmanager
def _past_checks(conn: db.Connection) -> Generator[Callable[[sql.Composed], int]]:
    """Give a function that executes past triggers and CHECKs and returns how many rows it wrote.

    All in one transaction, at whose end the CHECKs are there again: each change of a table makes
    every connection plan again.
    """
    dropped: list[sql.Composed] = []
    valid: list[str] = []

    def execute(statement: sql.Composed) -> int:
        while True:
            try:
                with conn.transaction():
                    return conn.execute(statement).rowcount
            except psycopg.errors.CheckViolation as error:
                add, name = _drop(conn, error)
                dropped.append(add)
                valid.extend([name] if name else [])

    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica")
        yield execute
        for add in dropped:
            conn.execute(add)
        # A CHECK that no longer counts as validated would show in what a test prints of the schema.
        conn.execute("SET LOCAL allow_system_table_mods = on")
        conn.execute(
            "UPDATE pg_constraint SET convalidated = true WHERE conname = ANY (%s)", (valid,)
        )


def _drop(conn: db.Connection, error: psycopg.Error) -> tuple[sql.Composed, str | None]:
    """Drop the CHECK that an error names; the statement that adds it again for new rows.

    And its name, if it was valid for all rows.
    """
    row = conn.execute(
        "SELECT conname AS name, pg_get_constraintdef(oid) AS said, contypid <> 0 AS of_domain,"
        " CASE WHEN contypid <> 0 THEN contypid::regtype::text ELSE conrelid::regclass::text END"
        " AS owner FROM pg_constraint WHERE conname = %s",
        (error.diag.constraint_name,),
    ).fetchone()
    assert row is not None, error
    kind = sql.SQL("DOMAIN" if row["of_domain"] else "TABLE")
    parts = [kind, sql.SQL(row["owner"]), sql.Identifier(row["name"])]
    conn.execute(sql.SQL("ALTER {} {} DROP CONSTRAINT {}").format(*parts))
    said = row["said"].removesuffix(" NOT VALID")
    name = row["name"] if said == row["said"] else None
    again = sql.SQL("ALTER {} {} ADD CONSTRAINT {} {} NOT VALID").format(*parts, sql.SQL(said))
    return again, name


def load_no_more(patch: pytest.MonkeyPatch, most_bytes: int) -> None:
    """Let the library load no document of more bytes."""
    constants.put(patch, "runtime.stored_json.MAX_BYTES", most_bytes)
