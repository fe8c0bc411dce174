"""The orchestrator process waits for the database, installs the schema and recovers jobs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db, node_pool, orchestrator
from tests.support import commands, database, factories, flow, orchestrators, transitions, wait
from tests.support.commands import TOYHOST


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_POOL_RECOVERY_BACKOFF_S", "0.001")


def test_it_starts_runs_and_stops_on_request(toy: flow.Flow) -> None:
    toy.dag(a="")
    with orchestrators.serving():
        run_id = toy.submit()
        wait.until(lambda: flow.status(run_id) == "running")


def test_boot_takes_back_what_is_lapsed_or_ownerless_and_nothing_else(conn: Any) -> None:
    run_id = factories.run(conn)
    for name in "abc":
        factories.node(conn, run_id, name)
    fresh, lapsed, ownerless = (transitions.claim_node(conn) for _ in range(3))
    over = factories.node(conn, factories.run(conn, status="failed"), "d")
    transitions.expire(conn, lapsed)
    conn.execute(
        "UPDATE workflow_node_jobs SET lease_expires_at = NULL WHERE id = %s", (ownerless["id"],)
    )
    assert orchestrators.recover() is True
    states = {job["node_id"]: job["status"] for job in node_rows(conn)}
    assert states == {"a": "running", "b": "queued", "c": "queued", "d": "cancelled"}
    row = factories.reread(conn, fresh)
    assert (row["claim_no"], row["crash_count"], row["priority"]) == (1, 0, 100)
    assert factories.reread(conn, over)["status"] == "cancelled"


def test_boot_counts_no_lapse_since_nobody_knows_who_had_the_database(conn: Any) -> None:
    factories.node(conn, factories.run(conn))
    lapsed = transitions.claim_node(conn)
    transitions.expire(conn, lapsed)
    assert orchestrators.recover() is True
    row = factories.reread(conn, lapsed)
    assert (row["status"], row["lapse_count"], row["crash_count"]) == ("queued", 0, 0)


def node_rows(conn: Any) -> list[dict[str, Any]]:
    return conn.execute("SELECT * FROM workflow_node_jobs").fetchall()


class Flaky:
    """Fails as a database that is away does, this often, and then does its work."""

    def __init__(self, failures: int, act: Any = lambda: None) -> None:
        self.failures = failures
        self.calls = 0
        self.act = act

    def __call__(self, **_: object) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise db.OperationalError("gone")
        return self.act()


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (2, 3), (9, 3)])
def test_a_pool_recovers_before_it_starts_and_raises_what_stays_broken(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, no_rest: None, failures: int, calls: int
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_POOL_RECOVERY_RETRIES", "3")
    flaky = Flaky(failures)
    orchestrators.before_recovery(monkeypatch, flaky)
    pool = node_pool.NodePool()
    try:
        if failures > 2:
            with pytest.raises(db.OperationalError):
                pool.start()
            flaky.failures = 0
        # What failed to start may be started again.
        pool.start()
        assert flaky.calls == calls + (failures > 2)
        with pytest.raises(RuntimeError):
            pool.start()
    finally:
        pool.stop()


def test_the_command_waits_for_its_database_where_a_pool_raises(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, no_rest: None
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_POOL_RECOVERY_RETRIES", "2")
    flaky = Flaky(5)
    orchestrators.before_recovery(monkeypatch, flaky)
    waits: list[object] = []
    monkeypatch.setattr(db, "wait_until_reachable", lambda **_: waits.append(1))
    pool = node_pool.NodePool()
    try:
        assert orchestrator.start(pool, orchestrators.stop(requested=False)) is True
        assert (flaky.calls, len(waits)) == (6, 2)
        with pytest.raises(RuntimeError, match="started before"):
            pool.start()
    finally:
        pool.stop()


def test_recovery_ends_when_a_stop_is_requested(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = Flaky(9)
    orchestrators.before_recovery(monkeypatch, flaky)
    assert orchestrators.recover(stopped=True) is False
    assert flaky.calls == 1
    stop = orchestrators.stop(requested=True)
    assert orchestrator.start(node_pool.NodePool(), stop) is False


def test_a_database_that_goes_away_during_the_bootstrap_is_waited_for(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, no_rest: None
) -> None:
    flaky = Flaky(2, list)
    monkeypatch.setattr(db, "bootstrap", flaky)
    assert orchestrator.bring_schema(orchestrators.stop(requested=False)) is True
    assert flaky.calls == 3


def test_a_stop_ends_the_wait_for_a_database(
    own_database: database.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", own_database.dsn.replace("_test?", "_no_test?"))
    assert orchestrator.serve(orchestrators.stop(requested=True)) == 0


# --- as a process


def test_without_a_dsn_the_process_ends_with_one_line_that_names_the_variable() -> None:
    with commands.commands() as shell:
        done = shell.run("queue-orchestrator")
        assert done.process.returncode == 2
        (line,) = done.err.splitlines()
        assert line.startswith("queue-orchestrator: no database: set QUEUE_WORKFLOWS_DB_URL")


@pytest.fixture
def not_yet(own_database: database.Database) -> Iterator[str]:
    """The name of a database that a test may create, dropped afterwards."""
    name = own_database.fresh_name()
    yield name
    own_database.drop(name)


def test_the_process_waits_for_its_database_and_goes_on_when_it_is_there(
    own_database: database.Database, not_yet: str
) -> None:
    dsn = database.url({**own_database.parts, "dbname": not_yet})
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as shell:
        process = shell.start("queue-orchestrator", "--app", TOYHOST)
        wait.until(lambda: "does not answer, waiting for it" in process.err)
        own_database.create(not_yet)
        wait.until(lambda: "orchestrator dispatches on" in process.err)
        assert process.err.count("does not answer") == 1
        assert "applied migrations 1, 2" in process.err
        process.send(signal.SIGTERM)
        assert process.wait(30) == 0


def test_the_process_may_be_stopped_while_it_waits(
    own_database: database.Database, not_yet: str
) -> None:
    dsn = database.url({**own_database.parts, "dbname": not_yet})
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as shell:
        process = shell.start("queue-orchestrator")
        wait.until(lambda: "does not answer" in process.err)
        process.send(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in process.err
