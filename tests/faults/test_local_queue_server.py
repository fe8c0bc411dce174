"""Stop and restart the server under processes that serve a queue by `IngestPlan`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_workflows import db
from tests.soak import server as servers
from tests.support import (
    commands,
    database,
    embedded_servers,
    factories,
    invariants,
    local_queue_app,
)
from tests.support.local_queue_processes import (
    LEASE_S,
    Journal,
    Process,
    Start,
    assert_apart,
    processes,
    stopped,
)
from tests.support.wait import until


@pytest.fixture
def server(clean_process: None) -> Iterator[servers.Server]:
    """A server of this test's own, with an orchestrator that takes back what has lapsed."""
    del clean_process
    with (
        servers.throw_away() as made,
        database.environment(QUEUE_WORKFLOWS_DB_URL=made.dsn),
        commands.commands(QUEUE_WORKFLOWS_DB_URL=made.dsn) as cli,
    ):
        local_queue_app.setup()
        db.bootstrap()
        app = ("--app", "tests.support.local_queue_app:setup")
        quick = {"QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S": "0.1"}
        sweeper = cli.start("queue-orchestrator", *app, **quick)
        yield made
        sweeper.send(signal.SIGTERM)
        assert sweeper.wait() == 0, sweeper.err
        db.close_pool()


@pytest.fixture
def start(server: servers.Server) -> Iterator[Start]:
    with processes(server.dsn) as made:
        yield made


def completed() -> int:
    """The jobs that are completed; 0 while the server is away."""
    try:
        with db.connect() as conn:
            query = "SELECT count(*) FROM ingest_jobs WHERE status = 'completed'"
            return factories.one(conn, query)
    except db.Error:
        return 0


def claimed() -> int:
    with db.connect() as conn:
        return factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'running'")


def assert_ended_once(count: int) -> None:
    until(lambda: completed() == count, timeout_s=60)
    with db.connect() as conn:
        found = factories.column(
            conn,
            "SELECT count(*) FROM ingest_job_events WHERE event_type = 'completed' GROUP BY job_id",
        )
        assert found == [1] * count
        crashes = factories.column(conn, "SELECT crash_count FROM ingest_jobs")
        assert set(crashes) == {0}, "no handler was at fault"
        assert invariants.broken(conn, slack_s=5) == []


@contextlib.contextmanager
def standing_still(server: servers.Server) -> Iterator[None]:
    """Stop the postmaster, then its children; a child that was about to end has no pid left."""
    postmaster = embedded_servers.running(server.folder).pid
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children")
    os.kill(postmaster, signal.SIGSTOP)
    pids = [int(pid) for pid in children.read_text().split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in [*pids, postmaster]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def started(start: Start) -> list[Process]:
    return [start(workers=3), start(workers=3)]


@pytest.mark.parametrize("away_s", [LEASE_S / 4, LEASE_S * 2], ids=["short", "long"])
def test_a_server_that_stands_still_loses_and_doubles_nothing(
    server: servers.Server, start: Start, journal: Journal, away_s: float
) -> None:
    both = started(start)
    journal.enqueue(30, pause_s=0.1)
    until(lambda: sum(map(journal.begun, both)) == 6)
    journal.let_go()
    until(lambda: completed() >= 6)
    with standing_still(server):
        time.sleep(away_s)  # the fault itself
    assert_ended_once(30)
    assert_apart(journal.spans(), {})
    journal.enqueue(6)
    assert_ended_once(36)
    stopped(*both)


def test_a_server_that_is_restarted_under_jobs_loses_and_doubles_nothing(
    server: servers.Server, start: Start, journal: Journal
) -> None:
    both = started(start)
    journal.let_go()
    journal.enqueue(60, pause_s=0.05)
    for done in (6, 30):
        until(lambda done=done: completed() >= done, timeout_s=60)
        server.restart()
    assert_ended_once(60)
    assert_apart(journal.spans(), {})
    stopped(*both)


def test_a_process_stops_in_time_while_its_server_stands_still(
    server: servers.Server, start: Start, journal: Journal
) -> None:
    process = start(workers=2, limit=6, stop_s=1.0)
    journal.enqueue(6)
    until(lambda: journal.begun(process) == 2)
    until(lambda: claimed() == 6)
    with standing_still(server):
        process.send_signal(signal.SIGTERM)
        journal.let_go()
        assert process.wait(20) == 0
    other = start(workers=2)
    assert_ended_once(6)
    stopped(other)
