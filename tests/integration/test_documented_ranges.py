"""The table of ranges in docs/ranges.md names each column that the database bounds, no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from tests.integration import test_row_bounds as row_bounds
from tests.support import rows_before_checks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranges.md"
HEAD = "| columns | tables | range |"
RUNS, ANSWERS, (NODE_JOBS, INGEST_JOBS) = row_bounds.RUNS, row_bounds.ANSWERS, row_bounds.FAMILIES
WORDS = {
    "runs": (RUNS,),
    "jobs": (NODE_JOBS, INGEST_JOBS),
    "node jobs": (NODE_JOBS,),
    "ingest jobs": (INGEST_JOBS,),
    "answers": (ANSWERS,),
}
"""The page's words for the tables whose ranges are triggers."""
ANY_TIME = "every `timestamptz` column"
EXTREMES: dict[str, tuple[Any, ...]] = {
    "text": ("x" * 9_000,),
    "int2": (-(2**15), 2**15 - 1),
    "int4": (-(2**31), 2**31 - 1),
    "int8": (-(2**63), 2**63 - 1),
    "float4": ("NaN", -1e30),
    "float8": ("NaN", -1e308),
    "timestamptz": ("infinity",),
    "jsonb": (row_bounds.DEEP,),
}
BY_CONSTRAINT = rb"""
SELECT a.attrelid::regclass::text AS name, a.attname AS column
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'
  JOIN pg_constraint k
    ON k.contypid = a.atttypid OR k.conrelid = a.attrelid AND a.attnum = ANY (k.conkey)
 WHERE c.relnamespace = current_schema()::regnamespace AND k.contype = 'c' AND NOT a.attisdropped
   AND pg_get_constraintdef(k.oid) ~ '[<>]=? *\(?''?-?\d|<> '''''
"""
"""Columns whose domain or CHECK compares with a number, a time or the empty text."""


def documented(conn: Any) -> set[tuple[str, str]]:
    """Return the tables and columns that the page's table names."""
    text = PAGE.read_text(encoding="utf-8")
    found: set[tuple[str, str]] = set()
    for line in text[text.index(HEAD) :].partition("\n\n")[0].splitlines()[2:]:
        columns, names, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            for table in WORDS.get(name, (name.strip("`"),)):
                kinds = rows_before_checks.columns(conn, table)
                if columns == ANY_TIME:
                    listed = [each for each, kind in kinds.items() if kind == "timestamptz"]
                else:
                    listed = re.findall(r"`(\w+)`", columns)
                found |= {(table, each) for each in listed}
    return found


def refused_by_a_trigger(conn: Any, write: Callable[[], object]) -> bool:
    """Return whether a trigger refuses the write. The error of a CHECK names a constraint."""
    try:
        with conn.transaction(force_rollback=True):
            write()
    except psycopg.errors.CheckViolation as error:
        return error.diag.constraint_name is None
    except psycopg.Error:
        return False
    return False


def bounded_by_triggers(conn: Any) -> Iterator[tuple[str, str]]:
    """Yield each column of which a trigger refuses an extreme value, by INSERT or by UPDATE."""
    for table in (RUNS, NODE_JOBS, INGEST_JOBS, ANSWERS):
        row_bounds.insert(conn, table, id="there")
        other = {"node_id": "other"} if table in (NODE_JOBS, ANSWERS) else {}
        for column, kind in rows_before_checks.columns(conn, table).items():
            change = f"UPDATE {table} SET {column} = %s WHERE id = 'there'".encode()
            for value in EXTREMES.get(kind, ()):
                given = {**other, column: value}
                if refused_by_a_trigger(
                    conn,
                    lambda: row_bounds.insert(conn, table, **given),  # noqa: B023
                ) or refused_by_a_trigger(conn, lambda: conn.execute(change, (value,))):  # noqa: B023
                    yield table, column


def test_the_page_names_each_bounded_column_and_no_other(conn: Any) -> None:
    bounded = {(row["name"], row["column"]) for row in conn.execute(BY_CONSTRAINT).fetchall()}
    bounded |= set(bounded_by_triggers(conn))
    named = documented(conn)
    assert (sorted(bounded - named), sorted(named - bounded)) == ([], [])
