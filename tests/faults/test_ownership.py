"""Which worker owns a job, and which is dead (rows O1 to O10 of `failure_coverage.py`)."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db
from tests.support import constants, dangerous_app, factories, flow, proxy, toy_app
from tests.support.commands import Command, Commands
from tests.support.dangerous_app import enqueue
from tests.support.wait import patience, until
from tests.support.worker_views import row as job

APP = ("--app", "tests.support.dangerous_app:setup")
WORKER = ("queue-claim-worker", *APP, "--queue")
NOTES = (*WORKER, dangerous_app.QUEUE)
QUICK = {"QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.3", "QUEUE_WORKFLOWS_CLAIM_POLL_S": "0.2"}
SWEEP_S = 0.2
BUSY_S = 1.5
"""What a busy machine takes to notice."""


@pytest.fixture
def wires(dsn: str) -> Iterator[tuple[proxy.Proxy, proxy.Proxy]]:
    with proxy.Proxy(dsn) as one, proxy.Proxy(dsn) as other:
        yield one, other


def orchestrator(cli: Commands, **env: str) -> Command:
    """One that dispatches by now."""
    given = {"QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S": str(SWEEP_S)} | env
    started = cli.start("queue-orchestrator", *APP, **given)
    until(lambda: "dispatches" in started.err, timeout_s=60)
    return started


def worker(cli: Commands, *argv: str, **env: str) -> Command:
    """One that serves by now."""
    started = cli.start(*(argv or NOTES), **{**QUICK, **env})
    until(lambda: "works on" in started.err, timeout_s=60)
    return started


def is_(job_id: str, *statuses: str) -> bool:
    return job(job_id)["status"] in statuses


def counters(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["claim_no"], row["attempts"], row["crash_count"]


def is_known(conn: db.Connection, job_id: str) -> bool:
    """Whether the worker of the job has sent a heartbeat, and its session has the advisory lock."""
    query = (
        "SELECT count(*) FROM workers w JOIN ingest_jobs j USING (worker_id)"
        " WHERE j.id = %s AND w.state = 'busy' AND (w.detail ->> 'lock')::boolean"
    )
    return factories.one(conn, query, job_id) == 1


# --- O1, O2 -------------------------------------------------------------------------------------


def test_a_stopped_worker_loses_its_job_to_a_sibling_and_leaves_with_77(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    orchestrator(cli)
    short = (*NOTES, "--lease-seconds", "2")
    label = {"AI_LEADS_HOST_LABEL": "box", "QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S": "0"}
    stopped = worker(cli, *short, **label)
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: toy_app.pids(tmp_path, "note"), timeout_s=30)
    worker(cli, *short, **label)
    lost = job(held)
    stopped.send(signal.SIGSTOP)
    try:
        # The sibling beats under the same label all the while, and that keeps no lease alive.
        until(lambda: len(toy_app.pids(tmp_path, "note")) == 2, timeout_s=30)
        taken = job(held)
        assert (taken["status"], taken["claim_no"]) == ("running", lost["claim_no"] + 1)
        assert taken["claimed_by"] == lost["claimed_by"] == "box"
        assert taken["worker_id"] != lost["worker_id"]
        assert taken["lapse_count"] == 1
    finally:
        stopped.send(signal.SIGCONT)
    assert stopped.wait(30) == 77, stopped.err
    assert job(held)["worker_id"] == taken["worker_id"], "the one that came back touched nothing"
    (tmp_path / "go").touch()
    until(lambda: is_(held, "completed"), timeout_s=30)
    assert counters(job(held)) == (2, 0, 0)
    finished = factories.column(
        conn, "SELECT worker_id FROM ingest_job_events WHERE event_type = 'completed'"
    )
    assert finished == [taken["worker_id"]]
    assert len({*toy_app.pids(tmp_path, "note")}) == 2


# --- O7 -----------------------------------------------------------------------------------------


def test_a_job_that_kills_three_workers_is_poison_and_its_error_has_the_cause(
    cli: Commands, tmp_path: Path
) -> None:
    deadly = {how: enqueue("end", tmp_path, how=how) for how in ("killed", "crashed", "left")}
    harmless = {how: enqueue("end", tmp_path, how=how) for how in ("exits", "starved")}
    healthy = enqueue("note", tmp_path)
    parent = cli.start(
        *NOTES,
        "--supervise",
        QUEUE_WORKFLOWS_CRASH_BACKOFF_S="0.1",
        QUEUE_WORKFLOWS_CLAIM_POLL_S="0.2",
        **constants.env({"runtime.supervisor.BACKOFF_MAX_S": 0.1}),
    )
    for job_id in (*deadly.values(), *harmless.values()):
        until(lambda job_id=job_id: is_(job_id, "failed"), timeout_s=60)
    until(lambda: is_(healthy, "completed"), timeout_s=30)
    for how, job_id in deadly.items():
        row = job(job_id)
        assert (row["crash_count"], row["claim_no"], row["attempts"]) == (3, 3, 0), how
        assert len(toy_app.pids(tmp_path, how)) == 3, how
    for how, said in (("killed", "SIGKILL"), ("crashed", "SIGSEGV"), ("left", "exit code 3")):
        error = job(deadly[how])["error"]
        assert said in error
        assert re.search(r"peak memory \d+ MB", error), error
        (own,) = set(parent.pids("--queue")) - {parent.process.pid}
        assert f":{own}:" in error, "the last worker is named"
    for how, said in (("exits", "sys.exit('bye')"), ("starved", "MemoryError")):
        row = job(harmless[how])
        assert counters(row) == (1, 1, 0), "its worker outlived it: an ordinary failure"
        assert said in row["error"]
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0


# --- O8 -----------------------------------------------------------------------------------------

RESTARTS = 20


@pytest.mark.timeout(240)
def test_twenty_restarts_of_the_orchestrator_requeue_nothing_of_the_living(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    started = cli.start("queue-orchestrator", *APP)
    long = enqueue("note", tmp_path, wait=True)
    workers = [worker(cli, *NOTES, "--lease-seconds", "6"), worker(cli, *WORKER, "cpu")]
    until(lambda: toy_app.pids(tmp_path, "note"), timeout_s=30)
    runs: list[str] = []
    for number in range(RESTARTS):
        runs += [toy_app.submit(tmp_path) for _ in range(3)]
        if number % 2:
            until(lambda: "dispatches" in started.err, timeout_s=60)  # noqa: B023  read at once
        started.send(signal.SIGKILL if number % 3 else signal.SIGTERM)
        started.wait()
        started = cli.start("queue-orchestrator", *APP)
    until(lambda: all(flow.status(run_id) == "completed" for run_id in runs), timeout_s=60)
    (tmp_path / "go").touch()
    until(lambda: is_(long, "completed"), timeout_s=30)
    assert counters(job(long)) == (1, 0, 0)
    rows = conn.execute("SELECT claim_no, attempts, crash_count FROM workflow_node_jobs").fetchall()
    assert Counter(counters(row) for row in rows) == {(1, 0, 0): 2 * len(runs)}
    assert len(toy_app.pids(tmp_path, "quick")) == len(rows), "executions are jobs"
    assert len(toy_app.pids(tmp_path, "note")) == 1
    assert [each.process.poll() for each in workers] == [None, None]


# --- O9 -----------------------------------------------------------------------------------------

DEADLINE_S = 0.5


@pytest.mark.timeout(180)
def test_a_rolling_restart_under_load_burns_no_attempt_and_is_done_by_its_deadline(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    stop = ("--shutdown-timeout", str(DEADLINE_S))
    # The first two end no sooner than all this is over, and are first in line again.
    ids = [enqueue("nap", tmp_path, number=number, seconds=0, wait=True) for number in range(2)]

    def is_under_load(seat: int) -> bool:
        if waiting(conn) < 12:
            ids.append(enqueue("nap", tmp_path, number=len(ids), seconds=0.1))
        return is_busy(conn, fleet[seat].process.pid)

    fleet = [worker(cli, *NOTES, *stop) for _ in range(2)]
    for _ in range(2):
        for seat in range(2):
            until(lambda: is_under_load(seat), timeout_s=30)  # noqa: B023
            asked = time.monotonic()
            fleet[seat].send(signal.SIGTERM)
            assert fleet[seat].wait(DEADLINE_S + 10) == 0
            assert time.monotonic() - asked <= patience(DEADLINE_S + 1 + BUSY_S)
            fleet[seat] = worker(cli, *NOTES, *stop)
    (tmp_path / "go").touch()
    until(lambda: all(is_(job_id, "completed") for job_id in ids), timeout_s=60)
    rows = [job(job_id) for job_id in ids]
    assert {(row["attempts"], row["crash_count"]) for row in rows} == {(0, 0)}
    back = factories.one(
        conn, "SELECT count(*) FROM ingest_job_events WHERE event_type = 'requeued'"
    )
    assert back == sum(row["claim_no"] - 1 for row in rows), "each new claim follows a hand-back"
    assert back >= 1
    for number in range(len(ids)):
        assert len(toy_app.pids(tmp_path, f"end-{number}")) == 1, "each was done once"


def waiting(conn: db.Connection) -> int:
    return factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'queued'")


def is_busy(conn: db.Connection, pid: int) -> bool:
    query = "SELECT count(*) FROM ingest_jobs WHERE status = 'running' AND worker_id LIKE %s"
    return factories.one(conn, query, f"%:{pid}:%") > 0


# --- O10, and the deaths that nobody saw ---------------------------------------------------------

SILENT_S = 3.0


def test_a_killed_worker_without_parent_is_replaced_within_one_and_a_half_windows(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    """By default 45 s: STALE_WORKER_AFTER_S is 30, swept at each third of it."""
    orchestrator(cli, QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S=str(SILENT_S))
    killed = worker(cli)
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: is_known(conn, held), timeout_s=30)
    worker(cli)
    begun = time.monotonic()
    killed.send(signal.SIGKILL)
    until(lambda: len(toy_app.pids(tmp_path, "note")) == 2, timeout_s=30)
    assert time.monotonic() - begun <= patience(1.5 * SILENT_S + BUSY_S)
    assert (counters(job(held)), job(held)["lapse_count"]) == ((2, 0, 0), 1)
    assert job(held)["lease_expires_at"] is not None
    (tmp_path / "go").touch()
    until(lambda: is_(held, "completed"), timeout_s=30)


def test_a_handler_that_keeps_the_gil_past_the_window_is_not_dead(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    orchestrator(
        cli,
        QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S="1",
    )
    worker(cli), worker(cli)
    held = enqueue("hog", tmp_path, seconds=4)
    until(lambda: is_(held, "completed"), timeout_s=30)
    assert counters(job(held)) == (1, 0, 0)
    assert len(toy_app.pids(tmp_path, "hog")) == 1


def test_an_outage_longer_than_the_window_makes_nobody_dead(
    cli: Commands, conn: db.Connection, wires: tuple[proxy.Proxy, proxy.Proxy], tmp_path: Path
) -> None:
    """The sweep has its database again before the worker has, whose session is gone.

    The worker then has most of a window to renew, as long as a busy machine takes for that.
    """
    own, theirs = wires
    window_s = 8.0
    env = {"QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": str(window_s)}
    swept = orchestrator(cli, **env, QUEUE_WORKFLOWS_DB_URL=own.dsn)
    living = worker(cli, QUEUE_WORKFLOWS_DB_URL=theirs.dsn)
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: is_known(conn, held), timeout_s=30)
    # By then the sweep has had its database for a whole window: it would dare.
    threading.Event().wait(window_s)
    for wire in wires:
        wire.freeze()
        wire.cut()
    threading.Event().wait(1.1 * window_s)
    before = job(held)["heartbeat_at"]
    own.thaw()
    threading.Event().wait(0.2 * window_s)
    theirs.thaw()
    until(lambda: job(held)["heartbeat_at"] > before, timeout_s=30)
    (tmp_path / "go").touch()
    until(lambda: is_(held, "completed"), timeout_s=30)
    assert counters(job(held)) == (1, 0, 0)
    assert len(toy_app.pids(tmp_path, "note")) == 1
    assert [each.process.poll() for each in (swept, living)] == [None] * 2
    assert "session of its worker is gone" not in swept.err
