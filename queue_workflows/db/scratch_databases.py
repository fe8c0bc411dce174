"""Create databases for tests next to a `*_test` one, empty them between tests, and drop them."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Generator, Iterable
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from queue_workflows import errors
from queue_workflows.db import database_url, pool, statements

SUFFIX = "_test"
_STEM_MAX = 40
"""The most characters of the name before `_`, 8 digits and the suffix; PostgreSQL allows 63."""


@contextlib.contextmanager
def database(dsn: str) -> Generator[str]:
    """Yield the URL of a new, empty database on the server of a DSN of a `*_test` database.

    That database is not changed. The new one is dropped at the end, with its connections. Databases
    left by killed runs are dropped at the start. Raises `InvalidConfig` for a DSN with another name
    and `DatabaseRefused` if the role may not create databases.
    """
    parts = checked(dsn)
    given = str(parts["dbname"])
    stem = re.sub(r"\W", "_", given[: -len(SUFFIX)], flags=re.ASCII)[:_STEM_MAX]
    name = f"{stem}_{secrets.token_hex(4)}{SUFFIX}"
    url = _url(parts, "postgres")
    with contextlib.closing(pool.connect(url=url, limited=False, direct=True)) as admin:
        # Held while the database is in use, so that a sweep skips the database.
        statements.databases.try_lock(admin, name=name)
        _sweep(admin, stem)
        try:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except psycopg.errors.InsufficientPrivilege:
            user = admin.info.user
            raise errors.DatabaseRefused(
                f"user {user} may create no database: ALTER ROLE {user} CREATEDB, as a superuser"
            ) from None
        try:
            yield _url(parts, name)
        finally:
            _drop(admin, name)


def checked(dsn: str) -> dict[str, Any]:
    """Return the parts of a DSN.

    Raise `InvalidConfig` unless its database's name ends in `_test`.
    """
    parts = database_url.parsed(dsn)
    if not str(parts.get("dbname") or "").endswith(SUFFIX):
        raise errors.InvalidConfig(
            f"{database_url.describe(dsn)}: its name does not end in {SUFFIX}, as the names of "
            "databases for tests do"
        )
    return parts


def _sweep(admin: pool.Connection, stem: str) -> None:
    pattern = f"^{stem}_[0-9a-f]{{8}}{SUFFIX}$"
    for row in statements.databases.matching(admin, pattern=pattern):
        if statements.databases.try_lock(admin, name=row["name"]):
            _drop(admin, row["name"])
            statements.databases.unlock(admin, name=row["name"])


def _drop(admin: pool.Connection, name: str) -> None:
    admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _url(parts: dict[str, Any], name: str) -> str:
    """Return the DSN as a URL; host and port go in the query, where a socket's path is allowed."""
    rest = {key: value for key, value in parts.items() if key not in {"user", "password", "dbname"}}
    user = quote(str(parts.get("user") or ""), safe="")
    if user and parts.get("password"):
        user += ":" + quote(str(parts["password"]), safe="")
    at = "@" if user else ""
    return f"postgresql://{user}{at}/{quote(name, safe='')}?{urlencode(rest, quote_via=quote)}"


def filled(conn: pool.Connection) -> frozenset[str]:
    """Return the tables of the current schema that have rows."""
    names = [row["name"] for row in statements.databases.tables(conn)]
    if not names:
        return frozenset()
    each = sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} AS name WHERE EXISTS (SELECT FROM {})").format(
            sql.Literal(name), sql.Identifier(name)
        )
        for name in names
    )
    return frozenset(row["name"] for row in conn.execute(each).fetchall())


def empty(conn: pool.Connection, *, keep: Iterable[str]) -> None:
    """Empty every table that has rows, except `keep` (a migration's ledger)."""
    dirty = sorted(filled(conn) - set(keep))
    if dirty:
        listed = sql.SQL(", ").join(map(sql.Identifier, dirty))
        conn.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(listed))
