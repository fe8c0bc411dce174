"""A crash that was counted because the database was unreachable is subtracted, once."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows.engine import handback, job_events, job_tables, recovery
from queue_workflows.maintenance import periodic
from queue_workflows.maintenance import recovery as maintenance_recovery
from queue_workflows.types import Row
from tests.support import factories, transitions

FAMILIES = ["node", "ingest"]


def claimed(conn: engine.Connection, family: str, **columns: Any) -> Row:
    if family == "node":
        factories.node(conn, **columns)
        return transitions.claim_node(conn)
    factories.ingest(conn, **columns)
    return transitions.claim_ingest(conn)


def lease_of(job: Row) -> job_tables.Lease:
    return job_tables.lease_of(transitions.table_of(job), job)


def lapse(conn: engine.Connection, job: Row, renewed_ago_s: float = 60.0) -> None:
    change = (
        "UPDATE {} SET lease_expires_at = now() - interval '1 second',"
        " heartbeat_at = now() - %s * interval '1 second' WHERE id = %s"
    )
    text = change.format(transitions.table_of(job).name)
    conn.execute(text.encode(), (renewed_ago_s, job["id"]))


def events(conn: engine.Connection, job: Row) -> list[str]:
    table = transitions.table_of(job)
    rows = conn.execute(
        f"SELECT event_type FROM {table.events} WHERE job_id = %s ORDER BY id".encode(),
        (job["id"],),
    )
    return [row["event_type"] for row in rows.fetchall()]


def state(conn: engine.Connection, job: Row) -> tuple[str, int]:
    row = factories.reread(conn, job)
    return row["status"], row["crash_count"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_claim_that_is_still_valid_goes_back_uncounted(
    conn: engine.Connection, family: str
) -> None:
    job = claimed(conn, family)
    assert not recovery.excuse(conn, lease_of(job), ended=False), "its process may run"
    assert recovery.excuse(conn, lease_of(job))
    assert state(conn, job) == ("queued", 0)
    assert events(conn, job) == ["claimed", "requeued"]
    assert not recovery.excuse(conn, lease_of(job))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("status", ["queued", "running", "completed", "failed", "cancelled"])
def test_a_crash_that_was_counted_is_subtracted_once_in_any_later_state_of_the_job(
    conn: engine.Connection, family: str, status: str
) -> None:
    job = claimed(conn, family)
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    assert state(conn, job) == ("queued", 1)
    if status != "queued":
        (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn)
    if status in ("completed", "failed", "cancelled"):
        change = f"UPDATE {transitions.table_of(job).name} SET status = %s, error = 'its own',"
        change += " worker_id = NULL, lease_expires_at = NULL, finished_at = now() WHERE id = %s"
        conn.execute(change.encode(), (status, job["id"]))
    for first in (True, False):
        assert recovery.excuse(conn, lease_of(job)) is first
        assert state(conn, job) == (status, 0)
    assert events(conn, job).count("death") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lapsed_claim_of_a_job_that_must_end_counts_nothing(
    conn: engine.Connection, family: str
) -> None:
    job = claimed(conn, family)
    if family == "node":
        conn.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")
    else:
        conn.execute("UPDATE ingest_jobs SET cancel_requested_at = now()")
    lapse(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))
    assert state(conn, job) == ("cancelled", 0)
    assert events(conn, job)[-1] == "cancelled"
    assert not recovery.excuse(conn, lease_of(job))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", ["worker", "claim", "parent said so", "handed back", "done"])
def test_no_other_crash_is_taken_back(conn: engine.Connection, family: str, wrong: str) -> None:
    job = claimed(conn, family, crash_count=1)
    lease = lease_of(job)
    if wrong == "handed back":
        handback.hand_back(conn, lease, reason="shutdown")
    elif wrong == "parent said so":
        prefix = f"{job['worker_id']}"
        recovery.reclaim_dead(conn, lease.table, prefix=prefix, evidence="killed by SIGKILL")
        row = factories.reread(conn, job) | {"worker_id": job["worker_id"]}
        factories_note(conn, lease.table, row)
    elif wrong != "done":
        lapse(conn, job)
        recovery.reclaim_lapsed(conn, lease.table)
        change = {"worker": {"worker_id": "other"}, "claim": {"claim_no": 7}}[wrong]
        lease = lease._replace(**change)
    else:
        lapse(conn, job)
        conn.execute(
            f"UPDATE {lease.table.name} SET crash_count = 2 WHERE id = %s".encode(),
            (job["id"],),
        )
        recovery.reclaim_lapsed(conn, lease.table)
        assert state(conn, job) == ("failed", 3)
    before = state(conn, job)
    assert not recovery.excuse(conn, lease)
    assert state(conn, job) == before


def factories_note(conn: engine.Connection, table: job_tables.JobTable, row: Row) -> None:
    """A parent's death certificate."""
    job_events.note(conn, table, row, "death", detail="{}", error="killed by SIGKILL")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("had_s", "counted"), [(59.0, 0), (61.0, 1), (0.0, 0), (None, 1)])
def test_a_lease_that_was_renewed_last_before_the_database_came_back_counts_nothing(
    conn: engine.Connection, family: str, had_s: float | None, counted: int
) -> None:
    job = claimed(conn, family)
    fresh = claimed(conn, family)
    lapse(conn, job)
    maintenance_recovery.reclaim(conn, had_s=had_s)
    row = factories.reread(conn, job)
    assert (row["status"], row["crash_count"], row["priority"]) == ("queued", counted, 10)
    assert events(conn, job) == ["claimed", "reclaimed" if counted else "requeued"]
    assert state(conn, fresh) == ("running", 0)


def test_an_orchestrator_that_missed_a_poll_counts_nothing_until_it_has_seen_a_lease_lapse(
    conn: engine.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S", "1")
    now = [1000.0]
    sweeps = periodic.PeriodicTasks(lambda: now[0])
    try:
        first = claimed(conn, "ingest")
        for _ in range(70):
            now[0] += 1
            sweeps.check()
        lapse(conn, first, renewed_ago_s=60)
        sweeps.reclaim()
        assert state(conn, first) == ("queued", 1), "it was there all the time"
        now[0] += 3.5  # a poll was missed
        second = claimed(conn, "node")
        lapse(conn, second, renewed_ago_s=60)
        sweeps.reclaim()
        assert state(conn, second) == ("queued", 0)
        for _ in range(70):
            now[0] += 1
            sweeps.check()
        third = claimed(conn, "node")
        lapse(conn, third, renewed_ago_s=60)
        sweeps.reclaim()
        assert state(conn, third)[1] == 1
    finally:
        sweeps.close()
