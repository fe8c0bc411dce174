"""Kill, stop and cut off processes that serve an ingest queue by `IngestPlan`; no job is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from psycopg import conninfo

from queue_workflows import db
from tests.support import clocks, database, factories, invariants, local_queue_app, proxy
from tests.support.commands import Commands
from tests.support.local_queue_processes import (
    Journal,
    Start,
    assert_apart,
    assert_each_ended_once,
    processes,
    states,
    stopped,
)
from tests.support.wait import until


@pytest.fixture
def conn(cli: Commands) -> Iterator[db.Connection]:
    """A connection beside an orchestrator that takes back what has lapsed."""
    local_queue_app.setup()
    app = ("--app", "tests.support.local_queue_app:setup")
    sweeper = cli.start("queue-orchestrator", *app, QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S="0.1")
    with db.connect() as made:
        yield made
        assert invariants.broken(made, slack_s=5) == []
    sweeper.send(signal.SIGTERM)
    assert sweeper.wait() == 0, sweeper.err


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with processes(dsn) as made:
        yield made


def test_no_job_is_lost_or_runs_twice_at_once_when_processes_are_killed(
    conn: db.Connection, start: Start, journal: Journal
) -> None:
    journal.let_go()
    survivor, killed = start(workers=2), dict[int, float]()
    for jobs_now in (12, 24, 36):
        victim = start(workers=2)
        journal.enqueue(12, pause_s=0.2)
        until(lambda victim=victim: journal.begun(victim) >= 1)
        victim.kill()
        victim.wait(10)
        killed[victim.pid] = clocks.boot_s()
        assert_each_ended_once(conn, jobs_now)
    assert_apart(journal.spans(), killed)
    runs = sum(map(len, journal.spans()))
    assert 36 < runs <= 36 + 3 * 2, "only what ran in a killed process ran again"
    stopped(survivor)


def test_a_process_stopped_longer_than_its_lease_starts_nothing_that_others_have(
    conn: db.Connection, start: Start, journal: Journal
) -> None:
    victim = start(workers=2, limit=6)
    ids = journal.enqueue(6)
    until(lambda: journal.begun(victim) == 2)
    until(lambda: states(conn) == {"running": 6})
    victim.send_signal(signal.SIGSTOP)
    other = start(workers=6)
    until(lambda: journal.begun(other) == 6)
    journal.let_go()
    assert_each_ended_once(conn, 6)
    victim.send_signal(signal.SIGCONT)
    rows = conn.execute("SELECT result, claim_no FROM ingest_jobs WHERE id = ANY (%s)", (ids,))
    found = {(row["result"]["pid"], row["claim_no"] >= 2) for row in rows}
    assert found == {(other.pid, True)}
    stopped(other)
    journal.enqueue(2)
    assert_each_ended_once(conn, 8)
    assert journal.begun(victim) == 4, "those that waited in it began elsewhere, and new ones here"
    stopped(victim)


def test_a_process_without_its_database_ends_its_handlers_before_others_begin(
    conn: db.Connection, start: Start, journal: Journal, wire: proxy.Proxy
) -> None:
    victim = start(by=wire.dsn, workers=2)
    ids = journal.enqueue(2)
    until(lambda: journal.begun(victim) == 2)
    wire.freeze()
    other = start(workers=2)
    until(lambda: journal.begun(other) == 2)
    wire.thaw()
    journal.let_go()
    assert_each_ended_once(conn, 2)
    assert_apart(journal.spans(), {})
    stopped(other)
    journal.enqueue(2)
    assert_each_ended_once(conn, 4)
    assert journal.begun(victim) == 4, "it goes on with new jobs"
    rows = conn.execute("SELECT crash_count FROM ingest_jobs WHERE id = ANY (%s)", (ids,))
    assert [row["crash_count"] for row in rows] == [0, 0], "no handler was at fault"
    stopped(victim)


def test_connections_that_break_lose_and_double_nothing(
    conn: db.Connection, start: Start, journal: Journal, wire: proxy.Proxy
) -> None:
    journal.let_go()
    both = [start(by=wire.dsn, workers=3), start(by=wire.dsn, workers=3)]
    journal.enqueue(80, pause_s=0.05)
    for done in (10, 40):
        until(lambda done=done: states(conn)["completed"] >= done, timeout_s=60)
        wire.cut()
    assert_each_ended_once(conn, 80)
    assert_apart(journal.spans(), {})
    crashes = factories.column(conn, "SELECT crash_count FROM ingest_jobs")
    assert set(crashes) == {0}
    stopped(*both)


TERMINATE = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"
)


def test_connections_that_the_server_terminates_lose_and_double_nothing(
    conn: db.Connection, start: Start, journal: Journal, dsn: str
) -> None:
    journal.let_go()
    named = database.url({**conninfo.conninfo_to_dict(dsn), "application_name": "victim"})
    both = [start(by=named, workers=3), start(by=named, workers=3)]
    terminated = 0
    for count in (30, 60, 90):
        journal.enqueue(30, pause_s=0.05)
        until(lambda count=count: states(conn)["completed"] >= count - 20, timeout_s=60)
        terminated += factories.one(conn, TERMINATE, "victim")
    assert terminated >= 3
    assert_each_ended_once(conn, 90)
    assert_apart(journal.spans(), {})
    assert set(factories.column(conn, "SELECT crash_count FROM ingest_jobs")) == {0}
    stopped(*both)
