"""Build one hostile change: a valid row with extreme values in one or two columns."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import db
from tests.hostile import app, folders, writable_columns
from tests.hostile.extreme_values import Value, extremes
from tests.hostile.writable_columns import INSERT, UPDATE

Conn = psycopg.Connection[Any]
PARKED = "parks"
APPEND_ONLY = ("ingest_job_events", "operator_acts")
"""Its trigger refuses every DELETE."""
REFUSED = ("22", "23", "42501", "42804", "42P10", "428C9", "54", "55000", "P0001", "QW", "0A000")
"""SQLSTATEs of a refusal: bad data, a constraint, no right, too large, a trigger's own."""
_OWN = {"host_label": "hostile-machine", "queue": app.OTHER, "model": "hostile-model"}
Known = Mapping[str, Mapping[str, Sequence[str | None]]]
"""What the rows of a table must say to be taken up at all; drawn by the number of the change."""
KNOWN: Known = {
    "workflow_runs": {
        "workflow_name": ("short", PARKED),
        "out_dir": (str(folders.ROOT / "hostile"),),
    },
    "ingest_jobs": {
        "queue": (app.SOLO, app.NOTES, app.FEEDS, app.CALLS),
        "task_name": ("note", app.FAILS),
    },
    "workflow_node_jobs": {"node_module": ("quick",), "queue": ("cpu",)},
    "workflow_input_submissions": {"node_id": ("ask",), "value": ('"l"',)},
    "workflow_dispatch_events": {"node_id": ("ask",)},
}
SHARED: Known = {
    "ingest_jobs": {"lock_key": (None, app.LOCK_KEY, None), "partition_key": (None, app.PARTITION)}
}
"""Keys of normal jobs in hostile rows: of roles that may not set their own row to running."""
_PLAIN = {
    "pg_snapshot": "3:3:",
    "timestamp with time zone": "2026-01-01", "jsonb": "{}", "boolean": "true", "text[]": "{}",
    "smallint": "2", "integer": "2", "bigint": "2", "real": "1", "double precision": "1",
}  # fmt: skip


class Change(NamedTuple):
    """What is written: `given` are the extreme values, the rest of the row is plain."""

    number: int
    table: str
    verb: str
    given: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        what = ", ".join(f"{column} = {value.name!r}" for column, value in self.given)
        return f"{self.verb} {self.table}: {what}"

    @property
    def heavy(self) -> bool:
        """Return whether it writes megabytes."""
        return any(value.heavy for _, value in self.given)


@dataclass
class Written:
    """The outcomes of the changes of a batch."""

    accepted: list[tuple[Change, dict[str, Any]]] = field(
        default_factory=list[tuple[Change, dict[str, Any]]]
    )
    """Each with the key of its row."""
    refused: int = 0
    odd: list[str] = field(default_factory=list[str])
    """Refusals that are none: the server ran into an error of its own."""

    def keys(self, table: str, column: str = "id") -> list[tuple[Change, Any]]:
        """Return the keys of the rows of one table."""
        return [(change, key[column]) for change, key in self.accepted if change.table == table]


def singles(tables: dict[str, writable_columns.Table]) -> list[Change]:
    """Yield every writable column with each of its extreme values, inserted, then updated."""
    numbers = itertools.count()
    return [
        Change(next(numbers), table.name, verb, ((column.name, value),))
        for table in tables.values()
        for verb in _verbs(table)
        for column in table.writable(verb)
        for value in extremes(column)
    ]


def pairs(tables: dict[str, writable_columns.Table], rng: random.Random) -> Iterator[Change]:
    """Yield endless random pairs of columns of one table, each with a random extreme value."""
    choices = [
        (table, verb, columns)
        for table in tables.values()
        for verb in _verbs(table)
        if len(columns := table.writable(verb)) > 1
    ]
    weights = [len(columns) for _, _, columns in choices]
    for number in itertools.count(1_000_000):
        table, verb, columns = rng.choices(choices, weights)[0]
        two = rng.sample(columns, 2)
        given = tuple((column.name, rng.choice(extremes(column))) for column in two)
        yield Change(number, table.name, verb, given)


def _verbs(table: writable_columns.Table) -> list[str]:
    found = [INSERT] if table.insertable else []
    return found + ([UPDATE] if table.writable(UPDATE) else [])


class Writer:
    """Writes changes as the role; rows that it updates are the hostile's own, never another's."""

    def __init__(
        self,
        owner: Conn,
        hostile: Conn,
        tables: dict[str, writable_columns.Table],
        known: Known = KNOWN,
    ) -> None:
        self._owner, self._hostile, self._tables = owner, hostile, tables
        self._known = {name: dict(columns) for name, columns in known.items()}
        jobs = tables.get("ingest_jobs")
        if known is KNOWN and jobs is not None and not jobs.columns["status"].may_insert:
            self._known["ingest_jobs"] |= SHARED["ingest_jobs"]
        self._tag = secrets.token_hex(4)
        self._parked: list[str] = []

    def needs(self, changes: Sequence[Change]) -> int:
        """Return how many parked runs the changes need for their rows."""
        tables = [self._tables[change.table] for change in changes]
        return sum(any(c.refers_to for c in table.columns.values()) for table in tables)

    def write(self, changes: Sequence[Change], parked: Sequence[str]) -> Written:
        """Write them one by one; `parked`: runs to hang rows on."""
        self._parked = [*parked]
        written = Written()
        for change in changes:
            try:
                key = self._write(change)
            except db.Error as error:
                written.refused += 1
                if not (error.sqlstate or "?").startswith(REFUSED):
                    written.odd.append(f"{change}: {error.sqlstate} {error}")
            else:
                if key is not None:
                    written.accepted.append((change, key))
        return written

    def _write(self, change: Change) -> dict[str, Any] | None:
        table = self._tables[change.table]
        plain = self._plain(table, change)
        given = {column: value.text for column, value in change.given}
        if change.verb == INSERT:
            return self._insert(self._hostile, table, {**plain, **given})
        key = self._insert(self._hostile if table.insertable else self._owner, table, plain)
        return self._update(table, key, given)

    def _plain(self, table: writable_columns.Table, change: Change) -> dict[str, str | None]:
        """Return the columns that make the row valid, apart from the change."""
        found: dict[str, str | None] = {}
        known = self._known.get(table.name, {})
        for column in table.columns.values():
            if column.refers_to is not None and self._parked:
                found[column.name] = self._parked.pop()
            elif column.name in known:
                found[column.name] = known[column.name][change.number % len(known[column.name])]
            elif column.required or (column.is_key and column.base == "text"):
                found[column.name] = self._plain_value(column, change)
        return {name: value for name, value in found.items() if self._may_name(table, name)}

    def _may_name(self, table: writable_columns.Table, column: str) -> bool:
        return table.columns[column].may_insert or not table.insertable

    def _plain_value(self, column: writable_columns.Column, change: Change) -> str:
        if column.name in _OWN:
            return _OWN[column.name]
        if column.base == "text":
            return column.words[0] if column.words else f"hostile-{self._tag}-{change.number}"
        if column.words:
            return column.words[0]
        if column.is_key and column.base in ("bigint", "integer"):
            return str(1_000_000 + change.number)
        if column.name == "every_s":
            return "2"
        return _PLAIN[column.base]

    def _insert(
        self, conn: Conn, table: writable_columns.Table, row: dict[str, str | None]
    ) -> dict[str, Any]:
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING {}").format(
            sql.Identifier(table.name),
            sql.SQL(", ").join(map(sql.Identifier, row)),
            sql.SQL(", ").join(_cast(table, name) for name in row),
            _key_of(table),
        )
        return self._one(conn, table, statement, [*row.values()])

    def _update(
        self, table: writable_columns.Table, key: dict[str, Any], given: dict[str, str | None]
    ) -> dict[str, Any] | None:
        statement = sql.SQL("UPDATE {} SET {} WHERE {} RETURNING {}").format(
            sql.Identifier(table.name),
            sql.SQL(", ").join(
                sql.SQL("{} = {}").format(sql.Identifier(name), _cast(table, name))
                for name in given
            ),
            _where(table),
            _key_of(table),
        )
        return self._one(self._hostile, table, statement, [*given.values(), *key.values()])

    @staticmethod
    def _one(
        conn: Conn, table: writable_columns.Table, statement: sql.Composed, values: list[Any]
    ) -> dict[str, Any]:
        row = conn.execute(statement, values).fetchone()
        return dict(zip(table.key, row or (), strict=False))

    def delete(self, written: Written) -> None:
        """Remove what is still there as the owner, so that one batch does not blame another."""
        for change, key in reversed(written.accepted):
            table = self._tables[change.table]
            if key and change.table not in APPEND_ONLY:
                statement = sql.SQL("DELETE FROM {} WHERE {}").format(
                    sql.Identifier(table.name), _where(table)
                )
                self._owner.execute(statement, [*key.values()])


def _cast(table: writable_columns.Table, column: str) -> sql.Composed:
    return sql.SQL("%s::{}").format(sql.SQL(table.columns[column].type))  # type: ignore[arg-type]


def _key_of(table: writable_columns.Table) -> sql.Composed:
    """Return the key's columns as text, which any client can load, whatever they hold."""
    return sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(n)) for n in table.key)


def _where(table: writable_columns.Table) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("{}::text = %s").format(sql.Identifier(n)) for n in table.key
    )
