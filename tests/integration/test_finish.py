"""How outcomes are recorded, and that every way out of a claim obeys a cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import db, errors
from queue_workflows.types import Row
from tests.support import factories, tabled, transitions

LEFT = {
    "completed": ("completed", "completed", "completed", "completed"),
    "failed": ("failed", "failed", "failed", "failed"),
    "parked": ("awaiting_input", "parked", "awaiting_input", "completed"),
    "cancelled": ("queued", "requeued", None, "skipped"),
    "snoozed": ("queued", "requeued", None, "failed"),
}
"""By kind: the state of the job, its event, the kind of its outbox row, what `record` returns."""
FAMILIES = transitions.KINDS
KINDS = [(family, kind) for family in FAMILIES for kind in LEFT]
KINDS.remove(("ingest", "parked"))
QUEUES = {"node": "cpu", "ingest": "fetch"}


def last_event(conn: db.Connection, job: Row) -> Row:
    """Return the last event of a job, but for that of its guard, which follows the end."""
    table = transitions.EVENTS[transitions.kind_of(job)]
    row = conn.execute(
        f"SELECT * FROM {table} WHERE job_id = %s AND event_type <> 'budget_trip'"
        " ORDER BY id DESC LIMIT 1".encode(),
        (job["id"],),
    ).fetchone()
    assert row is not None
    return row


def status(conn: db.Connection, job: Row) -> str:
    return factories.reread(conn, job)["status"]


def test_an_outcome_leaves_its_state_its_event_and_its_outbox_row(conn: db.Connection) -> None:
    for family, kind in KINDS:
        with tabled.undone(conn, family, kind):
            job = transitions.claimed(conn, family)
            now, event_type, sent, result = LEFT[kind]
            assert not transitions.is_recorded(conn, job, kind)
            assert transitions.record(conn, job, kind) == result
            assert transitions.is_recorded(conn, job, kind)
            assert status(conn, job) == now
            event = last_event(conn, job)
            assert event["event_type"] == event_type
            assert (event["worker_id"], event["host_label"]) == ("w1", "box")
            kinds = factories.column(conn, "SELECT kind FROM workflow_dispatch_events")
            assert kinds == ([sent] if family == "node" and sent else [])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_lost_claim_is_an_error_unless_the_job_was_cancelled(
    conn: db.Connection, family: transitions.Kind, kind: str
) -> None:
    job = transitions.claimed(conn, family)
    lost = job | {"claim_no": job["claim_no"] + 1}
    before = factories.reread(conn, job)
    if kind == "cancelled":
        assert transitions.finish_all(conn, [(lost, kind)]) == []
    else:
        with pytest.raises(errors.ClaimLost):
            transitions.finish_all(conn, [(lost, kind)])
    assert transitions.record(conn, lost, kind) == "skipped"
    assert factories.reread(conn, job) == before
    assert last_event(conn, job)["event_type"] == "claimed"


def test_a_batch_is_recorded_and_the_next_jobs_are_claimed(conn: db.Connection) -> None:
    for family in FAMILIES:
        with tabled.undone(conn, family):
            jobs = [transitions.claimed(conn, family) for _ in range(3)]
            for _ in range(3):
                factories.of(conn, family)
            kinds = ("completed", "failed", "completed")
            ends = [*zip(jobs, kinds, strict=True)]
            following = transitions.finish_all(conn, ends, transitions.who(QUEUES[family]), 2)
            assert [status(conn, job) for job in jobs] == list(kinds)
            assert len(following) == 2
            assert [status(conn, job) for job in following] == ["running"] * len(following)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_a_lost_claim_records_and_claims_nothing(
    conn: db.Connection, family: transitions.Kind
) -> None:
    jobs = [transitions.claimed(conn, family) for _ in range(2)]
    waiting = factories.of(conn, family)
    ends = [(jobs[0], "completed"), (jobs[1] | {"claim_no": 7}, "completed")]
    with pytest.raises(errors.ClaimLost):
        transitions.finish_all(conn, ends, transitions.who(QUEUES[family]), 1)
    states = [status(conn, each) for each in (*jobs, waiting)]
    assert states == ["running", "running", "queued"]


def test_a_node_that_failed_keeps_the_inputs_that_it_received(conn: db.Connection) -> None:
    of_claim = {"path": "of the claim"}
    for received, shown in ((None, of_claim), ('{"path": "x"}', {"path": "x"})):
        job = transitions.claimed(conn, "node", inputs=of_claim, ref_heads=[])
        assert transitions.record(conn, job, "failed", resolved_inputs=received) == "failed"
        assert factories.reread(conn, job)["resolved_inputs"] == shown


def reclaim(conn: db.Connection, job: Row) -> object:
    transitions.expire(conn, job)
    return transitions.reclaim_lapsed(conn, transitions.kind_of(job))


def hand_back_lapsed(conn: db.Connection, job: Row) -> object:
    transitions.expire(conn, job)
    factories.change(conn, job, "heartbeat_at = now() - interval '1 hour'")
    return transitions.hand_back_lapsed(conn, transitions.kind_of(job), had_s=1)


WAYS: dict[str, Callable[[Any, Row], object]] = {
    "fail": lambda conn, job: transitions.fail(conn, job, most=9),
    "watchdog": transitions.end_by_watchdog,
    "park": transitions.park,
    "hand back": lambda conn, job: transitions.hand_back(conn, job, after_s=5),
    "stray": lambda conn, job: transitions.release_strays(conn, transitions.kind_of(job)),
    "crash": transitions.charge,
    "dead process": lambda conn, job: transitions.reclaim_dead(conn, transitions.kind_of(job), "w"),
    "lapsed": reclaim,
    "lapsed while the database was away": hand_back_lapsed,
}


LEAVING = [
    (way, family, cause)
    for way in WAYS
    for family, cause in (("ingest", "request"), ("node", "request"), ("node", "run"))
    if (way, family) != ("park", "ingest")
]


def test_a_cancelled_job_leaves_its_claim_as_cancelled(conn: db.Connection) -> None:
    for way, family, cause in LEAVING:
        with tabled.undone(conn, way, family, cause):
            job = transitions.claimed(conn, family)
            if cause == "request":
                factories.change(conn, job, "cancel_requested_at = now()")
            else:
                with factories.unguarded(conn, "workflow_runs"):
                    conn.execute("UPDATE workflow_runs SET status = 'failed'")
            assert WAYS[way](conn, job)
            row = factories.reread(conn, job)
            assert (row["status"], row["worker_id"], row["available_at"]) == (
                "cancelled",
                None,
                None,
            )
            assert row["finished_at"] is not None
            assert last_event(conn, job)["event_type"] == "cancelled"
