"""Read a chain of migrations from its folder, and its ledger, the table of applied migrations.

An app may have a chain and ledger of its own, so these statements are composed with its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from psycopg import sql

from queue_workflows import errors, migrations
from queue_workflows.db import pool, statements

_FILE = re.compile(r"(\d{4})_(.+?)(\.down)?\.sql")
_COMPATIBLE = re.compile(r"^--\s*compatible-with:\s*(\d+)\s*$", re.MULTILINE)


class Migration(NamedTuple):
    """One step of a chain: its number, its name and the SQL of both directions."""

    version: int
    name: str
    up: str
    down: str | None

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the forward text."""
        return hashlib.sha256(self.up.encode()).hexdigest()

    @property
    def compatible_with(self) -> int:
        """Return the oldest version of code that works with it (`-- compatible-with: N`), or 0."""
        match = _COMPATIBLE.search(self.up)
        return int(match[1]) if match else 0


def chain(migrations_dir: str | Path | None = None) -> list[Migration]:
    """Return the migrations in a folder, in order.

    Files whose names start with no digit are ignored. Raises `MigrationFailed` for a folder that is
    missing or has none, a misnamed file, two of one version, and a down file without its up file.
    """
    folder = Path(migrations_dir) if migrations_dir is not None else migrations.dir()
    if not folder.is_dir():
        raise errors.MigrationFailed(f"no migration folder {str(folder)!r}: name one that exists")
    ups, downs = _files(folder)
    if orphans := sorted(downs.keys() - {path.stem for path in ups.values()}):
        raise errors.MigrationFailed(f"{orphans[0]}.down.sql has no {orphans[0]}.sql beside it")
    if not ups:
        raise errors.MigrationFailed(f"no NNNN_name.sql in migration folder {str(folder)!r}")
    found: list[Migration] = []
    for version in sorted(ups):
        path, down = ups[version], downs.get(ups[version].stem)
        text = down.read_text("utf-8") if down else None
        found.append(Migration(version, path.stem[5:], path.read_text("utf-8"), text))
    return found


def _files(folder: Path) -> tuple[dict[int, Path], dict[str, Path]]:
    """Return the up files by version, and the down files by the stem of their up file."""
    ups: dict[int, Path] = {}
    downs: dict[str, Path] = {}
    for path in sorted(folder.glob("[0-9]*.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise errors.MigrationFailed(f"{path.name}: a migration is named NNNN_name.sql")
        version = int(match[1])
        if match[3]:
            downs[path.name.removesuffix(".down.sql")] = path
        elif version < 1:
            raise errors.MigrationFailed(f"{path.name}: migrations are numbered from 0001 on")
        elif version in ups:
            raise errors.MigrationFailed(
                f"{path.name}: version {version} is taken by {ups[version].name}"
            )
        else:
            ups[version] = path
    return ups, downs


REQUIRED_VERSION = max(_files(migrations.dir())[0])
"""The schema version that this code works with: the highest of its own chain."""


NAME = "queue_schema_version"
"""The ledger of our own chain."""


def read(conn: pool.Connection, name: str) -> dict[int, dict[str, Any]]:
    """Return version, checksum and compatible_with of each applied migration, by version.

    Creates the ledger if it is missing, and the columns that an older one lacks.
    """
    table = sql.Identifier(name)
    # IF NOT EXISTS needs privileges that a role may lack if it has no migration to apply.
    if not statements.migrations.ledger_is_whole(conn, ledger=name):
        conn.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {t} (version integer PRIMARY KEY,"
                " applied_at timestamptz NOT NULL DEFAULT now());"
                " ALTER TABLE {t} ADD COLUMN IF NOT EXISTS checksum text,"
                " ADD COLUMN IF NOT EXISTS compatible_with integer NOT NULL DEFAULT 0"
            ).format(t=table)
        )
    rows = conn.execute(
        sql.SQL("SELECT version, checksum, compatible_with FROM {}").format(table)
    ).fetchall()
    return {row["version"]: row for row in rows}


def of_others(conn: pool.Connection) -> str | None:
    """Return how later versions of the 0.3.0 line have migrated a database, or None.

    Their migrations have the same numbers as ours, but other tables.
    """
    if not statements.sessions.has_table(conn, table=NAME):
        return None
    found = [row["version"] for row in statements.migrations.of_others(conn)]
    if not found:
        return None
    which = f"migrations {found[0]} to {found[-1]}" if found[1:] else f"migration {found[0]}"
    last = found[-1]
    return f"at version {last} of another queue_workflows, whose {which} this code does not have"


OF_OTHERS_REMEDY = (
    "let that version's own code revert to version 12 (`db.downgrade(to_version=12)`), which this "
    "code takes over, or name another database"
)


def refuse_others(conn: pool.Connection) -> None:
    """Raise `SchemaTooNew` if `of_others` returns a text."""
    if (text := of_others(conn)) is not None:
        raise errors.SchemaTooNew(f"the database is {text}: {OF_OTHERS_REMEDY}")


def versions(conn: pool.Connection, name: str) -> set[int]:
    """Return the versions of the applied migrations; none if there is no ledger."""
    if not statements.sessions.has_table(conn, table=name):
        return set()
    rows = conn.execute(sql.SQL("SELECT version FROM {}").format(sql.Identifier(name))).fetchall()
    return {row["version"] for row in rows}


def record(conn: pool.Connection, name: str, step: Migration) -> None:
    """Record that a migration is applied."""
    statement = sql.SQL("INSERT INTO {} (version, checksum, compatible_with) VALUES (%s, %s, %s)")
    conn.execute(
        statement.format(sql.Identifier(name)), (step.version, step.checksum, step.compatible_with)
    )


def forget(conn: pool.Connection, name: str, version: int) -> None:
    """Delete the record of a migration that was reverted."""
    statement = sql.SQL("DELETE FROM {} WHERE version = %s")
    conn.execute(statement.format(sql.Identifier(name)), (version,))


def refuse_newer(name: str, known: int, applied: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `SchemaTooNew` if an applied migration needs newer code than version `known`."""
    package = "queue_workflows" if name == NAME else f"the package with the migrations of {name}"
    for version, row in applied.items():
        if version > known and row["compatible_with"] > known:
            raise errors.SchemaTooNew(
                f"the database is at schema version {version}, which needs code that knows version "
                f"{row['compatible_with']}; this code knows {known}: upgrade {package} here"
            )
