"""Load the named statements of `sql/queries/` as callables: `statements.runs.get(conn, run_id=id)`.

A file `sql/queries/<noun>.sql` has complete statements with psycopg's parameters. Each follows a
line `-- name: <name> <kind>` (see `KINDS`) and a comment. After the kind, `prepared` makes the
first call prepare it, and `unprepared` prevents that. With a second line
`-- tables: ingest_jobs workflow_node_jobs` there is one statement for each job table, and the
attribute is a mapping by table name. `sql.written` explains the other markers. Type checkers read
the stub that `tests.support.stubgen` makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import psycopg

from queue_workflows import sql
from queue_workflows.db import scripts
from queue_workflows.types import Row

JOB_TABLES = sql.JOB_TABLES
_NAME = re.compile(r"^-- name: ([^\n]*)\n", re.MULTILINE)
_COMMENT = re.compile(r"(?:--[^\n]*\n)*")
_PREPARED: Final[dict[tuple[str, ...], bool | None]] = {
    (): None,
    ("prepared",): True,
    ("unprepared",): False,
}
_ALL_COLUMNS: Final = re.compile(r"(?:\b(?:SELECT|RETURNING) |[,.] ?)\*(?!\))")
"""The server refuses a prepared statement with a `*` once the table has another column."""


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None


def _only(rows: list[Row]) -> Row:
    (row,) = rows
    return row


def _value(rows: list[Row]) -> Any:
    return next(iter(rows[0].values())) if rows else None


def _column(rows: list[Row]) -> list[Any]:
    return [next(iter(row.values())) for row in rows]


def _nothing(_: object) -> None:
    return


KINDS: Final[dict[str, Callable[[list[Row]], Any]]] = {
    "one": _first, "row": _only, "value": _value, "many": list, "column": _column,
    "count": _nothing, "none": _nothing,
}  # fmt: skip
"""The result of a statement by its kind. `one` gives the first row or None, `row` the row of a
statement that always has one, `value` the only column of the first row or None, `many` all rows,
`column` their only column, `count` the number of changed rows (None in a script), `none` None."""


class Named:
    """One named statement: call it on a connection, or `yield from` its `script`.

    `prepare` is passed to psycopg's `execute`.
    """

    __slots__ = ("_of_rows", "comment", "kind", "prepare", "text")

    def __init__(self, text: bytes, comment: str, kind: str, prepare: bool | None) -> None:
        self.text, self.comment, self.kind, self.prepare = text, comment, kind, prepare
        self._of_rows = KINDS[kind]

    def __call__(self, conn: psycopg.Connection[Row], /, **given: Any) -> Any:
        """Execute it in the transaction of the connection; return the result for its kind."""
        # Some drivers of apps do not accept None for the parameters.
        parameters = (given,) if given else ()
        cursor = conn.execute(self.text, *parameters, prepare=self.prepare)
        if self.kind == "one":
            return cursor.fetchone()
        if self._of_rows is _nothing:
            return cursor.rowcount if self.kind == "count" else None
        return self._of_rows(cursor.fetchall())

    def script(self, **given: Any) -> scripts.Script[Any]:
        """Execute it as a script, which a connection or a `db.link.Link` runs."""
        return self._of_rows((yield scripts.Statement(self.text, given)))


def parse(source: str, file: str) -> dict[str, Named | dict[str, Named]]:
    """Return the statements of a file by name, in the order of the file.

    Raises ValueError for text before the first name, a name that is taken, an unknown kind, a
    statement that is empty or has no comment, and a prepared one with a `*`.
    """
    before, *parts = _NAME.split(sql.written(source))
    if _COMMENT.sub("", before).strip():
        raise ValueError(f"{file}: there is text before the first `-- name:` line")
    found: dict[str, Named | dict[str, Named]] = {}
    for line, rest in zip(parts[::2], parts[1::2], strict=True):
        name, kind, *more = [*line.split(), "", ""]
        prepare = tuple(more[:-2])
        if kind not in KINDS or prepare not in _PREPARED:
            raise ValueError(f"{file}: `-- name: {line}` lacks a kind, which is one of {[*KINDS]}")
        shared = rest.startswith(sql.TABLES_LINE)
        commented = rest.removeprefix(sql.TABLES_LINE)
        comment = _COMMENT.match(commented)
        assert comment is not None
        text = commented[comment.end() :].strip().removesuffix(";")
        lines = [line.removeprefix("--").strip() for line in comment[0].splitlines()]
        if name in found or not text or not any(lines):
            raise ValueError(f"{file}: {name} is there twice, or has no comment, or no text")
        prepared = _PREPARED[prepare]
        if _ALL_COLUMNS.search(text):
            if prepared:
                raise ValueError(f"{file}: {name} is prepared and returns all columns of a table")
            prepared = False
        of_table = {
            table: Named(sql.of_table(text, table).encode(), "\n".join(lines), kind, prepared)
            for table in (JOB_TABLES if shared else JOB_TABLES[:1])
        }
        found[name] = of_table if shared else of_table[JOB_TABLES[0]]
    return found


@cache
def _file(noun: str) -> SimpleNamespace:
    return SimpleNamespace(
        **parse((sql.QUERIES / f"{noun}.sql").read_text(encoding="utf-8"), f"{noun}.sql")
    )


def comments(noun: str) -> dict[str, str]:
    """Return the comment of each statement of a file, as one line, by the statement's name."""
    return {
        name: " ".join((one if isinstance(one, Named) else one["ingest_jobs"]).comment.split())
        for name, one in vars(_file(noun)).items()
    }


def __getattr__(noun: str) -> SimpleNamespace:
    """Return the statements of one file; it is read once, when it is first named."""
    try:
        found = globals()[noun] = _file(noun)
    except FileNotFoundError:
        raise AttributeError(f"there is no sql/queries/{noun}.sql") from None
    return found
