"""How outcomes are recorded, and that every way out of a claim obeys a cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows import errors
from queue_workflows.dag import policy
from queue_workflows.engine import attempts, finish, handback, job_tables, outcomes, recovery
from queue_workflows.types import Row
from tests.support import factories, transitions

FAMILIES = ("ingest", "node")
OUTCOMES = {
    "completed": outcomes.Outcome("completed", 0.5, '{"a": 1}'),
    "failed": outcomes.Outcome("failed", 0.5, error="ValueError: no"),
    "parked": outcomes.Outcome("parked", 0.0),
    "cancelled": outcomes.Outcome("cancelled", 0.5),
    "snoozed": outcomes.Outcome("snoozed", 0.5, error="later", raised=policy.Raised(after_s=60.0)),
}
LEFT = {
    "completed": ("completed", "completed", "completed", "completed"),
    "failed": ("failed", "failed", "failed", "failed"),
    "parked": ("awaiting_input", "parked", "awaiting_input", "completed"),
    "cancelled": ("queued", "requeued", None, "skipped"),
    "snoozed": ("queued", "requeued", None, "failed"),
}
"""By kind: the state of the job, its event, the kind of its outbox row, what `record` returns."""
KINDS = [(family, kind) for family in FAMILIES for kind in LEFT]
KINDS.remove(("ingest", "parked"))


def claimed(conn: engine.Connection, family: str, worker_id: str = "w1", **columns: Any) -> Row:
    if family == "node":
        factories.node(conn, **columns)
        return transitions.claim_node(conn, transitions.who("cpu", worker_id))
    factories.ingest(conn, **columns)
    return transitions.claim_ingest(conn, transitions.who("fetch", worker_id))


def lease(job: Row) -> job_tables.Lease:
    return job_tables.lease_of(transitions.table_of(job), job)


def last_event(conn: engine.Connection, job: Row) -> Row:
    table = transitions.table_of(job).events
    row = conn.execute(
        f"SELECT * FROM {table} WHERE job_id = %s ORDER BY id DESC LIMIT 1".encode(), (job["id"],)
    ).fetchone()
    assert row is not None
    return row


def status(conn: engine.Connection, job: Row) -> str:
    return factories.reread(conn, job)["status"]


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_an_outcome_leaves_its_state_its_event_and_its_outbox_row(
    conn: engine.Connection, family: str, kind: str
) -> None:
    job = claimed(conn, family)
    now, event_type, sent, result = LEFT[kind]
    assert not finish.is_recorded(conn, lease(job), OUTCOMES[kind])
    assert finish.record(conn, lease(job), OUTCOMES[kind]) == result
    assert finish.is_recorded(conn, lease(job), OUTCOMES[kind])
    assert status(conn, job) == now
    event = last_event(conn, job)
    assert event["event_type"] == event_type
    assert (event["worker_id"], event["host_label"]) == ("w1", "box")
    kinds = factories.column(conn, "SELECT kind FROM workflow_dispatch_events")
    assert kinds == ([sent] if family == "node" and sent else [])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_lost_claim_is_an_error_unless_the_job_was_cancelled(
    conn: engine.Connection, family: str, kind: str
) -> None:
    job = claimed(conn, family)
    lost = lease(job)._replace(claim_no=job["claim_no"] + 1)
    before = factories.reread(conn, job)
    if kind == "cancelled":
        assert finish.finish(conn, [finish.Done(lost, OUTCOMES[kind])]) == []
    else:
        with pytest.raises(errors.ClaimLost):
            finish.finish(conn, [finish.Done(lost, OUTCOMES[kind])])
    assert finish.record(conn, lost, OUTCOMES[kind]) == "skipped"
    assert factories.reread(conn, job) == before
    assert last_event(conn, job)["event_type"] == "claimed"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_recorded_and_the_next_jobs_are_claimed(
    conn: engine.Connection, family: str
) -> None:
    jobs = [claimed(conn, family) for _ in range(3)]
    for _ in range(3):
        (factories.node if family == "node" else factories.ingest)(conn)
    kinds = ("completed", "failed", "completed")
    done = [finish.Done(lease(job), OUTCOMES[kind]) for job, kind in zip(jobs, kinds, strict=True)]
    who = transitions.who("cpu" if family == "node" else "fetch")
    following = finish.finish(conn, done, who=who, claim=2)
    assert [status(conn, job) for job in jobs] == list(kinds)
    assert len(following) == 2
    assert [status(conn, job) for job in following] == ["running"] * len(following)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_a_lost_claim_records_and_claims_nothing(
    conn: engine.Connection, family: str
) -> None:
    jobs = [claimed(conn, family) for _ in range(2)]
    waiting = (factories.node if family == "node" else factories.ingest)(conn)
    leases = [lease(jobs[0]), lease(jobs[1])._replace(claim_no=7)]
    done = [finish.Done(each, OUTCOMES["completed"]) for each in leases]
    with pytest.raises(errors.ClaimLost):
        finish.finish(
            conn, done, who=transitions.who("cpu" if family == "node" else "fetch"), claim=1
        )
    states = [status(conn, each) for each in (*jobs, waiting)]
    assert states == ["running", "running", "queued"]


def test_a_node_that_failed_keeps_the_inputs_that_it_received(conn: engine.Connection) -> None:
    job = claimed(conn, "node")
    failed = OUTCOMES["failed"]._replace(resolved_inputs='{"path": "x"}')
    finish.finish(conn, [finish.Done(lease(job), failed)])
    assert factories.reread(conn, job)["resolved_inputs"] == {"path": "x"}


def reclaim(conn: engine.Connection, job: Row) -> object:
    transitions.expire(conn, job)
    return transitions.reclaim_lapsed(conn, transitions.kind_of(job))


def excuse(conn: engine.Connection, job: Row) -> object:
    transitions.expire(conn, job)
    conn.execute(
        f"UPDATE {transitions.table_of(job).name} SET heartbeat_at = now() - interval '1 hour'"
        " WHERE id = %s".encode(),
        (job["id"],),
    )
    return recovery.excuse_lapsed(conn, transitions.table_of(job), had_s=1)


WAYS: dict[str, Callable[[Any, Row], object]] = {
    "fail": lambda conn, job: attempts.fail(conn, lease(job), error="no", most=9),
    "watchdog": lambda conn, job: attempts.end_by_watchdog(
        conn, lease(job), error="late", seconds=1
    ),
    "park": lambda conn, job: attempts.park(conn, lease(job)),
    "hand back": lambda conn, job: handback.hand_back(conn, lease(job), reason="r", after_s=5),
    "stray": lambda conn, job: handback.release_strays(conn, transitions.table_of(job), "w1", []),
    "crash": lambda conn, job: recovery.charge(conn, lease(job), evidence="it died"),
    "dead process": lambda conn, job: recovery.reclaim_dead(
        conn, transitions.table_of(job), prefix="w", evidence="it died"
    ),
    "lapsed": reclaim,
    "excused": excuse,
}


LEAVING = [
    (way, family, cause)
    for way in WAYS
    for family, cause in (("ingest", "request"), ("node", "request"), ("node", "run"))
    if (way, family) != ("park", "ingest")
]


@pytest.mark.parametrize(("way", "family", "cause"), LEAVING)
def test_a_cancelled_job_leaves_its_claim_as_cancelled(
    conn: engine.Connection, way: str, family: str, cause: str
) -> None:
    job = claimed(conn, family)
    if cause == "request":
        table = transitions.table_of(job).name
        conn.execute(f"UPDATE {table} SET cancel_requested_at = now()".encode())
    else:
        with factories.unguarded(conn, "workflow_runs"):
            conn.execute("UPDATE workflow_runs SET status = 'failed'")
    assert WAYS[way](conn, job)
    row = factories.reread(conn, job)
    assert (row["status"], row["worker_id"], row["available_at"]) == ("cancelled", None, None)
    assert row["finished_at"] is not None
    assert last_event(conn, job)["event_type"] == "cancelled"
