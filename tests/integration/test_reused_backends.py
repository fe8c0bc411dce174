"""The server process of a closed connection serves the next one, which cannot tell."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.support import invariants, reused_backends
from tests.support.database import Database

STATE = (
    "SET search_path = pg_catalog",
    "SET SESSION AUTHORIZATION pg_monitor",
    "RESET SESSION AUTHORIZATION; CREATE TEMP TABLE kept (n int)",
    "PREPARE kept AS SELECT 1",
    "LISTEN kept",
    "SELECT pg_advisory_lock(4711)",
    "DECLARE kept CURSOR WITH HOLD FOR SELECT 1",
    "SET lock_timeout = '7s'",
)
"""What belongs to a session."""
LEFT = """
SELECT current_setting('search_path'), session_user::text, current_setting('lock_timeout'),
       current_setting('application_name'), to_regclass('pg_temp.kept')::text,
       (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors),
       (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
"""


def opened(dsn: str, **more: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, application_name="test-of-reuse", **more)


def test_the_next_connection_gets_the_process_and_nothing_of_the_session(
    db: ModuleType, dsn: str
) -> None:
    with opened(dsn) as first:
        pid = first.info.backend_pid
        fresh = first.execute(LEFT).fetchone()
        for statement in STATE:
            first.execute(statement.encode())
        assert first.execute(LEFT).fetchone() != fresh
    assert first.closed
    with pytest.raises(psycopg.OperationalError):
        first.execute("SELECT 1")
    with opened(dsn) as second:
        assert second.info.backend_pid == pid
        assert second.execute(LEFT).fetchone() == fresh


def test_many_processes_for_other_connections_leave_room(db: ModuleType, dsn: str) -> None:
    others = [opened(dsn, options=f"-c seq_page_cost={n + 1}") for n in range(17)]
    for other in others:
        other.close()
    with opened(dsn) as first:
        pid = first.info.backend_pid
    with opened(dsn) as second:
        assert second.info.backend_pid == pid


def test_an_open_transaction_is_rolled_back(db: ModuleType, dsn: str) -> None:
    first = opened(dsn)
    pid = first.info.backend_pid
    first.execute("BEGIN")
    first.execute("CREATE TABLE never_kept (n int)")
    first.close()
    with opened(dsn) as second:
        assert second.info.backend_pid == pid
        assert second.execute("SELECT to_regclass('never_kept')").fetchone() == (None,)


def test_a_process_that_was_ended_is_not_handed_out(
    db: ModuleType, dsn: str, own_database: Database
) -> None:
    with opened(dsn) as first:
        pid = first.info.backend_pid
    own_database.admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with opened(dsn) as second:
        assert second.info.backend_pid != pid
        assert second.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("others", ["options=-c%20lock_timeout%3D3s", "target_session_attrs=any"])
def test_a_connection_with_other_parameters_gets_a_process_of_its_own(
    db: ModuleType, dsn: str, others: str
) -> None:
    with opened(dsn) as first:
        pid = first.info.backend_pid
    with opened(f"{dsn}&{others}") as second:
        assert second.info.backend_pid != pid


def test_another_database_is_left_alone(db: ModuleType, fresh_database: str) -> None:
    with opened(fresh_database) as first:
        pid = first.info.backend_pid
    with opened(fresh_database) as second:
        assert second.info.backend_pid != pid


def test_nothing_is_reused_while_it_is_off(db: ModuleType, dsn: str) -> None:
    with opened(dsn) as first:
        kept = first.info.backend_pid
    pids = {kept}
    with reused_backends.shared.off():
        for _ in range(2):
            with opened(dsn) as other:
                assert other.info.backend_pid not in pids
                pids.add(other.info.backend_pid)
    with opened(dsn) as last:
        assert last.info.backend_pid == kept


def test_waiting_processes_are_no_connections_that_outlive_a_test(
    db: ModuleType, dsn: str, own_database: Database
) -> None:
    before = own_database.backends()
    with opened(dsn), opened(dsn), db.connect():
        assert len(own_database.backends()) == len(before) + 3
    assert own_database.backends() == before


def test_an_async_connection_shares_them(db: ModuleType, dsn: str) -> None:
    with opened(dsn) as first:
        pid = first.info.backend_pid

    async def other() -> tuple[int, int]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            row = await (await conn.execute("SELECT pg_backend_pid()")).fetchone()
            assert row is not None
            return conn.info.backend_pid, row[0]

    assert asyncio.run(other()) == (pid, pid)
    with opened(dsn) as second:
        assert second.info.backend_pid == pid


def test_the_invariants_are_checked_in_the_transaction_that_is_open(
    db: ModuleType, own_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have left large tables.
    monkeypatch.setattr(reused_backends, "_GROWN", "SELECT false AS grown")
    broken = (
        "INSERT INTO ingest_jobs (id, task_name, queue, status, claim_no)"
        " VALUES ('x', 't', 'cpu', 'running', 1)"
    )
    with db.connect() as conn, conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL session_replication_role = replica")
        conn.execute(broken.encode())
        assert any("invariant 5: x" in line for line in invariants.broken(conn))
    with db.connect() as conn:
        assert invariants.broken(conn) == []
        kept = reused_backends.shared.planned(conn)
        assert kept is not conn and kept.info.dbname == own_database.name
        own_database.admin.execute(
            "SELECT pg_terminate_backend(%s, 5000)", (kept.info.backend_pid,)
        )
        assert invariants.broken(conn) == []
