"""A session of ours sets what it depends on, whatever environment, DSN, role and database say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

from queue_workflows import db, errors, jobs
from tests.support import console, factories, transitions
from tests.support.database import Database, environment

SETTINGS = {
    "client_encoding": "LATIN1", "DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu", "extra_float_digits": "-15", "bytea_output": "escape",
    "array_nulls": "off", "transform_null_equals": "on", "standard_conforming_strings": "off",
    "quote_all_identifiers": "on", "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on", "plan_cache_mode": "force_custom_plan",
    "session_replication_role": "replica", "statement_timeout": "7s", "lock_timeout": "7s",
    "idle_in_transaction_session_timeout": "7s", "idle_session_timeout": "700s", "jit": "on",
}  # fmt: skip
KEPT = {"search_path": "public, pg_catalog", "synchronous_commit": "local"}
"""What an operator decides stays."""
OPTIONS = " ".join(
    f"-c {name}={value}".replace(", ", ",\\ ") for name, value in (SETTINGS | KEPT).items()
)
LIBPQ = {"PGCLIENTENCODING": "LATIN1", "PGDATESTYLE": "German", "PGTZ": "Asia/Kathmandu"}
EURO = "price in \N{EURO SIGN}, \N{SNOWMAN}"
NUMBER = 0.1 + 0.2


def of_environment(dsn: str, stack: contextlib.ExitStack) -> str:
    stack.enter_context(environment(PGOPTIONS=OPTIONS, **LIBPQ))
    return dsn


def of_dsn(dsn: str, _: contextlib.ExitStack) -> str:
    return conninfo.make_conninfo(dsn, options=OPTIONS, client_encoding="LATIN1")


def of_database(dsn: str, _: contextlib.ExitStack) -> str:
    return altered(dsn, sql.SQL("ALTER DATABASE {name} SET {setting} = {value}"))


def of_role(dsn: str, _: contextlib.ExitStack) -> str:
    return altered(
        dsn, sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {name} SET {setting} = {value}")
    )


def altered(dsn: str, statement: sql.SQL) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for setting, value in (SETTINGS | KEPT).items():
            parts = sql.SQL(", ").join(map(sql.Literal, value.split(", ")))
            name = sql.Identifier(conn.info.dbname)
            conn.execute(
                statement.format(name=name, setting=sql.Identifier(setting.lower()), value=parts)
            )
    return dsn


PLACES: tuple[Callable[[str, contextlib.ExitStack], str], ...] = (
    of_environment, of_dsn, of_database, of_role,
)  # fmt: skip


def in_force(conn: db.Connection) -> dict[str, Any]:
    return {
        name: conn.execute("SELECT current_setting(%s) AS x", (name,)).fetchall()[0]["x"]
        for name in (*SETTINGS, *KEPT)
    }


def sessions() -> list[dict[str, Any]]:
    """The settings of a connection of each kind: pooled, dedicated, and one that migrates."""
    found: list[dict[str, Any]] = []
    with db.statement() as conn:
        found.append(in_force(conn))
    for limited in (True, False):
        with db.connect(limited=limited) as conn:
            found.append(in_force(conn))
    with db.connection() as conn:
        found.append({"client_encoding": in_force(conn)["client_encoding"]})
    db.close_pool()
    return found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_sessions_are_the_same_wherever_a_setting_is_made(
    place: Callable[[str, contextlib.ExitStack], str], migrated_database: str, db: Any
) -> None:
    with environment(QUEUE_WORKFLOWS_DB_URL=migrated_database):
        expected = sessions()
    with contextlib.ExitStack() as stack:
        url = place(migrated_database, stack)
        stack.enter_context(environment(QUEUE_WORKFLOWS_DB_URL=url))
        found = sessions()
        for each in found[:-1]:
            assert {name: each[name] for name in KEPT} == KEPT
        assert [{**each, **KEPT} for each in found] == [{**each, **KEPT} for each in expected]
        a_failure_keeps_its_words_and_a_result_its_digits()
        assert "nothing to do" in console.printed("migrate")
        db.close_pool()


def test_poll_only_leaves_nothing_in_a_session(
    migrated_database: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(QUEUE_WORKFLOWS_DB_URL=migrated_database))
        expected = sessions()
        stack.enter_context(environment(QUEUE_WORKFLOWS_DB_URL=of_dsn(migrated_database, stack)))
        monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
        assert [{**each, **KEPT} for each in sessions()] == [{**each, **KEPT} for each in expected]
        a_failure_keeps_its_words_and_a_result_its_digits()
        assert "nothing to do" in console.printed("migrate")
        with db.connect() as conn, db.statement() as pooled:
            for each in (conn, pooled):
                for _ in range(8):
                    each.execute("SELECT 1 AS one")
                left = "SELECT name FROM pg_settings WHERE source = 'session'"
                assert psycopg.Connection.execute(each, left).fetchall() == []
                names = "SELECT name FROM pg_prepared_statements"
                assert psycopg.Connection.execute(each, names).fetchall() == []
        db.close_pool()


def a_failure_keeps_its_words_and_a_result_its_digits() -> None:
    with db.connect() as conn:
        failed = factories.ingest(conn, args={"text": EURO}, max_attempts=1)["id"]
        job = transitions.claim_ingest(conn)
        assert job["args"] == {"text": EURO}
        transitions.record(conn, job, "failed", error=EURO)
        done = factories.ingest(conn)["id"]
        transitions.complete(conn, transitions.claim_ingest(conn), number=NUMBER)
        row = jobs.get(failed)
        assert row is not None
        assert (row["status"], row["error"]) == ("failed", EURO)
        row = jobs.get(done)
        assert row is not None
        assert (row["status"], row["result"]) == ("completed", {"number": NUMBER})


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_is_not_utf8_is_refused_in_one_line(
    encoding: str, own_database: Database, db: Any
) -> None:
    name = own_database.fresh_name()
    libc = " LOCALE_PROVIDER libc" if own_database.admin.info.server_version >= 150_000 else ""
    own_database.admin.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}'{libc} LC_COLLATE 'C' LC_CTYPE 'C'"
        " TEMPLATE template0".encode()
    )
    dsn = conninfo.make_conninfo(own_database.dsn, dbname=name)
    try:
        with environment(QUEUE_WORKFLOWS_DB_URL=dsn):
            for command in ("migrate", "status", "audit", "runs", "queues", "workers", "metrics"):
                text = console.refusal(command)
                assert f"the encoding of database {name} is {encoding}" in text
            for command in ("doctor", "connect"):
                done = console.command(command)
                assert done.code == 1
                assert f"is {encoding}" in done.out, done
                assert "Traceback" not in done.err
            db.close_pool()  # what follows opens a pool and no other connection
            for pooled in (db.statement, db.transaction, db.connection):
                with pytest.raises(errors.InvalidConfig, match=f"is {encoding}"), pooled():
                    pass
            db.close_pool()
    finally:
        own_database.drop(name)
