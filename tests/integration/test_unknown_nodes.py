"""A node that a worker does not know is left to others within a bound, and then it fails."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import claim_worker, config, db, jobs, workers
from queue_workflows.types import Row
from tests.integration.test_unreadable_rows import serving
from tests.support import console, constants, factories, transitions
from tests.support.transitions import who
from tests.support.wait import until
from tests.support.worker_reports import report

UNKNOWN = "NodeNotFound: node module 'mistyped' is not registered"


@pytest.fixture
def job(conn: db.Connection) -> Row:
    return factories.node(conn, factories.run(conn, status="running"), node_module="mistyped")


def claim(conn: db.Connection, worker: str) -> Row:
    """Claim the node, which is due at once."""
    conn.execute("UPDATE workflow_node_jobs SET available_at = now() WHERE status = 'queued'")
    return transitions.claim_node(conn, who(worker_id=worker), promote=True)


def meet(conn: db.Connection, worker: str, after_s: float = 0) -> tuple[str, str]:
    """Let a worker meet the node `after_s` later; return its state and error."""
    conn.execute(
        "UPDATE workflow_node_events SET created_at = created_at - %s * interval '1 s'", (after_s,)
    )
    claimed = claim(conn, worker)
    transitions.leave(conn, claimed, UNKNOWN)
    found = factories.reread(conn, claimed)
    return found["status"], found["error"]


def registered(conn: db.Connection, *workers: str, nodes: list[str]) -> None:
    """Let these workers report that all their nodes are registered."""
    for name in nodes:
        config.register_node(name, dict)
    for worker in workers:
        report(conn, who(worker_id=worker))
    config.reset_for_tests()


@pytest.mark.usefixtures("job")
def test_a_busy_worker_that_reports_other_nodes_is_not_waited_for(conn: db.Connection) -> None:
    registered(conn, "w1", "w2", nodes=["other"])
    assert meet(conn, "w1") == ("queued", UNKNOWN)
    assert meet(conn, "w1", 110)[0] == "queued"
    status, error = meet(conn, "w1", 20)
    assert status == "failed"
    assert error.endswith("; no live worker has known it for 120 s; these met it: w1")


@pytest.mark.usefixtures("job")
def test_an_infinite_time_in_the_history_keeps_no_worker_from_the_hand_back(
    conn: db.Connection,
) -> None:
    """A server before version 17 cannot subtract it."""
    assert meet(conn, "w1")[0] == "queued"
    conn.execute("UPDATE workflow_node_events SET created_at = 'infinity'")
    assert meet(conn, "w2") == ("queued", UNKNOWN)


@pytest.mark.usefixtures("job")
def test_workers_that_may_know_any_node_are_waited_for_ten_times_as_long(
    conn: db.Connection,
) -> None:
    for number in range(12):  # as pods come and go
        report(conn, who(worker_id=f"w{number}"))
    assert meet(conn, "w1")[0] == "queued"
    assert meet(conn, "w2", 1100)[0] == "queued"
    status, error = meet(conn, "w3", 110)
    assert status == "failed"
    assert error.endswith(
        "; no worker that met it has known it for 1200 s; these met it: w1, w2, w3"
    )


@pytest.mark.usefixtures("job")
def test_a_busy_worker_that_reports_the_node_is_waited_for(conn: db.Connection) -> None:
    registered(conn, "new", nodes=["mistyped"])
    registered(conn, "old", nodes=["other"])
    assert meet(conn, "old")[0] == "queued"
    assert meet(conn, "old", 10_000)[0] == "queued"


@pytest.mark.usefixtures("job")
def test_a_worker_that_is_switched_off_is_not_waited_for(conn: db.Connection) -> None:
    report(conn, who(worker_id="w2", host="far"))
    workers.disable("far", "cpu")
    assert meet(conn, "w1")[0] == "queued"
    status, error = meet(conn, "w1", 130)
    assert status == "failed"
    assert error.endswith("; no live worker has known it for 120 s; these met it: w1")


def test_a_gpu_worker_without_the_model_of_a_node_is_not_waited_for(conn: db.Connection) -> None:
    job = factories.node(conn, node_module="mistyped", queue="gpu", required_model="m")
    report(conn, who("gpu", "w2", host="far"), known_models=["n"])
    for _ in range(2):
        conn.execute("UPDATE workflow_node_jobs SET available_at = now()")
        (claimed,) = transitions.claim(conn, who("gpu", "w1", models=["m"]), promote=True)
        transitions.leave(conn, claimed, UNKNOWN)
        conn.execute("UPDATE workflow_node_events SET created_at = created_at - interval '130 s'")
    found = factories.reread(conn, job)
    assert found["status"] == "failed"
    assert found["error"].endswith("; no live worker has known it for 120 s; these met it: w1")


@pytest.mark.usefixtures("job")
def test_the_host_of_a_worker_that_knows_it_claims_it_next(conn: db.Connection) -> None:
    registered(conn, "new", "far", nodes=["mistyped"])
    registered(conn, "old", nodes=["other"])
    conn.execute("UPDATE workers SET host_label = 'far' WHERE worker_id = 'far'")
    first = claim(conn, "old")
    transitions.leave(conn, first, UNKNOWN)
    assert transitions.claim(conn, who(worker_id="old")) == []
    assert transitions.claim(conn, who(worker_id="new")) == []  # its host has "old", too
    told = jobs.explain(first["id"], conn=conn) or {}
    assert told["detail"].startswith("it may run now: it is kept for host far until ")
    again = transitions.claim_node(conn, who(worker_id="far", host="far"))
    assert (again["id"], again["claim_no"]) == (first["id"], 2)


@pytest.mark.usefixtures("job")
def test_a_bound_of_zero_fails_it_at_once(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "claim.job_tables.UNKNOWN_NODE_S", 0.0)
    report(conn, who(worker_id="w2"))
    status, error = meet(conn, "w1")
    assert status == "failed"
    assert error.startswith(UNKNOWN)


@pytest.mark.usefixtures("job")
def test_a_worker_whose_first_report_is_late_leaves_the_node_to_others(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meet(conn, "w1") == ("queued", UNKNOWN)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DISABLE_WORKER_HEARTBEAT", "1")
    config.register_node("other", dict)
    claimed = claim(conn, "w2")
    transitions.leave(conn, claimed, UNKNOWN)
    assert factories.reread(conn, claimed)["error"] == UNKNOWN
    assert factories.reread(conn, claimed)["status"] == "failed"


def test_run_once_fails_a_node_that_it_does_not_know(job: Row, conn: db.Connection) -> None:
    config.register_node("other", dict)
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    assert worker.run_once()
    assert factories.reread(conn, job)["status"] == "failed"


def test_a_worker_goes_on_whose_claim_is_lost_while_it_looks_for_the_node(
    job: Row, conn: db.Connection
) -> None:
    def resolver(name: str) -> Any:
        transitions.expire(conn, job)
        transitions.reclaim_lapsed(conn, "node")
        config.register_node(name, lambda: {"ok": True})
        raise KeyError(name)

    config.set_node_resolver(resolver)
    with serving(claim_worker.ClaimWorker(queue="cpu", host="box", inline=True)):
        until(lambda: factories.reread(conn, job)["status"] == "completed")
    row = factories.reread(conn, job)
    assert (row["claim_no"], row["lapse_count"]) == (2, 0)


def test_why_and_status_name_it_also_when_it_is_due(job: Row, conn: db.Connection) -> None:
    def listed() -> list[Any]:
        return console.reply("status", "--json")["unknown_nodes"]

    own = factories.node(conn, max_attempts=3, priority=1)
    transitions.fail(conn, transitions.claim_node(conn), UNKNOWN, after_s=10)
    assert factories.reread(conn, own)["error"] == UNKNOWN
    assert listed() == []
    factories.change(conn, own, "status = 'cancelled'")
    registered(conn, "w1", nodes=["other"])
    meet(conn, "w1")
    found = [{"queue": "cpu", "node_module": "mistyped", "n": 1, "run_id": job["run_id"]}]
    assert listed() == found
    conn.execute("UPDATE workflow_node_jobs SET available_at = now() WHERE status = 'queued'")
    transitions.promote_due(conn)
    assert factories.reread(conn, job)["blocked_reason"] is None
    assert listed() == found
    told = (jobs.explain(job["id"], conn=conn) or {})["detail"]
    assert "these met it: w1; " in told
    assert told.endswith("it fails 120 s after the first worker met it")
