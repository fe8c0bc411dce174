"""A row that raises is skipped, and the rows beside it are processed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest

import queue_workflows
from queue_workflows import config, db, history
from queue_workflows.scheduler import ScheduleEntry, Ticker
from tests.support import (
    app_triggers,
    constants,
    factories,
    rows_before_checks,
    sweeps,
    tabled,
    transitions,
    wait,
)
from tests.support.clocks import Clock
from tests.support.factories import one

STATES = ["P0001", "22003", "57P01", "40001", "53100"]
"""A plain RAISE, a number out of range, and words that only the server should use."""


def guard(conn: db.Connection, table: str, *ids: str, **more: str) -> None:
    """An app's own trigger that raises for these ids."""
    listed = ", ".join(f"'{each}'" for each in ids)
    app_triggers.refuse(conn, table, f"OLD.id IN ({listed})", **more)


@pytest.fixture(autouse=True)
def accepted(conn: db.Connection) -> Generator[None]:
    yield
    app_triggers.accept(conn)


@contextmanager
def guarded(conn: db.Connection) -> Generator[None]:
    """Remove the trigger and all runs and jobs at the end of the block."""
    yield
    app_triggers.accept(conn)
    factories.empty(conn, "workflow_runs", "ingest_jobs")


@pytest.mark.parametrize("table", ["ingest_jobs", "workflow_node_jobs", "workflow_runs"])
def test_a_row_that_cannot_be_promoted_delays_no_other(conn: db.Connection, table: str) -> None:
    for state in STATES:
        with tabled.case(state), guarded(conn):
            promoted_past(conn, table, state)


def promoted_past(conn: db.Connection, table: str, state: str) -> None:
    for name in ("a", "bad", "z"):
        if table == "workflow_runs":
            factories.run(conn, id=name, status="queued", mode="node")
        elif table == "ingest_jobs":
            factories.ingest(conn, id=name, available_at="2100-01-01")
        else:
            factories.node(conn, id=name, available_at="2100-01-01")
    with factories.unguarded(conn, table):
        due = "available_at = now() - interval '1 minute'"
        conn.execute(f"UPDATE {table} SET {due} WHERE id IN ('a', 'bad', 'z')".encode())
    guard(conn, table, "bad", state=state)
    sweeper = sweeps.Sweeper(conn)
    assert sweeper.promote_due() == 2
    waiting = factories.column(conn, f"SELECT id FROM {table} WHERE available_at IS NOT NULL")
    assert waiting == ["bad"]
    assert sweeper.promote_due() == 0


def test_a_row_that_cannot_be_promoted_is_tried_again_and_fails_at_its_bound(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "claim.recovery.MAX_FAILURES", 3)
    factories.ingest(conn, id="bad", available_at="2100-01-01")
    with factories.unguarded(conn, "ingest_jobs"):
        conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 minute'")
    guard(conn, "ingest_jobs", "bad", event="UPDATE OF available_at")
    clock = Clock(0.0)
    sweeper = sweeps.Sweeper(conn, clock)
    for _ in range(3):
        assert one(conn, "SELECT status FROM ingest_jobs") == "queued"
        sweeper.promote_due()
        clock.now += 60
    row = factories.reread(conn, {"id": "bad"})
    assert (row["status"], "the app refuses bad" in row["error"]) == ("failed", True)
    assert row["error"].startswith("poison: the engine failed 3 times on it")


def test_a_row_that_is_set_aside_is_left_alone_until_its_back_off_is_over(
    conn: db.Connection,
) -> None:
    factories.ingest(conn, id="bad", available_at="2100-01-01")
    with factories.unguarded(conn, "ingest_jobs"):
        conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 minute'")
    guard(conn, "ingest_jobs", "bad")
    clock = Clock(0.0)
    sweeper = sweeps.Sweeper(conn, clock)
    sweeper.promote_due()
    app_triggers.accept(conn)
    assert sweeper.promote_due() == 0
    clock.now += 0.5
    assert sweeper.promote_due() == 1


@pytest.mark.parametrize("family", ["node", "ingest"])
def test_a_lapsed_lease_that_cannot_be_taken_back_delays_no_other(
    conn: db.Connection, family: str
) -> None:
    for state in STATES:
        with tabled.case(state), guarded(conn):
            taken_back_past(conn, family, state)


def taken_back_past(conn: db.Connection, family: str, state: str) -> None:
    ids = [f"j{number}" for number in range(5)]
    for each in ids:
        if family == "node":
            factories.node(conn, id=each)
            transitions.expire(conn, transitions.claim_node(conn))
        else:
            factories.ingest(conn, id=each)
            transitions.expire(conn, transitions.claim_ingest(conn))
    table = "workflow_node_jobs" if family == "node" else "ingest_jobs"
    guard(conn, table, "j1", "j3", state=state)
    sweeps.reclaim(conn)
    left = factories.column(conn, f"SELECT id FROM {table} WHERE status = 'running'")
    assert sorted(left) == ["j1", "j3"]


def test_a_lapse_count_at_its_end_delays_no_other(conn: db.Connection) -> None:
    for each in ("bad", "good"):
        factories.ingest(conn, id=each)
        transitions.expire(conn, transitions.claim_ingest(conn))
    rows_before_checks.change(conn, "ingest_jobs", "bad", lapse_count="2147483647")
    sweeps.reclaim(conn)
    assert one(conn, "SELECT status FROM ingest_jobs WHERE id = 'good'") == "queued"
    assert one(conn, "SELECT status FROM ingest_jobs WHERE id = 'bad'") == "failed"


def test_a_worker_row_of_garbage_does_not_stop_the_reclaim_of_gone_workers(
    conn: db.Connection,
) -> None:
    for worker, detail in (("gone", {"lock": True}), ("odd", {"lock": "maybe"})):
        factories.ingest(conn, id=worker)
        job = transitions.claim_ingest(conn, transitions.who("fetch", worker_id=worker))
        factories.insert(
            conn, "workers", worker_id=worker, host_label="box", queue="fetch", pid=1, detail=detail
        )
        with factories.unguarded(conn, "ingest_jobs"):
            conn.execute(
                "UPDATE ingest_jobs SET heartbeat_at = now() - interval '1 hour' WHERE id = %s",
                (job["id"],),
            )
    conn.execute("UPDATE workers SET last_seen = now() - interval '1 hour'")
    sweeper = sweeps.Sweeper(conn)
    taken = sweeper.reclaim_gone("ingest", 30)
    assert [row["id"] for row in taken] == ["gone"]


def test_an_orphan_that_cannot_be_cancelled_delays_no_other(conn: db.Connection) -> None:
    run_id = factories.run(conn, mode="node", status="completed")
    for each in ("a", "bad", "z"):
        factories.node(conn, run_id, each, id=each)
    guard(conn, "workflow_node_jobs", "bad")
    sweeps.cancel_orphans(conn)
    query = "SELECT id FROM workflow_node_jobs WHERE status = 'queued'"
    assert factories.column(conn, query) == ["bad"]


def waits(conn: db.Connection, job_id: str, policy: str = '{"timeout_s": 1}') -> None:
    """An input node whose wait has been over for an hour."""
    factories.node(
        conn, factories.run(conn, mode="node"), job_id, id=job_id, node_module="__input__x",
        inputs={"target": "answer"},
    )  # fmt: skip
    with factories.unguarded(conn, "workflow_node_jobs"):
        conn.execute(
            "UPDATE workflow_node_jobs SET status = 'awaiting_input', policy = %s::jsonb"
            " WHERE id = %s",
            (policy, job_id),
        )
    conn.execute(
        "INSERT INTO workflow_input_timeouts (job_id, claim_no, due_at)"
        " VALUES (%s, 0, now() - interval '1 hour')",
        (job_id,),
    )


def test_a_wait_that_cannot_be_ended_delays_no_other(conn: db.Connection) -> None:
    for each in ("a", "bad", "z"):
        waits(conn, each)
    rows_before_checks.change(
        conn, "workflow_input_timeouts", "bad", key="job_id", due_at="'-infinity'"
    )
    guard(conn, "workflow_node_jobs", "bad")
    sweeps.expire_inputs(conn)
    query = "SELECT id FROM workflow_node_jobs WHERE status = 'failed' ORDER BY id"
    assert factories.column(conn, query) == ["a", "z"]


def test_a_wait_of_a_job_with_an_empty_id_delays_no_other(conn: db.Connection) -> None:
    for each in ("", "z"):
        waits(conn, each)
    sweeps.expire_inputs(conn)
    query = "SELECT id FROM workflow_node_jobs WHERE status = 'failed' ORDER BY id"
    assert factories.column(conn, query) == ["", "z"]


@pytest.mark.parametrize(
    "policy",
    [
        '"x"',
        "[1]",
        '{"timeout_s": 1e400}',
        '{"timeout_s": [[]]}',
        f'{{"timeout_s": {"9" * 5000}}}',
        "[" * 300 + "]" * 300,
        '{"timeout_s": 1, "default": ' + "[" * 150 + "]" * 150 + "}",
    ],
)
def test_a_policy_of_garbage_ends_its_wait(conn: db.Connection, policy: str) -> None:
    waits(conn, "odd", policy)
    sweeps.expire_inputs(conn)
    assert one(conn, "SELECT status FROM workflow_node_jobs") == "failed"
    assert one(conn, "SELECT count(*) FROM workflow_input_timeouts") == 0


@pytest.mark.parametrize("table", ["ingest_jobs", "workflow_runs"])
def test_a_row_that_cannot_be_deleted_stops_no_pruning(conn: db.Connection, table: str) -> None:
    for each in ("a", "bad", "z"):
        if table == "ingest_jobs":
            factories.ingest(conn, id=each, status="completed", finished_at="2020-01-01")
        else:
            factories.run(
                conn, id=each, mode="node", status="completed", finished_at="2020-01-01",
                updated_at="2020-01-01",
            )  # fmt: skip
    factories.insert(
        conn, "worker_heartbeats", host_label="old", queue="cpu", last_seen="2020-01-01"
    )
    guard(conn, table, "bad", event="DELETE")
    history.prune()
    assert factories.column(conn, f"SELECT id FROM {table}") == ["bad"]
    assert one(conn, "SELECT count(*) FROM worker_heartbeats") == 0


def test_a_retention_of_garbage_stops_no_pruning(conn: db.Connection) -> None:
    for queue in ("odd", "fetch"):
        factories.ingest(conn, id=queue, queue=queue, status="completed", finished_at="2020-01-01")
    rows_before_checks.put(conn, "queue_settings", queue="'odd'", retention_days="'NaN'")
    history.prune()
    assert factories.column(conn, "SELECT id FROM ingest_jobs") == ["odd"]


FAILING = {
    "it raises": "RAISE EXCEPTION 'the app refuses it'",
    "it finds no row": "SELECT id INTO STRICT NEW.id FROM ingest_jobs WHERE false",
}
"""What a trigger of the app does that ends in an error."""


@pytest.mark.parametrize("why", FAILING)
def test_a_schedule_entry_that_cannot_be_fired_delays_no_other(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    at = datetime(2031, 3, 1, 10, tzinfo=timezone.utc)
    config.configure(ingest_queues={"fetch"})
    for name in ("bad", "good"):
        queue_workflows.register_ingest_task(name, lambda: None)
    entries = [ScheduleEntry(name, 5, name, "fetch") for name in ("bad", "good")]
    clock = Clock(0.0)
    ticker = Ticker(schedule=entries, now_fn=lambda: at + timedelta(seconds=clock.now))
    ticker.run_once()
    clock.now = 600
    when = "NEW.task_name = 'bad'"
    with app_triggers.doing(conn, "ingest_jobs", when, FAILING[why], "INSERT"):
        assert len(ticker.run_once()) == 1
        assert factories.column(conn, "SELECT task_name FROM ingest_jobs") == ["good"]
    assert wait.until(ticker.run_once)
    query = "SELECT task_name FROM ingest_jobs ORDER BY 1"
    assert factories.column(conn, query) == ["bad", "good"]


def test_a_waiter_that_raises_fails_no_holder_and_delays_no_other(conn: db.Connection) -> None:
    for state in STATES:
        with tabled.case(state), guarded(conn):
            for each in ("holder", "bad", "next"):
                factories.ingest(conn, id=each, lock_key="k")
            held = transitions.claim_ingest(conn)
            guard(conn, "ingest_jobs", "bad", state=state)
            transitions.complete_ingest(conn, held)
            assert transitions.claim_ingest(conn)["id"] == "next"


def test_the_sweep_of_lock_queues_skips_a_waiter_that_raises(conn: db.Connection) -> None:
    for key in ("k", "l"):
        for each in ("holder", "bad", "next"):
            factories.ingest(conn, id=f"{each} of {key}", lock_key=key)
    with factories.unguarded(conn, "ingest_jobs"):
        conn.execute(
            "UPDATE ingest_jobs SET status = 'completed', blocked_reason = NULL"
            " WHERE id LIKE 'holder%'"
        )
    guard(conn, "ingest_jobs", "bad of k")
    assert sweeps.admit_missed_waiters(conn) == 2
    query = "SELECT id FROM ingest_jobs WHERE status = 'queued' AND blocked_reason IS NULL"
    assert sorted(factories.column(conn, query)) == ["bad of l", "next of k"]


def test_a_waiter_that_cannot_be_admitted_fails_no_holder_and_delays_no_other(
    conn: db.Connection,
) -> None:
    factories.insert(conn, "queue_settings", queue="fetch", partition_max_running=1)
    for each in ("holder", "bad", "next", "last"):
        factories.ingest(conn, id=each, partition_key="p")
    held = transitions.claim_ingest(conn)
    guard(conn, "ingest_jobs", "bad")
    transitions.complete_ingest(conn, held)
    assert transitions.claim_ingest(conn)["id"] == "next"
    waiting = "SELECT id FROM ingest_jobs WHERE blocked_reason = 'limited' ORDER BY id"
    assert factories.column(conn, waiting) == ["bad", "last"]
