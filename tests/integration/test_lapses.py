"""A lease that lapses without evidence counts a lapse, until the end of a claim is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.types import Row
from tests.support import factories, sweeps, tabled, transitions

of_each_family = pytest.mark.parametrize("family", transitions.KINDS)


def lapse(conn: db.Connection, job: Row, renewed_ago_s: float = 60.0) -> None:
    transitions.expire(conn, job)
    renewed = f"heartbeat_at = now() - {renewed_ago_s} * interval '1 second'"
    factories.change(conn, job, renewed)


def events(conn: db.Connection, job: Row) -> list[str]:
    table = transitions.EVENTS[transitions.kind_of(job)]
    query = f"SELECT event_type FROM {table} WHERE job_id = %s ORDER BY id"
    return factories.column(conn, query, job["id"])


def state(conn: db.Connection, job: Row) -> tuple[str, int, int]:
    row = factories.reread(conn, job)
    return row["status"], row["crash_count"], row["lapse_count"]


def again(conn: db.Connection, family: transitions.Kind) -> Row:
    return (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn)


@of_each_family
def test_a_lapse_counts_no_crash_and_crashes_stay_counted(
    conn: db.Connection, family: transitions.Kind
) -> None:
    job = transitions.claimed(conn, family, crash_count=1)
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, family)
    assert state(conn, job) == ("queued", 1, 1)
    assert events(conn, job) == ["claimed", "reclaimed"]


@of_each_family
def test_the_tenth_lapse_in_a_row_is_poison_and_says_so(
    conn: db.Connection, family: transitions.Kind
) -> None:
    job = transitions.claimed(conn, family, lapse_count=8)
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, family)
    assert state(conn, job) == ("queued", 0, 9)
    factories.change(conn, job, "available_at = NULL")
    job = again(conn, family)
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, family)
    assert state(conn, job) == ("failed", 0, 10)
    error = factories.reread(conn, job)["error"]
    assert error.startswith("poison: its lease lapsed 10 times in a row, the last time of w1")


ENDS: dict[str, Callable[[Any, Row], Any]] = {
    "completed": lambda conn, job: transitions.record(conn, job, "completed"),
    "failed": lambda conn, job: transitions.record(conn, job, "failed", error="no"),
    "retried": lambda conn, job: transitions.fail(conn, job, most=5),
    "watchdog": lambda conn, job: transitions.end_by_watchdog(conn, job),
    "handed back": lambda conn, job: transitions.hand_back(conn, job),
    "crash": lambda conn, job: transitions.charge(conn, job),
    "by SQL": lambda conn, job: factories.change(
        conn, job, "status = 'queued', worker_id = NULL, lease_expires_at = NULL"
    ),
}


@of_each_family
def test_any_recorded_end_of_a_claim_forgets_the_lapses(
    conn: db.Connection, family: transitions.Kind
) -> None:
    for end in ENDS:
        with tabled.undone(conn, end):
            job = transitions.claimed(conn, family, lapse_count=9)
            assert state(conn, job) == ("running", 0, 9)
            ENDS[end](conn, job)
            row = factories.reread(conn, job)
            assert row["status"] != "running"
            assert row["lapse_count"] == 0


@of_each_family
def test_a_job_that_lapsed_is_claimed_alone(conn: db.Connection, family: transitions.Kind) -> None:
    """It may have killed its worker, whose other jobs would lapse with it."""
    make = factories.node if family == "node" else factories.ingest
    first, others = make(conn, lapse_count=1), [make(conn) for _ in range(3)]
    who = transitions.who("cpu" if family == "node" else "fetch")
    assert [row["id"] for row in transitions.claim(conn, who, 4)] == [first["id"]]
    assert {row["id"] for row in transitions.claim(conn, who, 4)} == {row["id"] for row in others}


@of_each_family
@pytest.mark.parametrize(("had_s", "counted"), [(59.0, 0), (61.0, 1), (0.0, 0), (None, 1)])
def test_a_lease_that_was_renewed_last_before_the_database_came_back_counts_nothing(
    conn: db.Connection, family: transitions.Kind, had_s: float | None, counted: int
) -> None:
    job = transitions.claimed(conn, family)
    fresh = transitions.claimed(conn, family)
    lapse(conn, job)
    sweeps.reclaim(conn, had_s=had_s)
    row = factories.reread(conn, job)
    assert (row["status"], row["lapse_count"], row["priority"]) == ("queued", counted, 10)
    assert events(conn, job) == ["claimed", "reclaimed" if counted else "requeued"]
    assert state(conn, fresh) == ("running", 0, 0)


def test_an_orchestrator_that_missed_a_poll_counts_nothing_until_it_has_seen_a_lease_lapse(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S", "1")
    now = [1000.0]
    with sweeps.tasks(lambda: now[0]) as orchestrator:
        first = transitions.claimed(conn, "ingest")
        for _ in range(70):
            now[0] += 1
            orchestrator.check()
        lapse(conn, first, renewed_ago_s=60)
        orchestrator.reclaim()
        assert state(conn, first) == ("queued", 0, 1), "it was there all the time"
        now[0] += 3.5  # a poll was missed
        second = transitions.claimed(conn, "node")
        lapse(conn, second, renewed_ago_s=60)
        orchestrator.reclaim()
        assert state(conn, second) == ("queued", 0, 0)
        for _ in range(70):
            now[0] += 1
            orchestrator.check()
        third = transitions.claimed(conn, "node")
        lapse(conn, third, renewed_ago_s=60)
        orchestrator.reclaim()
        assert state(conn, third) == ("queued", 0, 1)
