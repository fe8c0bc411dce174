"""A crash that was counted because the database was unreachable is subtracted, once."""

from __future__ import annotations

import pytest

from queue_workflows import db
from queue_workflows.types import Row
from tests.support import factories, sweeps, transitions

FAMILIES = transitions.KINDS


def lapse(conn: db.Connection, job: Row, renewed_ago_s: float = 60.0) -> None:
    transitions.expire(conn, job)
    renewed = f"heartbeat_at = now() - {renewed_ago_s} * interval '1 second'"
    factories.change(conn, job, renewed)


def events(conn: db.Connection, job: Row) -> list[str]:
    table = transitions.EVENTS[transitions.kind_of(job)]
    query = f"SELECT event_type FROM {table} WHERE job_id = %s ORDER BY id"
    return factories.column(conn, query, job["id"])


def state(conn: db.Connection, job: Row) -> tuple[str, int]:
    row = factories.reread(conn, job)
    return row["status"], row["crash_count"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_claim_that_is_still_valid_goes_back_uncounted(
    conn: db.Connection, family: transitions.Kind
) -> None:
    job = transitions.claimed(conn, family)
    assert not transitions.excuse(conn, job, ended=False), "its process may run"
    assert transitions.excuse(conn, job)
    assert state(conn, job) == ("queued", 0)
    assert events(conn, job) == ["claimed", "requeued"]
    assert not transitions.excuse(conn, job)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("status", ["queued", "running", "completed", "failed", "cancelled"])
def test_a_crash_that_was_counted_is_subtracted_once_in_any_later_state_of_the_job(
    conn: db.Connection, family: transitions.Kind, status: str
) -> None:
    job = transitions.claimed(conn, family)
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    assert state(conn, job) == ("queued", 1)
    if status != "queued":
        (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn)
    if status in ("completed", "failed", "cancelled"):
        change = f"status = '{status}', error = 'its own', finished_at = now(), worker_id = NULL,"
        factories.change(conn, job, f"{change} lease_expires_at = NULL")
    for first in (True, False):
        assert transitions.excuse(conn, job) is first
        assert state(conn, job) == (status, 0)
    assert events(conn, job).count("death") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lapsed_claim_of_a_job_that_must_end_counts_nothing(
    conn: db.Connection, family: transitions.Kind
) -> None:
    job = transitions.claimed(conn, family)
    if family == "node":
        conn.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")
    else:
        conn.execute("UPDATE ingest_jobs SET cancel_requested_at = now()")
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    assert state(conn, job) == ("cancelled", 0)
    assert events(conn, job)[-1] == "cancelled"
    assert not transitions.excuse(conn, job)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", ["worker", "claim", "parent said so", "handed back", "done"])
def test_no_other_crash_is_taken_back(
    conn: db.Connection, family: transitions.Kind, wrong: str
) -> None:
    job = transitions.claimed(conn, family, crash_count=1)
    kind, named = transitions.kind_of(job), job
    if wrong == "handed back":
        transitions.hand_back(conn, job)
    elif wrong == "parent said so":
        transitions.reclaim_dead(conn, kind, job["worker_id"])
        transitions.note_death(conn, job)
    elif wrong != "done":
        lapse(conn, job)
        transitions.reclaim_lapsed(conn, kind)
        named = job | {"worker": {"worker_id": "other"}, "claim": {"claim_no": 7}}[wrong]
    else:
        lapse(conn, job)
        factories.change(conn, job, "crash_count = 2")
        transitions.reclaim_lapsed(conn, kind)
        assert state(conn, job) == ("failed", 3)
    before = state(conn, job)
    assert not transitions.excuse(conn, named)
    assert state(conn, job) == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("had_s", "counted"), [(59.0, 0), (61.0, 1), (0.0, 0), (None, 1)])
def test_a_lease_that_was_renewed_last_before_the_database_came_back_counts_nothing(
    conn: db.Connection, family: transitions.Kind, had_s: float | None, counted: int
) -> None:
    job = transitions.claimed(conn, family)
    fresh = transitions.claimed(conn, family)
    lapse(conn, job)
    sweeps.reclaim(conn, had_s=had_s)
    row = factories.reread(conn, job)
    assert (row["status"], row["crash_count"], row["priority"]) == ("queued", counted, 10)
    assert events(conn, job) == ["claimed", "reclaimed" if counted else "requeued"]
    assert state(conn, fresh) == ("running", 0)


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
        assert state(conn, first) == ("queued", 1), "it was there all the time"
        now[0] += 3.5  # a poll was missed
        second = transitions.claimed(conn, "node")
        lapse(conn, second, renewed_ago_s=60)
        orchestrator.reclaim()
        assert state(conn, second) == ("queued", 0)
        for _ in range(70):
            now[0] += 1
            orchestrator.check()
        third = transitions.claimed(conn, "node")
        lapse(conn, third, renewed_ago_s=60)
        orchestrator.reclaim()
        assert state(conn, third)[1] == 1
