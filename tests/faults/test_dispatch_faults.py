"""Faults of dispatch: crashes, two orchestrators, bad plans (rows D of `failure_coverage.py`)."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import queue_workflows
from queue_workflows import db
from tests.support import factories, flow, invariants, orchestrators, sweeps, toy_app, transitions
from tests.support.commands import TOYHOST, Commands
from tests.support.wait import patience, until

APP = ("--app", TOYHOST)
DISPATCH = ("queue-orchestrator", *APP)
CPU = ("queue-claim-worker", *APP, "--queue", "cpu")


# --- D1 -----------------------------------------------------------------------------------------


def test_a_new_run_starts_within_two_seconds_beside_sixty_that_wait_for_a_person(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    toy_app.setup()
    started = cli.start(*DISPATCH)
    until(lambda: "dispatches" in started.err, timeout_s=60)
    parked = [toy_app.submit(tmp_path, "asking") for _ in range(60)]
    worker = cli.start(*CPU)
    query = "SELECT count(*) FROM workflow_node_jobs WHERE status = 'awaiting_input'"
    until(lambda: factories.one(conn, query) == len(parked), timeout_s=60)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    begun = time.monotonic()
    run_id = toy_app.submit(tmp_path, "chain")
    until(lambda: flow.states(run_id) == {"work/first": "queued"}, timeout_s=30)
    assert time.monotonic() - begun <= patience(2)
    assert started.process.poll() is None


# --- D8 -----------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_two_orchestrators_of_which_one_keeps_dying_dispatch_each_event_once(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    steady, dying = cli.start(*DISPATCH), cli.start(*DISPATCH)
    workers = [cli.start(*CPU) for _ in range(2)]
    runs: list[str] = []
    for _ in range(5):
        runs += [toy_app.submit(tmp_path, "chain") for _ in range(12)]
        until(lambda: "dispatches" in dying.err, timeout_s=60)  # noqa: B023  read at once
        dying.send(signal.SIGKILL)
        dying.wait()
        dying = cli.start(*DISPATCH)
    until(lambda: all(flow.status(run_id) == "completed" for run_id in runs), timeout_s=60)
    for command in (steady, dying, *workers):
        until(lambda: "dispatches" in command.err or "works on" in command.err, timeout_s=60)  # noqa: B023
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert not re.search("error|traceback|deadlock", command.err, re.IGNORECASE), command.err
    rows = conn.execute("SELECT claim_no, status FROM workflow_node_jobs").fetchall()
    assert Counter(tuple(row.values()) for row in rows) == {(1, "completed"): 2 * len(runs)}
    assert len(toy_app.pids(tmp_path, "quick")) == 2 * len(runs), "executions are jobs"
    events = "SELECT count(*) FROM workflow_dispatch_events WHERE processed_at IS NULL"
    assert factories.one(conn, events) == 0
    assert invariants.broken(conn, slack_s=5) == []


# --- D10 ----------------------------------------------------------------------------------------

WORST = ("hashjoin", "mergejoin", "hashagg", "material", "memoize")
"""Without them a join reads its inner side again for each row of the outer one."""


@pytest.fixture
def worst(conn: db.Connection) -> db.Connection:
    for name in WORST:
        conn.execute("SELECT set_config(%s, 'off', false)", (f"enable_{name}",))
    return conn


def test_a_claim_takes_no_more_than_requested_by_the_worst_plan(
    worst: db.Connection,
) -> None:
    for _ in range(60):
        factories.ingest(worst)
    worst.execute("ANALYZE ingest_jobs")
    for left in (60, 53, 46):
        assert factories.one(worst, QUEUED) == left
        assert len(transitions.claim(worst, transitions.who("fetch"), 7)) == 7
    assert factories.one(worst, QUEUED) == 39


QUEUED = "SELECT count(*) FROM ingest_jobs WHERE status = 'queued'"
OPEN_END = re.compile(r"\bIN\s*\(\s*SELECT(?:(?!\)).)*\bLIMIT\b", re.IGNORECASE | re.DOTALL)


def test_no_statement_limits_what_it_locks_inside_an_in() -> None:
    assert OPEN_END.search("UPDATE t SET a = 1 WHERE id IN (SELECT id FROM t LIMIT 9 FOR UPDATE)")
    package = Path(queue_workflows.__path__[0])
    files = [*package.rglob("*.py"), *package.rglob("*.sql")]
    assert len(files) > 40
    for file in files:
        text = re.sub(r'"\s*\n\s*"', " ", file.read_text())
        assert not OPEN_END.search(text), file.name


# --- D11 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["running", "queued", "draft", "parked"])
@pytest.mark.parametrize("lapsed", [True, False], ids=["lapsed", "fresh"])
def test_only_the_end_of_a_run_ends_its_jobs_at_a_restart(
    conn: db.Connection, status: str, lapsed: bool
) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id)
    factories.node(conn, run_id, "waits", priority=200)
    held = transitions.claim_node(conn)
    conn.execute("UPDATE workflow_runs SET status = %s", (status,))
    if lapsed:
        transitions.expire(conn, held)
    assert orchestrators.recover() is True
    sweeps.cancel_orphans(conn)
    assert flow.states(run_id) == {
        "n": "queued" if lapsed else "running",
        "waits": "queued",
    }


def test_failing_or_waiting_events_do_not_delay_later_ones(
    cli: Commands, conn: db.Connection
) -> None:
    for _ in range(4):
        factories.node(conn, node_module="__input__turnout", inputs={"widget": "turnout"})
        factories.node(conn, node_module="fail")
        factories.ingest(conn, task_name="nobody", queue="notes")
    for queue in ("cpu", "notes"):
        cli.start(*CPU[:-1], queue, QUEUE_WORKFLOWS_CLAIM_POLL_S="600")
    left = (
        "SELECT (SELECT count(*) FROM workflow_node_jobs WHERE status IN ('queued', 'running'))"
        " + (SELECT count(*) FROM ingest_jobs WHERE status IN ('queued', 'running'))"
    )
    until(lambda: factories.one(conn, left) == 0, timeout_s=30)
