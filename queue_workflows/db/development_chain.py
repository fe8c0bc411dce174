"""Convert a database of a development build, whose chain had 33 migrations, to the released one."""

from __future__ import annotations

import hashlib
from typing import Any

from queue_workflows import errors, sql
from queue_workflows.db import pool, statements

_COMPLETE = frozenset(
    {
        "2d33adcbe67eded56423709ebf080d3417cbf992e4572523e9dee1e10cbde2bc",
        "47c6aa167514f530b81c1a07da5980bd8fb135ee6aa5bba67a7c46d990888d79",
    }
)
"""SHA-256 of the lines `version checksum` of a ledger above 12 with the whole old chain.

Its last two builds differed in one function, which is installed again.
"""
UNRELEASED = frozenset({14})
"""Versions that development builds have applied with another text."""


def edited(name: str, version: int) -> errors.MigrationFailed:
    """Return the error for a database in which a development build applied a migration."""
    return errors.MigrationFailed(
        f"migration {name} of this database is that of a development build; run `queue-workflows "
        f"migrate --to {version - 1} --allow-data-loss`, which drops its tables with what they "
        "hold, then `queue-workflows migrate`"
    )


def version(conn: pool.Connection) -> int | None:
    """Return the version of a database that a development build made, else None.

    0013 makes queue_schema_objects, so a ledger with 13 and without that table is such a build's.
    """
    rows = _rows(conn)
    return rows[-1]["version"] if rows else None


def convert(conn: pool.Connection, checksum: str) -> None:
    """Replace what the ledger has above 12 by 0013 with its checksum; joins the transaction.

    That chain's tables are those of 0013, but for what `sql/development_chain.sql` changes. Does
    nothing to any other database. Raises `MigrationFailed` where the chain is not complete.
    """
    rows = _rows(conn)
    if not rows:
        return
    lines = "\n".join(f"{row['version']} {row['checksum']}" for row in rows)
    if hashlib.sha256(lines.encode()).hexdigest() not in _COMPLETE:
        raise errors.MigrationFailed(
            f"the database has schema version {rows[-1]['version']} of a development build; run"
            " the last development build's `queue-workflows migrate` first, or, if that finds"
            " nothing to do, start from an empty database"
        )
    conn.execute((sql.FOLDER / "development_chain.sql").read_bytes())
    statements.development_chain.forget(conn)
    statements.development_chain.record(conn, checksum=checksum)


def _rows(conn: pool.Connection) -> list[dict[str, Any]]:
    """Return the ledger's rows above 12 if a development build wrote them, else none."""
    row = statements.development_chain.is_possible(conn)
    if row is None or not row["is_possible"]:
        return []
    return statements.development_chain.applied(conn)
