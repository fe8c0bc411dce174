"""A delayed run starts when it is due, and not at the orchestrator's next poll."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, db, node_pool
from tests.support import factories, flow, orchestrators, wait

DUE = "now() + interval '0.4 seconds'"
LATE = timedelta(seconds=1)
HOSTILE = {"-infinity": True, "4713-01-01 BC": True, "infinity": False, "294276-12-31": False}
"""What a row may say that was written without the checks of the engine; whether its run starts."""


@pytest.fixture
def host(toy: flow.Flow, monkeypatch: pytest.MonkeyPatch) -> flow.Flow:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "30")
    toy.dag(a="")
    return toy


@contextmanager
def running() -> Iterator[None]:
    """A started pool that is past its first polls, so that only what is due wakes it."""
    pool = node_pool.NodePool()
    pool.start()
    try:
        with db.connect() as conn:
            listening = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            wait.until(lambda: factories.column(conn, listening))
        yield
    finally:
        pool.stop()


def delayed(conn: Any, at: str, **columns: Any) -> tuple[str, datetime]:
    """A queued run that is due then: its id, and when that is."""
    row = conn.execute(f"SELECT ({at})::timestamptz AS at").fetchone()
    given = {"status": "queued", "available_at": row["at"]} | columns
    return factories.run(conn, **given), row["at"]


def starts_in_time(run_id: str, due: datetime) -> None:
    wait.until(lambda: flow.status(run_id) == "running", timeout_s=10)
    assert due <= flow.run(run_id)["started_at"] < due + LATE


# --- the run starts ---


def test_a_run_from_before_the_start_of_the_orchestrator(host: flow.Flow, conn: Any) -> None:
    run_id, due = delayed(conn, "now() + interval '2 seconds'")
    with running():
        starts_in_time(run_id, due)


def test_a_run_that_is_inserted_while_the_orchestrator_waits(host: flow.Flow, conn: Any) -> None:
    with running():
        first, due = delayed(conn, DUE)
        later, due_later = delayed(conn, "now() + interval '0.7 seconds'")
        starts_in_time(first, due)
        starts_in_time(later, due_later)


def test_a_run_that_is_brought_forward(host: flow.Flow, conn: Any) -> None:
    with running():
        run_id, _ = delayed(conn, "now() + interval '1 hour'")
        update = f"UPDATE workflow_runs SET available_at = {DUE} WHERE id = %s RETURNING *"
        starts_in_time(run_id, conn.execute(update, (run_id,)).fetchone()["available_at"])


def test_a_run_that_is_queued_by_an_update(host: flow.Flow, conn: Any) -> None:
    with running():
        run_id, due = delayed(conn, DUE, status="draft")
        conn.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", (run_id,))
        starts_in_time(run_id, due)


def test_a_run_that_is_overdue_when_it_is_inserted(host: flow.Flow, conn: Any) -> None:
    with running():
        run_id, _ = delayed(conn, "now() - interval '1 minute'")
        wait.until(lambda: flow.status(run_id) == "running", timeout_s=10)


def test_a_start_that_failed_is_tried_again_when_its_back_off_ends(
    host: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def provide(name: str) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise OSError("the disk with the workflows is away")
        return host.workflows[name]

    queue_workflows.set_workflow_provider(provide, host.pipelines.__getitem__)
    with running():
        run_id = host.submit()
        wait.until(lambda: flow.status(run_id) == "running", timeout_s=10)
    assert len(calls) > 1


# --- and nothing else happens ---


def test_hostile_times_stop_no_other_run(
    host: flow.Flow, conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ids = {at: factories.run(conn, status="queued") for at in HOSTILE}
    with factories.unguarded(conn, "workflow_runs"):
        for at, run_id in ids.items():
            update = "UPDATE workflow_runs SET available_at = %s::timestamptz WHERE id = %s"
            conn.execute(update, (at, run_id))
    with running():
        run_id, due = delayed(conn, DUE)
        starts_in_time(run_id, due)
        query = "SELECT status <> 'queued' FROM workflow_runs WHERE id = %s"
        wait.until(lambda: {at: factories.one(conn, query, ids[at]) for at in ids} == HOSTILE)
    assert caplog.records == []


def test_only_a_run_that_is_due_before_the_next_poll_shortens_the_wait(
    host: flow.Flow, conn: Any
) -> None:
    delayed(conn, "now() + interval '1 hour'")
    delayed(conn, DUE, mode="step")
    delayed(conn, DUE, status="draft")
    host.look()
    assert orchestrators.poll_s(host.pool) > 20
    delayed(conn, "now() + interval '25 seconds'")
    delayed(conn, "now() + interval '20 seconds'")
    host.look()
    assert 10 < orchestrators.poll_s(host.pool) <= 20


@pytest.mark.parametrize("poll_s", ["0", "-1", "1e300", "inf", "-inf", "nan"])
def test_no_setting_of_the_poll_makes_the_check_fail(
    host: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch, poll_s: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", poll_s)
    delayed(conn, "now() + interval '30 seconds'")
    run_id, _ = delayed(conn, "now() - interval '1 second'")
    host.look()
    assert flow.status(run_id) == "running"
    assert 0 <= orchestrators.poll_s(host.pool) <= 30


def test_a_run_whose_row_is_locked_when_it_is_due_is_left_to_the_next_poll(
    host: flow.Flow, conn: Any
) -> None:
    run_id, _ = delayed(conn, "now() - interval '1 second'")
    with conn.transaction():
        conn.execute("SELECT FROM workflow_runs WHERE id = %s FOR UPDATE", (run_id,))
        host.look()
        assert orchestrators.poll_s(host.pool) > 20  # else it would check again and again
    assert flow.status(run_id) == "queued"
    host.look()
    assert flow.status(run_id) == "running"


def test_a_stream_of_delayed_runs_costs_one_check_for_many(host: flow.Flow) -> None:
    now = [0.0]
    pool = node_pool.NodePool(now_fn=lambda: now[0])
    try:
        pool.check()
        asked = orchestrators.counter(pool)
        for _ in range(100):
            orchestrators.notify(pool, "delayed")
            now[0] += 0.0001
        assert asked.statements == 0
        assert 0 < orchestrators.poll_s(pool) <= node_pool.STREAM_PAUSE_S
        now[0] += node_pool.STREAM_PAUSE_S
        orchestrators.notify(pool, "delayed")
        assert asked.statements == 1
        assert orchestrators.poll_s(pool) == config.CLAIM_POLL_S.read()
    finally:
        pool.stop()


def test_runs_that_are_due_one_after_the_other_are_collected(
    host: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "STREAM_PAUSE_S", 25.0)
    now = [100.0]
    pool = node_pool.NodePool(now_fn=lambda: now[0])
    try:
        delayed(conn, "now() + interval '20 seconds'")
        pool.check()
        assert 10 < orchestrators.poll_s(pool) <= 20
        run_id, _ = delayed(conn, "now() - interval '1 second'")
        pool.check()
        assert flow.status(run_id) == "running"
        assert orchestrators.poll_s(pool) == 25
        now[0] += 25
        pool.check()
        assert 10 < orchestrators.poll_s(pool) <= 20
    finally:
        pool.stop()


def test_a_delayed_run_sends_a_wake_up_of_its_own(conn: Any, heard: Callable[[], Any]) -> None:
    run_id, _ = delayed(conn, DUE)
    assert heard() == [("orchestrator_work", "delayed")]
    conn.execute("UPDATE workflow_runs SET progress_pct = 1 WHERE id = %s", (run_id,))
    delayed(conn, DUE, mode="step")
    delayed(conn, DUE, status="draft")
    assert heard() == []
    conn.execute("UPDATE workflow_runs SET available_at = NULL WHERE id = %s", (run_id,))
    assert heard() == [("orchestrator_work", "run")]
