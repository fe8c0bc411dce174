"""Which claims a sweep takes from their workers, which it leaves, and what it counts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.types import Row
from tests.support import app_triggers, factories, sweeps, transitions

of_each_kind = pytest.mark.parametrize("kind", transitions.KINDS)
HOUR_AGO = "now() - interval '1 hour'"


def claimed(
    conn: db.Connection, kind: transitions.Kind, worker_id: str = "w1", **columns: Any
) -> Row:
    """Queue and claim a job."""
    factories.of(conn, kind, **columns)
    (job,) = transitions.claim(
        conn, transitions.who("cpu" if kind == "node" else "fetch", worker_id)
    )
    return job


def ids(jobs: list[Row]) -> list[str]:
    return [job["id"] for job in jobs]


@of_each_kind
def test_a_running_job_without_a_lease_is_taken_back(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    job = claimed(conn, kind)
    factories.change(conn, job, "lease_expires_at = NULL")
    assert ids(transitions.reclaim_lapsed(conn, kind)) == [job["id"]]


@of_each_kind
def test_a_lease_that_lapsed_while_the_database_was_away_counts_nothing(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    before, since = claimed(conn, kind), claimed(conn, kind)
    for job in (before, since):
        transitions.expire(conn, job)
    factories.change(conn, before, f"heartbeat_at = {HOUR_AGO}")
    assert ids(transitions.reclaim_lapsed(conn, kind, had_s=60.0)) == [since["id"]]
    (row,) = transitions.hand_back_lapsed(conn, kind, had_s=60.0)
    assert (row["id"], row["status"], row["lapse_count"]) == (before["id"], "queued", 0)
    assert factories.reread(conn, since)["lapse_count"] == 1


@of_each_kind
def test_a_claim_that_is_renewed_now_is_not_handed_back(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    job = claimed(conn, kind)
    transitions.expire(conn, job)
    assert transitions.hand_back_lapsed(conn, kind, had_s=60.0) == []
    assert factories.reread(conn, job)["status"] == "running"


@of_each_kind
@pytest.mark.parametrize("how", ["crash", "lapse", "hand back"])
def test_a_job_that_is_to_be_cancelled_ends_and_counts_nothing(
    conn: db.Connection, kind: transitions.Kind, how: str
) -> None:
    job = claimed(conn, kind)
    factories.change(conn, job, f"cancel_requested_at = now(), heartbeat_at = {HOUR_AGO}")
    transitions.expire(conn, job)
    if how == "crash":
        (ended,) = transitions.reclaim_dead(conn, kind, "w1")
    elif how == "lapse":
        (ended,) = transitions.reclaim_lapsed(conn, kind)
    else:
        (ended,) = transitions.hand_back_lapsed(conn, kind, had_s=60.0)
    assert (ended["status"], ended["crash_count"], ended["lapse_count"]) == ("cancelled", 0, 0)


def test_a_hundred_rows_that_raise_hide_no_other(conn: db.Connection) -> None:
    for number in range(101):
        factories.ingest(conn, task_name="bad" if number < 100 else "good")
    transitions.claim(conn, transitions.who("fetch"), 101)
    conn.execute(
        "UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 second'"
        " * CASE task_name WHEN 'bad' THEN 2 ELSE 1 END"
    )
    sweeper = sweeps.Sweeper(conn)
    with app_triggers.refusing(conn, "ingest_jobs", "NEW.task_name = 'bad'"):
        assert sweeper.reclaim_lapsed("ingest") == []
        (job,) = sweeper.reclaim_lapsed("ingest")
    assert job["task_name"] == "good"


# --- workers whose session is gone


def registered(conn: db.Connection, worker_id: str, **columns: Any) -> None:
    """Insert the row of a worker that had a session and was seen last an hour ago."""
    given = {"host_label": "box", "queue": "cpu", "pid": 1, "detail": {"lock": True}}
    factories.insert(conn, "workers", worker_id=worker_id, **(given | columns))
    if "last_seen" not in columns:
        conn.execute(
            f"UPDATE workers SET last_seen = {HOUR_AGO} WHERE worker_id = %s".encode(), (worker_id,)
        )


@of_each_kind
def test_only_a_silent_job_of_a_silent_worker_without_its_session_is_taken(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    workers = ["gone", "renews", "reports", "lives", "without"]
    for worker_id in workers:
        job = claimed(conn, kind, worker_id)
        if worker_id != "renews":
            factories.change(conn, job, f"heartbeat_at = {HOUR_AGO}")
        registered(conn, worker_id, **({"detail": {}} if worker_id == "without" else {}))
    conn.execute("UPDATE workers SET last_seen = now() WHERE worker_id = 'reports'")
    with contextlib.closing(transitions.session("lives")):
        taken = transitions.reclaim_gone(conn, kind, 60.0)
    left = f"SELECT worker_id FROM {transitions.TABLES[kind]} WHERE status = 'running' ORDER BY seq"
    assert factories.column(conn, left) == workers[1:]
    assert [(job["crash_count"], job["lapse_count"]) for job in taken] == [(0, 1)]


@of_each_kind
def test_the_death_of_a_process_takes_its_jobs_alone(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    dead, other = claimed(conn, kind, "box:7:a"), claimed(conn, kind, "box:8:a")
    assert ids(transitions.reclaim_dead(conn, kind, "box:7:")) == [dead["id"]]
    assert factories.reread(conn, other)["status"] == "running"


@of_each_kind
def test_a_crash_is_charged_to_its_own_claim_alone(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    lost = claimed(conn, kind)
    transitions.hand_back(conn, lost)
    (held,) = transitions.claim(conn, transitions.who("cpu" if kind == "node" else "fetch"))
    assert transitions.charge(conn, lost) is None
    assert factories.reread(conn, held)["crash_count"] == 0
    charged = transitions.charge(conn, held)
    assert charged is not None and charged["crash_count"] == 1
