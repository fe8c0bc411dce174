"""The orchestrator process: schema, recovery at boot, outages at start, and its end."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from queue_workflows import config, orchestrator
from queue_workflows import db as database
from queue_workflows.runtime import signals
from tests.support import factories, flow
from tests.support.wait import until

SAYS_IT_DISPATCHES = "orchestrator dispatches on"


@contextmanager
def serving() -> Generator[signals.StopRequest]:
    """`serve()` in a thread, stopped at the end; it must return 0."""
    stop = signals.StopRequest()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(orchestrator.serve(stop)), name="serve")
    thread.start()
    try:
        yield stop
    finally:
        stop.request()
        thread.join(15)
        assert not thread.is_alive()
    assert codes == [0]


def test_an_empty_database_gets_its_schema_and_runs_are_dispatched(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    toy = flow.Flow()
    toy.dag(a="")
    assert database.current_schema_version() == 0
    try:
        with serving():
            until(lambda: database.current_schema_version() >= 16)
            run_id = toy.submit()
            until(lambda: flow.states(run_id) == {"s/a": "queued"})
    finally:
        toy.close()
        database.close_pool()


@pytest.mark.usefixtures("db")
def test_boot_reclaims_what_is_lapsed_or_ownerless_and_no_fresh_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with database.connection() as conn:
        families = {
            "node": [factories.node(conn, node_id=f"n{i}") for i in range(3)],
            "ingest": [factories.ingest(conn) for _ in range(3)],
        }
        for each in range(3):
            factories.claim_node(conn, factories.who(worker_id=f"w{each}"))
            factories.claim_ingest(conn, factories.who("fetch", worker_id=f"w{each}"))
        for _fresh, lapsed, ownerless in families.values():
            factories.expire(conn, lapsed)
            table = factories.table_of(ownerless).name
            conn.execute(
                f"UPDATE {table} SET lease_expires_at = NULL WHERE id = %s".encode(),
                (ownerless["id"],),
            )
        held = [factories.reread(conn, each[0]) for each in families.values()]
    with serving():
        until(lambda: SAYS_IT_DISPATCHES in caplog.text)
        with database.connection() as conn:
            for name, (fresh, lapsed, ownerless) in families.items():
                states = [factories.reread(conn, each)["status"] for each in (lapsed, ownerless)]
                assert states == ["queued", "queued"], name
                assert factories.reread(conn, fresh)["status"] == "running"
            assert [factories.reread(conn, each[0]) for each in families.values()] == held


@pytest.mark.usefixtures("db")
def test_a_stop_before_the_database_answers_ends_it() -> None:
    stop = signals.StopRequest()
    stop.request()
    assert orchestrator.serve(stop) == 0


def test_a_database_that_is_away_is_said_once_and_waited_for(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    real, tries, there = database.connect, threading.Semaphore(0), threading.Event()

    def connect(**more: Any) -> database.Connection:
        if not there.is_set():
            tries.release()
            raise database.OperationalError("refused")
        return real(**more)

    # Away is simulated at the one place from which the wait connects.
    monkeypatch.setattr("queue_workflows.db.pool.connect", connect)
    try:
        with serving():
            for _ in range(3):
                assert tries.acquire(timeout=10)
            assert caplog.text.count("does not answer, waiting for it") == 1
            there.set()
            until(lambda: SAYS_IT_DISPATCHES in caplog.text)
        assert caplog.text.count("does not answer, waiting for it") == 1
        assert caplog.text.count(" answers") == 1
    finally:
        database.close_pool()


def test_a_stop_ends_the_wait_for_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://nobody@127.0.0.1:1/none_test")
    with serving():
        until(lambda: "does not answer" in caplog.text)


@pytest.mark.usefixtures("db")
def test_a_recovery_that_fails_is_tried_again_and_then_left_to_the_sweeps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_POOL_RECOVERY_RETRIES", "3")
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_POOL_RECOVERY_BACKOFF_S", "0.01")

    def away() -> None:
        raise database.OperationalError("away")

    monkeypatch.setattr("queue_workflows.node_pool.reclaim", away)
    orchestrator.recover(signals.StopRequest())
    assert [each.message for each in caplog.records if "recovery at boot" in each.message] == [
        f"recovery at boot, try {number} of 3: away" for number in (1, 2, 3)
    ]


def test_without_a_database_url_it_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert orchestrator.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("queue-orchestrator: ")
    assert "QUEUE_WORKFLOWS_DB_URL" in line
    assert "--embedded" in line


def test_the_variable_that_the_host_named_is_the_one_it_asks_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.configure(db_url_env="MY_APP_DSN")
    assert orchestrator.main([]) == 2
    assert "MY_APP_DSN" in capsys.readouterr().err


def test_bad_options_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        orchestrator.main(["--unheard-of"])
    assert left.value.code == 2
    assert "usage: queue-orchestrator" in capsys.readouterr().err
