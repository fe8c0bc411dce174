"""Many schedules, and many instants of one, cost short transactions and few rows a tick."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, schedules
from queue_workflows.scheduler import Ticker
from tests.support import timeouts
from tests.support.clocks import Clock

TEN = datetime(2024, 5, 1, 10, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)

SLOW = """
CREATE TABLE test_writes (id bigint);
CREATE FUNCTION test_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.02);
    INSERT INTO test_writes VALUES (pg_current_xact_id()::text::bigint);
    RETURN NEW;
END $$;
CREATE TRIGGER zz_slow BEFORE INSERT ON schedule_fires FOR EACH ROW EXECUTE FUNCTION test_slow();
"""


@pytest.fixture(autouse=True)
def _tasks(clean_process: None) -> None:
    config.register_ingest_task("prices", lambda: None)


@contextlib.contextmanager
def slow_fires(db: ModuleType) -> Generator[None]:
    with db.connection() as conn:
        conn.execute(SLOW)
    try:
        yield
    finally:
        with db.connection() as conn:
            conn.execute("DROP FUNCTION test_slow CASCADE; DROP TABLE test_writes")


def read(db: ModuleType, query: str) -> list[dict[str, Any]]:
    with db.connection() as conn:
        return conn.execute(query).fetchall()


@pytest.mark.parametrize(("names", "overlap"), [(1, "allow"), (2, "skip"), (1, "replace")])
def test_what_an_outage_missed_is_fired_in_short_transactions(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, names: int, overlap: Any
):
    clock = Clock(TEN)
    for number in range(names):
        schedules.add(
            f"s{number}", "every 1m", task_name="prices", queue="fetch", overlap=overlap,
            catch_up="all", catch_up_max=60,
        )  # fmt: skip
    with db.connection() as conn:
        conn.execute("UPDATE schedules SET changed_at = %s", (TEN,))
    ticker = Ticker(now_fn=clock)
    ticker.run_once()
    timeouts.shorten_schedule_batches(monkeypatch, 0.2)
    clock.now = TEN + 100 * MINUTE
    with slow_fires(db):
        ticker.run_once()
        (row,) = read(db, "SELECT count(DISTINCT id) AS n, count(*) AS all FROM test_writes")
    assert row["all"] == 60 * names
    assert row["n"] >= 5 * names
    for number in range(names):
        found = read(db, f"SELECT fire_at FROM schedule_fires WHERE name = 's{number}' ORDER BY 1")
        assert [one["fire_at"] for one in found] == [TEN + n * MINUTE for n in range(41, 101)]
    assert ticker.run_once() == []
    clock.now += MINUTE
    ticker.run_once()
    assert len(read(db, "SELECT FROM schedule_fires")) == 61 * names


MANY = """
INSERT INTO schedules (name, expression, task_name, queue)
SELECT 's' || n, 'every 366d', 'prices', 'fetch' FROM generate_series(1, 10000) n
"""
FEW = MANY.replace("10000", "3")


@pytest.mark.parametrize("statistics", ["of the empty table", "of a few rows", "up to date"])
def test_a_tick_reads_few_of_ten_thousand_schedules(db: ModuleType, conn: Any, statistics: str):
    ticker = Ticker()
    for _ in range(20):
        # Plans that the scheduler's connection kept would be for a table of one page.
        conn.execute(FEW)
        conn.execute("ANALYZE schedules")
        ticker.run_once()
        conn.execute("DELETE FROM schedules")
    if statistics == "of the empty table":
        conn.execute("ANALYZE schedules, schedule_fires")
    conn.execute(MANY)
    conn.execute(
        "UPDATE schedules SET next_at = now() + interval '1 day',"
        " wake_at = now() + interval '1 day'"
    )
    if statistics == "up to date":
        conn.execute("ANALYZE schedules, schedule_fires")
    conn.execute(
        "UPDATE schedules SET next_at = now() - interval '1 day', wake_at = now()"
        " WHERE name IN ('s7', 's4711')"
    )
    read_before = rows_read(db, conn)
    ticker.run_once()
    assert 0 < rows_read(db, conn) - read_before <= 60, scans(conn)
    assert read(db, "SELECT FROM schedules WHERE wake_at <= now()") == []
    read_before = rows_read(db, conn)
    ticker.run_once()
    assert rows_read(db, conn) - read_before <= 10, scans(conn)


def rows_read(db: ModuleType, conn: Any) -> int:
    """Rows that this test and the scheduler have read from the tables of schedules."""
    with db.transaction() as of_scheduler:
        of_scheduler.execute("SELECT pg_stat_force_next_flush()")
    conn.execute("SELECT pg_stat_force_next_flush()")
    (row,) = conn.execute(
        "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint AS n"
        "  FROM pg_stat_user_tables WHERE relname IN ('schedules', 'schedule_fires')"
    ).fetchall()
    return row["n"]


def scans(conn: Any) -> str:
    """How the rows that `rows_read` counts were read, for the message of a failure."""
    found = conn.execute(
        "SELECT t.relname, t.seq_scan, t.seq_tup_read, t.idx_scan, t.idx_tup_fetch,"
        " c.reltuples, c.relpages"
        "  FROM pg_stat_user_tables t JOIN pg_class c ON c.oid = t.relid"
        " WHERE t.relname IN ('schedules', 'schedule_fires')"
    ).fetchall()
    return "\n".join(map(str, found))
