"""Write `queue_workflows/db/statements.pyi`, from which type checkers know every statement.

Run `python -m tests.support.stubgen` after a change in `sql/queries/`; a test compares. The server
describes the parameters and names the columns. Rows stay plain dicts: it cannot say which columns
may be NULL, so that every use of a typed column would need a check or a cast.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import psycopg

from queue_workflows import sql
from queue_workflows.db import statements
from tests.support import docgen

SHOWN_COLUMNS = 15
"""More are the columns of a whole table."""
STUB = Path(statements.__file__).with_suffix(".pyi")
_HEAD = '''"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import psycopg

from queue_workflows.db import scripts
from queue_workflows.types import Row

JOB_TABLES: Final[tuple[str, str]]
_Conn: TypeAlias = psycopg.Connection[Row]
_Times: TypeAlias = list[datetime] | list[datetime | None]
_Texts: TypeAlias = list[str] | list[str | None]
_Ints: TypeAlias = list[int] | list[int | None]
_Floats: TypeAlias = list[float] | list[float | None]

def comments(noun: str) -> dict[str, str]: ...
def parse(source: str, file: str) -> dict[str, Named | dict[str, Named]]: ...

class Named:
    text: bytes
    comment: str
    kind: str
    prepare: bool | None
    def __init__(self, text: bytes, comment: str, kind: str, prepare: bool | None) -> None: ...
    def __call__(self, *args: Any, **given: Any) -> Any: ...
'''
_RETURNED = {
    "one": "Row | None", "row": "Row", "value": "Any", "many": "list[Row]", "column": "list[Any]",
    "count": "int", "none": "None",
}  # fmt: skip
_TYPES = {
    "bigint": "int", "boolean": "bool", "double precision": "float", "integer": "int",
    "interval": "timedelta", "json": "str", "jsonb": "str", "name": "str", "numeric": "float",
    "real": "float", "regclass": "str", "smallint": "int", "text": "str", "tid": "str",
    "timestamp with time zone": "datetime", "text[]": "_Texts", "bigint[]": "_Ints",
    "integer[]": "_Ints", "double precision[]": "_Floats", "name[]": "_Texts",
    "timestamp with time zone[]": "_Times", "regclass[]": "_Texts",
}  # fmt: skip
_PARAMETER_TYPES = """
SELECT coalesce(array_agg(format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL)
                          ORDER BY u.place), '{}') AS types
  FROM pg_prepared_statements p
 CROSS JOIN unnest(p.parameter_types) WITH ORDINALITY AS u(type, place)
  JOIN pg_type t ON t.oid = u.type
 WHERE p.name = 'this_statement'
"""
"""The types of the parameters, of domains those on which they are."""
_PARAMETER = re.compile(rb"%\((\w+)\)s|%%")


def numbered(text: bytes) -> tuple[bytes, list[str]]:
    """Return a statement as PREPARE takes it, and the names of its parameters in their order."""
    names: list[str] = []

    def number(match: re.Match[bytes]) -> bytes:
        if match[0] == b"%%":
            return b"%"
        name = match[1].decode()
        if name not in names:
            names.append(name)
        return b"$%d" % (names.index(name) + 1)

    return _PARAMETER.sub(number, text), names


def stub(conn: psycopg.Connection[dict[str, object]]) -> str:
    """Return the stub: one class a file, one a statement, documented by its comment.

    `conn` leads to a database with the schema.
    """
    parts = [_HEAD]
    for path in sorted(sql.QUERIES.glob("*.sql")):
        file = _camel(path.stem)
        found = statements.parse(path.read_text(encoding="utf-8"), path.name)
        attributes: list[str] = []
        for name, one in found.items():
            kind = f"_{file}{_camel(name)}"
            own = one if isinstance(one, statements.Named) else one[statements.JOB_TABLES[0]]
            parameters, columns = _described(conn, own)
            parts.append(_class(kind, own, parameters))
            of_both = f"Mapping[str, {kind}]" if isinstance(one, dict) else kind
            lines = [*own.comment.splitlines(), *columns]
            comment = "\n    ".join(lines).replace("\\", "\\\\")
            attributes.append(f'    {name}: {of_both}\n    """{comment}"""')
        parts += [f"class _{file}:", *attributes, f"\n{path.stem}: _{file}\n"]
    return "\n".join(parts)


def _camel(name: str) -> str:
    return "".join(word.title() for word in name.split("_"))


def _described(
    conn: psycopg.Connection[dict[str, object]], one: statements.Named
) -> tuple[list[str], list[str]]:
    """Return the parameters with their types, and a line with the columns if there are rows."""
    query, names = numbered(one.text)
    with conn.transaction(force_rollback=True):
        conn.pgconn.prepare(b"this_statement", query)
        described = conn.pgconn.describe_prepared(b"this_statement")
        row = conn.execute(_PARAMETER_TYPES).fetchone()
        conn.execute("DEALLOCATE this_statement")
    assert row is not None
    types: list[str] = row["types"]  # pyright: ignore[reportAssignmentType]
    parameters = [f"{name}: {_TYPES[kind]} | None" for name, kind in zip(names, types, strict=True)]
    columns = [(described.fname(place) or b"").decode() for place in range(described.nfields)]
    are_shown = one.kind in ("one", "row", "many") and len(columns) <= SHOWN_COLUMNS
    return parameters, [f"Columns: {', '.join(columns)}."] if are_shown else []


def _class(name: str, one: statements.Named, parameters: list[str]) -> str:
    given = ", ".join(["*", *parameters]) if parameters else ""
    returned = _RETURNED[one.kind]
    scripted = "None" if one.kind == "count" else returned
    called = ", ".join(each for each in ("self, conn: _Conn, /", given) if each)
    script = ", ".join(each for each in ("self", given) if each)
    return (
        f"class {name}(Named):\n"
        f"    def __call__({called}) -> {returned}: ...\n"
        f"    def script({script}) -> scripts.Script[{scripted}]: ...\n"
    )


def main() -> None:
    """Write the stub, from a new database on the server that tests would use."""
    with ExitStack() as stack:
        dsn = docgen.database_with_schema(stack)
        row_factory = psycopg.rows.dict_row
        conn = stack.enter_context(
            psycopg.Connection.connect(dsn, autocommit=True, row_factory=row_factory)
        )
        text = stub(conn)
    STUB.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
