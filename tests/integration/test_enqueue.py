"""Queueing ingest jobs: options reach the row, a key makes two requests one, many go at once."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import pickle
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings, strategies

import queue_workflows
from queue_workflows import config, errors, node_queue
from queue_workflows import jobs as jobs_api
from queue_workflows.types import JobId
from tests.support import factories, migration_folders, tabled, transitions
from tests.support.examples import examples
from tests.support.wait import until
from tests.support.worker_views import row as get

NOON = datetime.datetime(2030, 1, 2, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))


@pytest.fixture(autouse=True)
def task(clean_process: None) -> None:
    config.register_ingest_task("t", lambda reason: {})
    config.register_ingest_task("other", lambda reason: {})


def enqueue(**given: Any) -> JobId:
    return jobs_api.enqueue(**{"task_name": "t", "queue": "fetch"} | given)


def enqueue_many(jobs: Any = None, **given: Any) -> list[JobId]:
    return jobs_api.enqueue_many(jobs, **{"task_name": "t", "queue": "fetch"} | given)


def count(conn: Any) -> int:
    return factories.one(conn, "SELECT count(*) FROM ingest_jobs")


def end(conn: Any) -> None:
    transitions.complete_ingest(conn, transitions.claim_ingest(conn))


def age(conn: Any, job_id: str, seconds: float) -> None:
    """As if so much time had gone by since the job was queued."""
    conn.execute(
        "UPDATE ingest_jobs SET created_at = created_at - %s * interval '1 second' WHERE id = %s",
        (seconds, job_id),
    )


# --- options -----------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "idempotency_key": ("k", {"idempotency_key": "k"}),
    "lock_key": ("l", {"lock_key": "l", "blocked_reason": None}),
    "partition_key": ("p", {"partition_key": "p"}),
    "available_at": (NOON, {"available_at": NOON, "blocked_reason": "not_due"}),
    "max_attempts": (3, {"max_attempts": 3, "policy": {"retries": 2}}),
    "backoff": (7, {"policy": {"backoff": 7}, "max_attempts": 1}),
    "timeout_s": (1.5, {"timeout_s": 1.5}),
    "headers": ({"trace": "é"}, {"headers": {"trace": "é"}}),
    "reason": ("boot", {"reason": "boot"}),
    "priority": (-5, {"priority": -5}),
    "args": ({"a": [1]}, {"args": {"a": [1]}}),
}


def test_an_option_reaches_the_row(conn: Any) -> None:
    for name in OPTIONS:
        with tabled.case(name):
            given, expected = OPTIONS[name]
            for call in (enqueue, lambda **one: enqueue_many([one, {}])[0]):
                row = get(call(**{name: given}))
                assert {column: row[column] for column in expected} == expected
                conn.execute("DELETE FROM ingest_jobs")


def test_all_options_at_once_reach_the_claim(conn: Any) -> None:
    backoff = {"kind": "exponential", "base_s": 2.0, "cap_s": 60.0, "jitter": 0.5}
    job_id = enqueue(
        idempotency_key="k", idempotency_window_s=60, lock_key="l", partition_key="p",
        available_at=datetime.datetime.now(datetime.timezone.utc), max_attempts=4, backoff=backoff,
        timeout_s=9, headers={"trace": "1"}, priority=3, args={"n": 1},
    )  # fmt: skip
    row = get(job_id)
    assert row["policy"] == {"backoff": backoff, "retries": 3}
    assert (row["idempotency_window_s"], row["idempotency_released"]) == (60, False)
    job = transitions.claim_ingest(conn)
    assert job["id"] == job_id
    assert job["headers"] == {"trace": "1"}
    assert (job["partition_key"], job["lock_key"], job["max_attempts"]) == ("p", "l", 4)
    assert (job["timeout_s"], job["args"], job["priority"]) == (9, {"n": 1}, 3)


def test_a_job_that_is_not_due_waits_and_wakes_nobody(heard: Callable[[], Any]) -> None:
    enqueue(available_at=NOON)
    assert heard() == []
    assert node_queue.claim_next_ingest_job("fetch", host="box") is None


def test_a_job_without_options_leaves_the_columns_empty(conn: Any) -> None:
    for job_id in (enqueue(), *enqueue_many([{}]), *enqueue_many(args=[{}])):
        row = get(job_id)
        assert (row["policy"], row["headers"], row["timeout_s"], row["max_attempts"]) == (
            None, None, None, 1,
        )  # fmt: skip
        assert job_id.created


LATE = datetime.datetime.max.replace(tzinfo=datetime.timezone(-datetime.timedelta(hours=1)))
WRONG: dict[str, list[Any]] = {
    "idempotency_key": ["", 7, "a\x00", "é" * 501],
    "lock_key": ["", ["l"], "\ud800"],
    "partition_key": ["", 1.5],
    "available_at": [NOON.replace(tzinfo=None), "2030-01-01", 5, LATE],
    "max_attempts": [0, 1.5, 2.0, True, "3", 1002],
    "backoff": [-1, 10**400, "5", {"kind": "no"}, {"base": 1}, {"jitter": 2}],
    "timeout_s": [0, -1, True, float("inf"), 10**400, "1"],
    "headers": [["a"], {"a": 1}, {1: "a"}, {"a": None}, {"a": "\x00"}],
    "reason": [None, 5, "\x00"],
    "priority": [True, 40000, 1.5, 1.0, decimal.Decimal(1), "1"],
    "task_name": [["t"], {}, 5],
    "queue": [["fetch"], {}, 5],
    "args": [{"a": {1}}, {"a": float("nan")}],
}


def test_what_cannot_be_is_refused_before_any_write(conn: Any) -> None:
    for name in (*WRONG, "idempotency_window_s"):
        with tabled.case(name):
            wrong: list[dict[str, Any]] = [{name: bad} for bad in WRONG.get(name, [5])]
            if name not in WRONG:
                wrong += [
                    {"idempotency_key": "k", name: bad}
                    for bad in (-1, float("nan"), 4e7, "1", True)
                ]
            for each in wrong:
                for call in (enqueue, lambda **one: enqueue_many([{}, one])):
                    with pytest.raises(ValueError) as caught:
                        call(**each)
                    assert isinstance(caught.value, (errors.InvalidJob, errors.InvalidPayload)), (
                        each
                    )
            assert count(conn) == 0


# --- keys --------------------------------------------------------------------------------------


def test_a_second_request_of_a_key_is_the_first_one(conn: Any, heard: Callable[[], Any]) -> None:
    first = enqueue(idempotency_key="k", args={"b": 1, "a": 2})
    assert first.created
    assert heard() == [("ingest_job_ready", "fetch")]
    second = enqueue(idempotency_key="k", args={"a": 2, "b": 1.0}, priority=1)
    assert (second, second.created) == (first, False)
    assert heard() == []
    transitions.claim_ingest(conn)
    third = enqueue(idempotency_key="k", args={"a": 2, "b": 1})
    assert (third, third.created) == (first, False)
    assert count(conn) == 1
    kept = pickle.loads(pickle.dumps(third))
    assert (kept, kept.created) == (first, False)


@pytest.mark.parametrize(
    ("window", "early", "late"), [(None, 86_000, 800), (60, 50, 20), (0, None, 0)]
)
def test_a_job_that_has_ended_keeps_its_key_for_its_window(
    conn: Any, window: float | None, early: float | None, late: float
) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=window)
    end(conn)
    if early is not None:
        age(conn, first, early)
        assert enqueue(idempotency_key="k").created is False
    age(conn, first, late)
    second = enqueue(idempotency_key="k")
    assert (second.created, second == first) == (True, False)
    assert get(first)["idempotency_released"] is True
    assert get(first)["idempotency_key"] == "k"


def test_a_job_that_has_not_ended_keeps_its_key_however_old_it_is(conn: Any) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=1)
    age(conn, first, 1000)
    assert enqueue(idempotency_key="k") == first
    transitions.claim_ingest(conn)
    assert enqueue(idempotency_key="k") == first


def test_the_key_of_a_job_that_is_queued_once_is_its_own_as_long_as_it_exists(conn: Any) -> None:
    first, status = jobs_api.enqueue_once("t", queue="fetch", idempotency_key="k")
    assert (first.created, status) == (True, "queued")
    end(conn)
    age(conn, first, 300 * 86_400)
    assert enqueue(idempotency_key="k") == first
    assert jobs_api.enqueue_once("t", queue="fetch", idempotency_key="k") == (first, "completed")


def test_the_job_of_a_key_is_not_one_that_has_lost_it(conn: Any) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=0)
    end(conn)
    second = enqueue(idempotency_key="k", idempotency_window_s=0)
    assert second != first
    found = jobs_api.enqueue_once("t", queue="fetch", idempotency_key="k")
    assert found == (second, "queued")


@pytest.mark.parametrize("end_as", ["failed", "cancelled"])
def test_a_job_that_failed_or_was_cancelled_has_ended(conn: Any, end_as: str) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=1)
    if end_as == "failed":
        node_queue.mark_ingest_failed(first, error="e")
    else:
        jobs_api.cancel(first)
    age(conn, first, 1000)
    assert enqueue(idempotency_key="k").created


@pytest.mark.parametrize(
    "other", [{"args": {"n": 2}}, {"task_name": "other"}, {"queue": "load"}, {"args": {"n": True}}]
)
def test_another_payload_of_a_key_is_an_error_of_its_own(conn: Any, other: Any) -> None:
    first = enqueue(idempotency_key="k", args={"n": 1})
    given = {"idempotency_key": "k", "args": {"n": 1}} | other
    with pytest.raises(errors.IdempotencyClash, match="'k' is that of job") as caught:
        enqueue(**given)
    assert caught.value.job_id == first
    assert isinstance(caught.value, ValueError)
    with conn.transaction(), pytest.raises(errors.IdempotencyClash):
        enqueue_many([{"args": {"n": 1}}, given], conn=conn)
    assert count(conn) == 1


def test_a_clash_leaves_the_callers_transaction_as_it_was(conn: Any) -> None:
    enqueue(idempotency_key="k", args={"n": 1})
    with conn.transaction():
        conn.execute("UPDATE ingest_jobs SET reason = 'mine'")
        other = {"idempotency_key": "k", "args": {"n": 2}}
        with pytest.raises(errors.IdempotencyClash):
            enqueue(**other, conn=conn)
        with pytest.raises(errors.IdempotencyClash):
            enqueue_many([{"lock_key": "l"}, other], conn=conn)
    assert factories.column(conn, "SELECT reason FROM ingest_jobs") == ["mine"]


def test_a_job_waits_for_its_lock_key_whatever_happens_to_a_duplicate(conn: Any) -> None:
    first = enqueue(idempotency_key="k", lock_key="l")
    assert enqueue(idempotency_key="k", lock_key="l") == first
    second = enqueue(lock_key="l")
    assert [get(job)["blocked_reason"] for job in (first, second)] == [None, "locked"]
    end(conn)
    assert get(second)["blocked_reason"] is None


def fifty(dsn: str, **given: Any) -> list[JobId]:
    """Fifty requests on ten connections, all at once."""
    start = threading.Barrier(10)

    def five(_: int) -> list[JobId]:
        with psycopg.connect(dsn, autocommit=True) as own:
            start.wait(30)
            return [enqueue(**given, conn=own) for _ in range(5)]

    with futures.ThreadPoolExecutor(10) as pool:
        return [job_id for found in pool.map(five, range(10)) for job_id in found]


def test_one_of_fifty_concurrent_requests_creates_the_job(conn: Any, dsn: str) -> None:
    ids = fifty(dsn, idempotency_key="k", args={"n": 1})
    assert (len(ids), len(set(ids)), count(conn)) == (50, 1, 1)
    assert [job_id.created for job_id in ids].count(True) == 1


def test_one_of_fifty_concurrent_requests_takes_over_an_expired_key(conn: Any, dsn: str) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=0)
    end(conn)
    ids = fifty(dsn, idempotency_key="k")
    assert (len(set(ids)), first in ids, count(conn)) == (1, False, 2)
    assert [job_id.created for job_id in ids].count(True) == 1


WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


def test_calls_with_the_same_keys_in_other_orders_do_not_wait_for_each_other(
    conn: Any, db: ModuleType
) -> None:
    """Both have come as far as the key in the middle when it is given back."""
    with futures.ThreadPoolExecutor(2) as pool, db.connect() as other:
        with conn.transaction(force_rollback=True):
            enqueue(idempotency_key="m", conn=conn)
            calls = [
                pool.submit(enqueue_many, [{"idempotency_key": key} for key in order])
                for order in ("amz", "zma")
            ]
            until(lambda: factories.one(other, WAITING) == 2)
        ids = [call.result(30) for call in calls]
    assert ids[0] == ids[1][::-1]
    assert count(conn) == 3


@pytest.mark.parametrize("commits", [True, False])
def test_a_call_waits_for_who_has_the_key_and_has_not_ended(
    conn: Any, db: ModuleType, commits: bool
) -> None:
    with futures.ThreadPoolExecutor(1) as pool, db.connect() as other:
        with conn.transaction(force_rollback=not commits):
            first = enqueue(idempotency_key="k", conn=conn)
            second = pool.submit(enqueue, idempotency_key="k")
            until(lambda: factories.one(other, WAITING))
            assert not second.done()
        assert second.result(30).created is not commits
        assert (second.result() == first) is commits


def test_a_key_that_is_free_when_it_is_read_is_requested_again(conn: Any) -> None:
    first = enqueue(idempotency_key="k")
    conn.execute(
        "CREATE FUNCTION gone() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$BEGIN DELETE FROM ingest_jobs WHERE id = '{first}'; RETURN NULL; END $$;"
        " CREATE TRIGGER gone AFTER INSERT ON ingest_jobs EXECUTE FUNCTION gone()"
    )
    try:
        second = enqueue(idempotency_key="k")
    finally:
        conn.execute("DROP FUNCTION gone() CASCADE")
    assert second.created
    assert factories.column(conn, "SELECT id FROM ingest_jobs") == [second]


# --- plain SQL ---------------------------------------------------------------------------------

PLAIN = "INSERT INTO ingest_jobs (task_name, queue, idempotency_key) VALUES ('t', 'fetch', 'k')"


def test_plain_sql_does_as_much(conn: Any) -> None:
    conn.execute(PLAIN)
    with pytest.raises(psycopg.errors.UniqueViolation, match="ingest_jobs_idempotency_idx"):
        conn.execute(PLAIN)
    assert conn.execute(PLAIN + " ON CONFLICT DO NOTHING RETURNING id").fetchone() is None
    assert enqueue(idempotency_key="k").created is False
    end(conn)
    assert conn.execute(PLAIN + " ON CONFLICT DO NOTHING RETURNING id").fetchone() is None
    conn.execute("UPDATE ingest_jobs SET created_at = created_at - interval '1 day'")
    assert conn.execute(PLAIN + " ON CONFLICT DO NOTHING RETURNING id").fetchone() is not None
    assert count(conn) == 2


@pytest.mark.parametrize("window", ["-1", "'NaN'", "'infinity'", "1e9"])
def test_plain_sql_with_a_window_that_cannot_be_is_refused(conn: Any, window: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="idempotency_window_s must be 0 or"):
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, idempotency_key, idempotency_window_s)"
            f" VALUES ('t', 'fetch', 'k', {window})"
        )


@pytest.mark.parametrize("window", ["-1", "'NaN'", "'infinity'", "1e9"])
def test_a_window_that_cannot_be_is_refused_without_a_key_too(conn: Any, window: str) -> None:
    """Else each later change of the row would compare its whole content."""
    with pytest.raises(psycopg.errors.CheckViolation, match="idempotency_window_s must be 0 or"):
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, idempotency_window_s)"
            f" VALUES ('t', 'fetch', {window})"
        )


def test_the_content_of_an_old_row_is_compared_only_for_a_change_of_what_is_bad(conn: Any) -> None:
    job_id = enqueue()
    calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions WHERE funcname = %s"
    with conn.transaction(force_rollback=True):
        conn.execute(
            "SET LOCAL track_functions = 'pl'; SET LOCAL session_replication_role = replica"
        )
        conn.execute(
            "UPDATE ingest_jobs SET idempotency_window_s = 'NaN', reason = repeat('x', 9000)"
        )
        conn.execute("SET LOCAL session_replication_role = origin")
        conn.execute(
            "UPDATE ingest_jobs SET crash_count = 1, attempts = 1 WHERE id = %s", (job_id,)
        )
        assert factories.one(conn, calls, "queue_workflows_bound_job") == 1
        assert factories.one(conn, calls, "queue_workflows_refuse") == 0
        with pytest.raises(psycopg.errors.CheckViolation, match="idempotency_window_s must be"):
            conn.execute("UPDATE ingest_jobs SET idempotency_window_s = -1")


def test_a_window_that_a_plain_update_got_wrong_stops_nobody(conn: Any) -> None:
    for window, seconds in (("'NaN'", 366 * 86_400), ("'infinity'", 366 * 86_400), ("-5", 0)):
        job_id = enqueue(idempotency_key=window)
        end(conn)
        change = f"UPDATE ingest_jobs SET idempotency_window_s = {window} WHERE id = '{job_id}'"
        with pytest.raises(psycopg.errors.CheckViolation, match="idempotency_window_s must be"):
            conn.execute(change)
        with conn.transaction():  # as a row of before there were bounds
            conn.execute("SET LOCAL session_replication_role = replica")
            conn.execute(change)
        if seconds:
            assert enqueue(idempotency_key=window) == job_id
        age(conn, job_id, seconds)
        assert enqueue(idempotency_key=window).created
        end(conn)


def test_a_role_with_only_insert_may_give_a_key(conn: Any, db: ModuleType) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=0)
    end(conn)
    role = f"{conn.info.dbname}_inserter"
    conn.execute(
        f"CREATE ROLE {role}; GRANT SELECT, INSERT ON ingest_jobs TO {role};"
        f" GRANT EXECUTE ON FUNCTION queue_workflows_enqueue, queue_workflows_put_jobs TO {role};"
        f" GRANT USAGE ON SEQUENCE ingest_jobs_seq_seq TO {role}"
    )
    try:
        with conn.transaction():
            conn.execute(f"SET LOCAL ROLE {role}")
            second = enqueue(idempotency_key="k", lock_key="l", conn=conn)
            assert second.created
            assert second != first
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_key_is_found_by_its_index_for_any_table_contents(conn: Any) -> None:
    """Plans of an empty table, as here, stay in use when it has grown."""
    conn.execute("VACUUM ANALYZE ingest_jobs")
    scans = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'ingest_jobs'"
    with conn.transaction():
        before = factories.one(conn, scans)
        conn.execute(PLAIN)
        for each in ({}, {"idempotency_key": "k"}, {"idempotency_key": "l"}):
            enqueue(conn=conn, **each)
        enqueue_many([{"idempotency_key": key} for key in "abc"], conn=conn)
        assert factories.one(conn, scans) == before


# --- running again -----------------------------------------------------------------------------


def test_a_job_that_runs_again_has_its_key_again(conn: Any) -> None:
    first = enqueue(idempotency_key="k", idempotency_window_s=0)
    node_queue.mark_ingest_failed(first, error="e")
    second = enqueue(idempotency_key="k", idempotency_window_s=0)
    assert second.created
    with pytest.raises(errors.IdempotencyClash, match=f"key 'k' is that of job '{second}'"):
        jobs_api.retry(first)
    assert get(first)["status"] == "failed"
    jobs_api.cancel(second)
    jobs_api.retry(first)
    assert (get(first)["status"], get(first)["idempotency_released"]) == ("queued", False)
    assert get(second)["idempotency_released"] is True
    assert enqueue(idempotency_key="k") == first


# --- many --------------------------------------------------------------------------------------


def test_options_missing_in_the_call_are_those_of_the_task(conn: Any) -> None:
    queue_workflows.configure(ingest_queues={"fetch", "maintenance"})
    queue_workflows.register_ingest_task(
        "named", lambda: None, queue="fetch", priority=7, lock_key="one"
    )
    job_ids: list[JobId] = [
        jobs_api.enqueue(task_name="named"),
        *jobs_api.enqueue_many(task_name="named", args=[{}]),
        *jobs_api.enqueue_many([{"task_name": "named"}]),
        asyncio.run(jobs_api.enqueue_async(task_name="named")),
    ]
    for job_id in job_ids:
        row = get(job_id)
        assert (row["queue"], row["priority"], row["lock_key"]) == ("fetch", 7, "one")
    other = jobs_api.enqueue(task_name="named", queue="maintenance", priority=1, lock_key="two")
    row = get(other)
    assert (row["queue"], row["priority"], row["lock_key"]) == ("maintenance", 1, "two")


def test_a_list_of_what_are_no_jobs_is_refused(conn: Any) -> None:
    for wrong in ([None], [5], [("t", "fetch")]):
        with pytest.raises(errors.InvalidJob, match="job 0 is not a mapping of keywords"):
            enqueue_many(wrong)
    with pytest.raises(errors.InvalidJob, match="job 0 has no task_name"):
        jobs_api.enqueue_many(args=[{}], queue="fetch")
    assert count(conn) == 0


def test_a_job_of_no_queue_is_refused(conn: Any) -> None:
    for call in (
        lambda: jobs_api.enqueue(task_name="t"),
        lambda: jobs_api.enqueue_many(task_name="t", args=[{}]),
        lambda: jobs_api.enqueue_many([{"task_name": "t"}]),
    ):
        with pytest.raises(errors.InvalidJob, match="no queue is named"):
            call()
    with pytest.raises(errors.UnknownTask):
        jobs_api.enqueue(task_name="nobody knows it")
    assert count(conn) == 0


def test_args_that_a_task_does_not_take_are_refused_before_any_write(conn: Any) -> None:
    def typed(*, day: datetime.date) -> None: ...

    queue_workflows.register_ingest_task("typed", typed, queue="fetch")
    for call in (
        lambda: jobs_api.enqueue(task_name="typed", args={"day": "soon"}),
        lambda: jobs_api.enqueue(task_name="typed"),
        lambda: jobs_api.enqueue_many(
            task_name="typed", args=[{"day": "2026-03-01"}, {"day": "soon"}]
        ),
        lambda: jobs_api.enqueue_many([{"task_name": "typed", "args": {"day": "soon"}}]),
        lambda: asyncio.run(jobs_api.enqueue_async(task_name="typed", args={"day": "soon"})),
    ):
        with pytest.raises(errors.ArgsRefused, match="day"):
            call()
    assert count(conn) == 0
    job_id = jobs_api.enqueue(task_name="typed", args={"day": "2026-03-01"})
    assert get(job_id)["args"] == {"day": "2026-03-01"}


def test_each_of_many_args_is_checked_and_named(conn: Any) -> None:
    def typed(*, day: datetime.date) -> None: ...

    queue_workflows.register_ingest_task("typed", typed, queue="fetch")
    good = [{"day": "2026-03-01"}, {"day": "2026-03-02"}]
    ids = jobs_api.enqueue_many(task_name="typed", args=good)
    assert [get(job_id)["args"] for job_id in ids] == good
    assert jobs_api.enqueue_many(task_name="typed", args=[]) == []
    bad: list[dict[str, Any]] = [good[0], {"day": "soon"}]
    many: list[Any] = [{"args": args} for args in bad]
    for call in (
        lambda: jobs_api.enqueue_many(task_name="typed", args=bad),
        lambda: jobs_api.enqueue_many(many, task_name="typed"),
    ):
        with pytest.raises(errors.ArgsRefused, match="job 1: args of task 'typed': 'day': date"):
            call()
    assert count(conn) == 2


def test_many_jobs_of_many_kinds_are_one_statement(conn: Any, heard: Callable[[], Any]) -> None:
    jobs = [
        {"args": {"n": 0}, "priority": 9},
        {"args": {"n": 1}, "task_name": "other", "queue": "load"},
        {"args": {"n": 2}, "lock_key": "l", "reason": "mine"},
        {"args": {"n": 3}, "available_at": NOON},
    ]
    ids = enqueue_many(jobs, priority=4, max_attempts=2, headers={"a": "b"})
    assert heard() == [("ingest_job_ready", "fetch"), ("ingest_job_ready", "load")]
    rows = [get(job_id) for job_id in ids]
    assert [row["args"]["n"] for row in rows] == [0, 1, 2, 3]
    assert [row["priority"] for row in rows] == [9, 4, 4, 4]
    assert [row["task_name"] for row in rows] == ["t", "other", "t", "t"]
    assert [row["blocked_reason"] for row in rows] == [None, None, None, "not_due"]
    assert {row["max_attempts"] for row in rows} == {2}
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert all(job_id.created for job_id in ids)


def test_jobs_with_keys_keep_their_order_and_their_duplicates(conn: Any) -> None:
    first = enqueue(idempotency_key="m")
    keys = ["z", None, "m", "a", "z", "b"]
    ids = enqueue_many([{"idempotency_key": key} for key in keys], idempotency_window_s=5)
    assert [job_id.created for job_id in ids] == [True, True, False, True, False, True]
    assert ids[2] == first
    assert ids[4] == ids[0]
    rows = [get(job_id) for job_id in dict.fromkeys(ids)]
    assert [row["idempotency_window_s"] for row in rows] == [5, None, None, 5, 5]
    assert [transitions.claim_ingest(conn)["id"] for _ in range(5)] == [
        first, ids[0], ids[1], ids[3], ids[5],
    ]  # fmt: skip


def test_a_contradictory_call_queues_nothing(conn: Any) -> None:
    with pytest.raises(errors.IdempotencyClash, match="jobs 1 and 2 of one call share") as caught:
        enqueue_many([{}, *({"idempotency_key": "k", "args": {"n": n}} for n in range(2))])
    assert caught.value.job_id == ""
    assert count(conn) == 0


def test_options_of_a_call_are_those_of_its_args(conn: Any) -> None:
    ids = enqueue_many(args=[{"n": 0}, {"n": 1}], timeout_s=5, partition_key="p")
    assert [(get(i)["args"]["n"], get(i)["timeout_s"], get(i)["partition_key"]) for i in ids] == [
        (0, 5, "p"), (1, 5, "p"),
    ]  # fmt: skip
    (job_id,) = enqueue_many(args=[{}], priority=3)
    assert get(job_id)["priority"] == 3
    assert enqueue_many([]) == enqueue_many(args=[]) == enqueue_many(args=[], timeout_s=1) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "either jobs or args"),
        ({"jobs": [{}], "args": [{}]}, "either jobs or args"),
        ({"jobs": [{}, {"que": 1}]}, "job 1: 'que' is none of task_name, queue"),
        ({"jobs": [{"queue": None}]}, "no queue is named"),
        ({"jobs": [{}, {"timeout_s": -1}]}, "job 1: job of task 't': 'timeout_s'"),
        ({"jobs": [{"conn": None}]}, "'conn' is none of"),
    ],
)
def test_an_invalid_call_names_the_job(conn: Any, given: Any, says: str) -> None:
    with pytest.raises(errors.InvalidJob, match=says):
        enqueue_many(given.get("jobs"), **{k: v for k, v in given.items() if k != "jobs"})
    with pytest.raises(errors.UnknownQueue):
        enqueue_many([{}, {"queue": "cpu"}])
    assert count(conn) == 0


@pytest.mark.parametrize("joins", [False, True])
def test_large_calls_are_all_or_none_on_every_connection(
    conn: Any, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """More than 8 MiB are several statements."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "4096")
    large = [{"n": n, "text": "x" * 3_000_000} for n in range(4)]
    kinds: list[Any] = [
        {"jobs": [{"args": args, "timeout_s": 1} for args in large]},
        {"jobs": [{"args": args, "idempotency_key": f"k{args['n']}"} for args in large]},
        {"args": large},
    ]
    for kind in kinds:
        ids = enqueue_many(**kind, conn=conn if joins else None)
        assert [get(job_id)["args"]["n"] for job_id in ids] == list(range(4))
        # The default of `created_at` is the time at which its transaction began.
        assert factories.one(conn, "SELECT count(DISTINCT created_at) FROM ingest_jobs") == 1
        conn.execute("DELETE FROM ingest_jobs")


# --- up and down -------------------------------------------------------------------------------


def test_an_apps_own_keys_are_migrated_and_lost_windows_are_reported(
    fresh_database: str, clean_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    db.bootstrap(migrations_dir=migration_folders.chain_up_to(12, tmp_path / "to12"))
    row = "INSERT INTO ingest_jobs (id, task_name, queue, status, idempotency_key) VALUES "
    with db.connect() as own:
        own.execute("ALTER TABLE ingest_jobs ADD COLUMN idempotency_key text")
        own.execute(
            row + "('a', 't', 'fetch', 'completed', 'k'), ('b', 't', 'fetch', 'queued', 'k'),"
            " ('c', 't', 'fetch', 'completed', 'k'), ('d', 't', 'fetch', 'failed', 'l'),"
            " ('e', 't', 'fetch', 'failed', 'l')"
        )
        db.bootstrap()
        kept = "SELECT id FROM ingest_jobs WHERE NOT idempotency_released ORDER BY id"
        assert factories.column(own, kept) == ["b", "e"]
        own.execute("UPDATE ingest_jobs SET idempotency_window_s = 5 WHERE id = 'b'")
        with pytest.raises(errors.DataLossRefused, match="idempotency_window_s with 1 values"):
            db.downgrade(to_version=12)
        db.downgrade(to_version=12, allow_data_loss=True)
        assert factories.one(own, "SELECT count(*) FROM ingest_jobs") == 5
    db.close_pool()


# --- anything in any order ---------------------------------------------------------------------

DAY_S = 86_400
STEPS = strategies.lists(
    strategies.one_of(
        strategies.tuples(
            strategies.just("ask"), strategies.sampled_from("kl"), strategies.integers(0, 1),
            strategies.sampled_from([None, 0, 600]),
        ),
        strategies.tuples(strategies.sampled_from(["complete", "fail", "cancel", "retry", "age"])),
    ),
    max_size=20,
)  # fmt: skip


class Model:
    """Who has which key, by the words of the page."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def has_key(self, job: dict[str, Any]) -> bool:
        window = DAY_S if job["window"] is None else job["window"]
        return not job["released"] and (job["live"] or job["age"] < window)

    def owner(self, key: str) -> dict[str, Any] | None:
        return next((j for j in self.jobs if j["key"] == key and self.has_key(j)), None)

    def add(self, job_id: str, key: str, number: int, window: float | None) -> None:
        self.release(key)
        self.jobs.append(
            {"id": job_id, "key": key, "n": number, "window": window, "age": 0}
            | {"live": True, "released": False, "failed": False}
        )

    def release(self, key: str) -> None:
        for job in self.jobs:
            job["released"] |= job["key"] == key and not self.has_key(job)

    def oldest(self, **wanted: Any) -> dict[str, Any] | None:
        return next((j for j in self.jobs if wanted.items() <= j.items()), None)


def ask(model: Model, key: str, number: int, window: float | None) -> None:
    owner = model.owner(key)
    given = {"idempotency_key": key, "args": {"n": number}, "idempotency_window_s": window}
    if owner is not None and owner["n"] != number:
        with pytest.raises(errors.IdempotencyClash) as caught:
            enqueue(**given)
        assert caught.value.job_id == owner["id"]
        return
    job_id = enqueue(**given)
    assert job_id.created is (owner is None)
    if owner is None:
        model.add(job_id, key, number, window)
    else:
        assert job_id == owner["id"]


def bring_on(model: Model, step: str) -> None:
    job = model.oldest(failed=True) if step == "retry" else model.oldest(live=True)
    if job is None:
        return
    if step != "retry":
        {
            "complete": node_queue.mark_ingest_completed,
            "fail": lambda job_id: node_queue.mark_ingest_failed(job_id, error="e"),
            "cancel": jobs_api.cancel,
        }[step](job["id"])
        job |= {"live": False, "failed": step != "complete"}
        return
    owner = model.owner(job["key"])
    if job["released"] and owner is not None:
        with pytest.raises(errors.IdempotencyClash):
            jobs_api.retry(job["id"])
        return
    jobs_api.retry(job["id"])
    if job["released"]:
        model.release(job["key"])
    job |= {"live": True, "failed": False, "released": False}


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_keys_belong_to_a_job_as_long_as_documented(
    conn: Any, steps: list[tuple[Any, ...]]
) -> None:
    conn.execute("DELETE FROM ingest_jobs")
    model = Model()
    for step, *values in steps:
        if step == "ask":
            ask(model, *values)
        elif step == "age":
            conn.execute("UPDATE ingest_jobs SET created_at = created_at - interval '300 s'")
            for job in model.jobs:
                job["age"] += 300
        else:
            bring_on(model, step)
    live = factories.column(
        conn, "SELECT idempotency_key FROM ingest_jobs WHERE status IN ('queued', 'running')"
    )
    assert len(live) == len(set(live))
    assert count(conn) == len(model.jobs)
