"""Convert a database of a development build, whose chain had 33 migrations, to the released one."""

from __future__ import annotations

import hashlib
from typing import Any

from psycopg import sql

from queue_workflows import errors
from queue_workflows.db import pool

_COMPLETE = frozenset(
    {
        "2d33adcbe67eded56423709ebf080d3417cbf992e4572523e9dee1e10cbde2bc",
        "47c6aa167514f530b81c1a07da5980bd8fb135ee6aa5bba67a7c46d990888d79",
    }
)
"""SHA-256 of the lines `version checksum` of a ledger above 12 with the whole old chain.

Its last two builds differed in one function, which is installed again.
"""
_OBJECTS = b"""
CREATE TABLE queue_schema_objects (
    part            text PRIMARY KEY,
    checksum        text NOT NULL,
    package_version text NOT NULL,
    objects         jsonb NOT NULL,
    installed_at    timestamptz NOT NULL DEFAULT now()
);
GRANT SELECT ON queue_schema_objects TO PUBLIC;
ALTER TABLE lock_turns ADD COLUMN IF NOT EXISTS admits boolean NOT NULL DEFAULT false;
ALTER TABLE partition_turns
    ADD COLUMN IF NOT EXISTS admits boolean NOT NULL DEFAULT false,
    DROP CONSTRAINT partition_turns_pkey,
    ADD PRIMARY KEY (xid, queue, partition_key, admits);
DROP TRIGGER IF EXISTS ingest_jobs_cancel_asked ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_audit_gone ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_forget ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_forget ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_cancel();
DROP FUNCTION IF EXISTS queue_workflows_audit_gone();
DROP FUNCTION IF EXISTS queue_workflows_forget_logs()
"""
"""What turns that chain's database into the one that 0013 and today's set of functions make."""


UNRELEASED = frozenset({14})
"""Versions that development builds have applied with another text."""


def edited(name: str, version: int) -> errors.MigrationFailed:
    """Return the error for a database in which a development build applied a migration."""
    return errors.MigrationFailed(
        f"migration {name} of this database is that of a development build; run `queue-workflows "
        f"migrate --to {version - 1} --allow-data-loss`, which drops its tables with what they "
        "hold, then `queue-workflows migrate`"
    )


def version(conn: pool.Connection, ledger: str) -> int | None:
    """Return the version of a database that a development build made, else None.

    0013 makes queue_schema_objects, so a ledger with 13 and without that table is such a build's.
    """
    rows = _rows(conn, ledger)
    return rows[-1]["version"] if rows else None


def convert(conn: pool.Connection, ledger: str, checksum: str) -> None:
    """Replace what the ledger has above 12 by 0013 with its checksum; joins the transaction.

    That chain's tables are those of 0013, but for what `_OBJECTS` changes. Does nothing to any
    other database. Raises `MigrationFailed` where the chain is not complete.
    """
    rows = _rows(conn, ledger)
    if not rows:
        return
    lines = "\n".join(f"{row['version']} {row['checksum']}" for row in rows)
    if hashlib.sha256(lines.encode()).hexdigest() not in _COMPLETE:
        raise errors.MigrationFailed(
            f"the database has schema version {rows[-1]['version']} of a development build; run"
            " the last development build's `queue-workflows migrate` first, or, if that finds"
            " nothing to do, start from an empty database"
        )
    table = sql.Identifier(ledger)
    conn.execute(_OBJECTS)
    conn.execute(sql.SQL("DELETE FROM {} WHERE version > 12").format(table))
    conn.execute(
        sql.SQL("INSERT INTO {} (version, checksum) VALUES (13, %s)").format(table), (checksum,)
    )


def _rows(conn: pool.Connection, ledger: str) -> list[dict[str, Any]]:
    """Return the ledger's rows above 12 if a development build wrote them, else none."""
    row = conn.execute(
        "SELECT to_regclass(quote_ident(%s)) IS NOT NULL"
        " AND to_regclass('queue_schema_objects') IS NULL AS possible",
        (ledger,),
    ).fetchone()
    if row is None or not row["possible"]:
        return []
    statement = sql.SQL(
        "SELECT l.version, to_jsonb(l) ->> 'checksum' AS checksum FROM {} l"
        " WHERE l.version > 12 ORDER BY l.version"
    )
    return conn.execute(statement.format(sql.Identifier(ledger))).fetchall()
