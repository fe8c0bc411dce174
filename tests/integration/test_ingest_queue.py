"""Ingest jobs: queued in the caller's transaction, claimed in order, ended once, reclaimed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import config, errors, jobs, node_queue, scheduler
from tests.support import factories, flow, tabled, transitions
from tests.support.worker_views import row as get


@pytest.fixture(autouse=True)
def task(clean_process: None) -> None:
    config.register_ingest_task("t", lambda reason: {})


def enqueue(**given: Any) -> str:
    return jobs.enqueue(**{"task_name": "t", "queue": "fetch"} | given)


def claim(queue: str = "fetch", **given: Any) -> Any:
    return node_queue.claim_next_ingest_job(queue, **{"host": "box"} | given)


# --- enqueue -----------------------------------------------------------------------------------


def test_a_job_is_queued_with_the_values_that_the_app_gives(heard: Callable[[], Any]) -> None:
    job = get(enqueue(queue="load", reason="boot", priority=7, args={"a": [1]}))
    assert heard() == [("ingest_job_ready", "load")]
    assert (job["task_name"], job["queue"], job["reason"]) == ("t", "load", "boot")
    assert (job["status"], job["priority"], job["args"]) == ("queued", 7, {"a": [1]})
    assert (job["claim_no"], job["worker_id"], job["lease_expires_at"]) == (0, None, None)
    assert node_queue.get_ingest_job("nope") is None


def test_the_defaults_are_the_contracts(db: ModuleType) -> None:
    job = get(enqueue())
    assert (job["reason"], job["priority"], job["args"], job["max_attempts"]) == (
        "tick", 100, {}, 1,
    )  # fmt: skip


def test_a_job_that_cannot_be_is_refused_before_any_write(conn: Any) -> None:
    cases: list[Any] = [
        ({"queue": "cpu"}, errors.UnknownQueue),
        ({"queue": "nope"}, errors.UnknownQueue),
        ({"task_name": "nope"}, errors.UnknownTask),
        ({"args": {"a": "\x00"}}, errors.InvalidPayload),
        ({"args": {"a": {1}}}, errors.InvalidPayload),
    ]
    for given, error in cases:
        with tabled.case(given, error):
            with pytest.raises(ValueError) as caught:
                enqueue(**given)
            assert isinstance(caught.value, error)
            with pytest.raises(ValueError):
                jobs.enqueue_many(
                    **{"task_name": "t", "queue": "fetch"}
                    | given
                    | {"args": [given.get("args", {})]}
                )
            assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0


def test_the_task_that_was_perhaps_meant_is_named(db: ModuleType) -> None:
    config.register_ingest_task("nightly", str)
    with pytest.raises(errors.UnknownTask, match="did you mean 'nightly'"):
        enqueue(task_name="nightyl")
    with pytest.raises(errors.UnknownTask, match="did you mean 'nightly'"):
        scheduler.enqueue_due([scheduler.ScheduleEntry("s", 1, "nightyl", "fetch")])


def test_an_apps_own_queue_is_a_queue(db: ModuleType) -> None:
    config.configure(ingest_queues={"flood.eu"})
    job_id = enqueue(queue="flood.eu")
    assert claim("flood.eu")["id"] == job_id
    with pytest.raises(errors.UnknownQueue, match=r"'fetch': known are flood\.eu"):
        enqueue(queue="fetch")


def test_many_jobs_are_one_statement_with_one_wake_up(heard: Callable[[], Any]) -> None:
    ids = jobs.enqueue_many(
        task_name="t", queue="fetch", args=({"n": n} for n in range(20)), priority=3
    )
    assert heard() == [("ingest_job_ready", "fetch")]
    assert [get(job_id)["args"]["n"] for job_id in ids] == list(range(20))
    assert [claim()["id"] for _ in range(20)] == ids
    assert jobs.enqueue_many(task_name="t", queue="fetch", args=[]) == []


# --- claim -------------------------------------------------------------------------------------


def test_a_claim_sets_identity_and_lease(conn: Any) -> None:
    job_id = enqueue()
    job = claim(lease_s=60)
    assert job == get(job_id)
    assert (job["status"], job["claim_no"], job["claimed_by"]) == ("running", 1, "box")
    assert job["worker_id"].startswith("box:")
    left = "SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM ingest_jobs"
    assert 55 < factories.one(conn, left) <= 60
    assert factories.events(conn, job_id) == ["claimed"]
    assert claim() is None


def test_the_claim_takes_priority_then_age_of_its_queue(conn: Any) -> None:
    rows = [("a", 100), ("b", 5), ("c", 100), ("d", 5)]
    with conn.transaction():
        for name, priority in rows:
            factories.ingest(conn, id=name, priority=priority)
        factories.ingest(conn, id="other", queue="load", priority=1)
    assert [claim()["id"] for _ in rows] == ["b", "d", "a", "c"]
    assert claim() is None
    assert claim("load")["id"] == "other"


def test_a_machine_that_is_off_claims_nothing(conn: Any) -> None:
    enqueue()
    factories.insert(conn, "worker_controls", host_label="box", queue="fetch", desired_state="off")
    assert claim() is None
    assert claim(host="other") is not None


def test_a_job_that_is_not_due_waits_until_it_is(
    conn: Any, toy: flow.Flow, heard: Callable[[], Any]
) -> None:
    factories.ingest(conn, available_at="2999-01-01")
    assert (claim(), heard(), transitions.promote_due(conn)) == (None, [], 0)
    conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 ms'")
    toy.look()
    assert heard() == [("ingest_job_ready", "fetch")]
    assert claim() is not None


def test_a_workers_own_claim_promotes_what_is_due(conn: Any) -> None:
    factories.ingest(conn, available_at="2999-01-01")
    conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 ms'")
    assert claim() is not None


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [False, True])
def test_a_job_is_completed_by_hand_once(conn: Any, running: bool) -> None:
    job_id = enqueue()
    if running:
        claim()
    row = node_queue.mark_ingest_completed(job_id, result={"n": 1}, seconds=2.5)
    assert row == get(job_id)
    assert (row["status"], row["result"], row["seconds"]) == ("completed", {"n": 1}, 2.5)
    assert (row["worker_id"], row["lease_expires_at"]) == (None, None)
    assert row["finished_at"] is not None
    assert node_queue.mark_ingest_completed(job_id, result={"n": 2}) is None
    assert node_queue.mark_ingest_failed(job_id, error="e") is None
    assert get(job_id)["result"] == {"n": 1}
    assert factories.events(conn, job_id)[-1] == "completed"
    assert factories.events(conn, job_id).count("completed") == 1


@pytest.mark.parametrize("running", [False, True])
def test_a_job_is_failed_by_hand_once(conn: Any, running: bool) -> None:
    job_id = enqueue()
    if running:
        claim()
    row = node_queue.mark_ingest_failed(job_id, error="a\x00" + "x" * 9000, seconds=1)
    assert row is not None
    assert (row["status"], len(row["error"]), row["worker_id"]) == ("failed", 8000, None)
    assert node_queue.mark_ingest_failed(job_id, error="e") is None
    assert factories.events(conn, job_id)[-1] == "failed"
    assert node_queue.mark_ingest_failed("nope", error="e") is None


def test_a_result_that_cannot_be_stored_changes_nothing(conn: Any) -> None:
    job = get(enqueue())
    with pytest.raises(errors.InvalidPayload, match="result"):
        node_queue.mark_ingest_completed(job["id"], result={"a": float("nan")})
    assert get(job["id"]) == job


def test_an_ordinary_failure_is_retried_until_the_attempts_are_spent(conn: Any) -> None:
    job = factories.ingest(conn, max_attempts=3)
    wait_s = "SELECT extract(epoch FROM available_at - now())::float8 FROM ingest_jobs"
    for attempt in (1, 2):
        row = transitions.fail(conn, transitions.claim_ingest(conn), f"e{attempt}")
        assert row is not None
        assert (row["status"], row["attempts"], row["error"]) == ("queued", attempt, f"e{attempt}")
        assert row["blocked_reason"] == "not_due"
        assert 30 * attempt - 5 < factories.one(conn, wait_s) <= 30 * attempt
        assert claim() is None
        conn.execute("UPDATE ingest_jobs SET available_at = NULL")
    row = transitions.fail(conn, transitions.claim_ingest(conn), "e3")
    assert row is not None
    assert (row["status"], row["attempts"], row["available_at"]) == ("failed", 3, None)
    assert factories.events(conn, job["id"]) == [
        "claimed", "retried", "claimed", "retried", "claimed", "failed",
    ]  # fmt: skip


def test_a_timeout_fails_an_ingest_job_at_once(conn: Any) -> None:
    factories.ingest(conn, max_attempts=3)
    job = transitions.claim_ingest(conn)
    row = transitions.end_by_watchdog(conn, job, error="over budget", seconds=9)
    assert row is not None
    assert (row["status"], row["error"], row["watchdog_retries"]) == ("failed", "over budget", 1)


# --- cancel and retry --------------------------------------------------------------------------


def test_a_failed_job_is_retried_in_a_new_generation(conn: Any, heard: Callable[[], Any]) -> None:
    job = factories.ingest(conn, max_attempts=2)
    node_queue.mark_ingest_failed(job["id"], error="e")
    conn.execute("UPDATE ingest_jobs SET attempts = 2, crash_count = 1")
    heard()
    row = jobs.retry(job["id"])
    assert (row["status"], row["generation"], row["attempts"], row["crash_count"]) == (
        "queued", 1, 0, 0,
    )  # fmt: skip
    assert (row["error"], row["finished_at"]) == (None, None)
    assert heard() == [("ingest_job_ready", "fetch")]
    claimed = transitions.claim_ingest(conn)
    assert claimed["claim_no"] == 1
    transitions.complete_ingest(conn, claimed)
    with pytest.raises(errors.InvalidConfig, match="it is completed: only a failed or cancelled"):
        jobs.retry(job["id"])
    with pytest.raises(errors.UnknownJob, match="there is no job 'none'"):
        jobs.retry("none")


@pytest.mark.parametrize("over", ["completed", "failed", "cancelled"])
def test_no_plain_update_leaves_a_terminal_state(conn: Any, over: str) -> None:
    factories.ingest(conn, status=over)
    for late in {"queued", "running", "completed", "failed", "cancelled"} - {over}:
        with pytest.raises(psycopg.Error, match="and stays so") as caught:
            conn.execute("UPDATE ingest_jobs SET status = %s", (late,))
        assert caught.value.sqlstate == "QW002"


# --- reclaim and requeue -----------------------------------------------------------------------


def test_a_lapsed_lease_goes_to_the_front_then_waits_then_is_poison(conn: Any) -> None:
    job_id = enqueue()
    found: list[Any] = []
    for _ in range(10):
        conn.execute("UPDATE ingest_jobs SET available_at = NULL WHERE status = 'queued'")
        job = transitions.claim_ingest(conn)
        transitions.expire(conn, job)
        (row,) = node_queue.reclaim_expired_ingest_leases()
        found.append(row)
        conn.execute("UPDATE ingest_jobs SET priority = 50 WHERE status = 'queued'")
    assert [(r["status"], r["priority"], r["lapse_count"]) for r in found] == [
        ("queued", 10, 1), *(("queued", 50, n) for n in range(2, 10)), ("failed", 50, 10),
    ]  # fmt: skip
    assert [r["blocked_reason"] for r in found] == [None, *["not_due"] * 8, None]
    error = get(job_id)["error"]
    assert error.startswith("poison: its lease lapsed 10 times in a row, the last time of w1")
    assert get(job_id)["crash_count"] == 0


def test_one_machines_running_jobs_are_taken_back(conn: Any) -> None:
    for _ in range(3):
        enqueue()
    mine, _ = claim(), claim(host="other")
    enqueue(queue="load")
    claim("load")
    assert node_queue.requeue_running_for_worker("box", "fetch") == 1
    assert (get(mine["id"])["status"], get(mine["id"])["priority"]) == ("queued", 10)
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'running'") == 2


# --- snapshot ----------------------------------------------------------------------------------


def test_the_snapshot_counts_by_queue(conn: Any) -> None:
    empty = {"queued": 0, "running": 0, "completed": 0, "failed": 0, "workers": 0}
    assert node_queue.ingest_snapshot() == {"queues": {"fetch": empty, "load": empty}}
    for status in ("completed", "completed", "failed", "cancelled", "queued"):
        factories.ingest(conn, status=status)
    enqueue(queue="load")
    claim("load")
    for host in ("a", "b"):
        node_queue.upsert_worker_heartbeat(host_label=host, queue="fetch", concurrency=1)
    node_queue.upsert_worker_heartbeat(host_label="c", queue="load", concurrency=1)
    conn.execute(
        "UPDATE worker_heartbeats SET last_seen = now() - interval '31 s' WHERE host_label = 'c'"
    )
    assert node_queue.ingest_snapshot()["queues"] == {
        "fetch": {"queued": 1, "running": 0, "completed": 2, "failed": 1, "workers": 2},
        "load": empty | {"running": 1},
    }
