"""One ingest job: how its task is called, what is stored, and how attempts are counted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db as database
from queue_workflows import ingest_executor, node_queue
from tests.support import factories

Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("db")


def claimed(task: Any = None, **columns: Any) -> Row:
    """A claimed job of this task."""
    if task is not None:
        queue_workflows.register_ingest_task("t", task)
    with database.connection() as conn:
        factories.ingest(conn, **columns)
    return claim()


def claim() -> Row:
    job = node_queue.claim_next_ingest_job("fetch", host="box")
    assert job is not None
    return job


def now(job: Row) -> Row:
    row = node_queue.get_ingest_job(job["id"])
    assert row is not None
    return row


def result(task: Any) -> Any:
    """What is stored of a task that was called for reason `why` with `{"a": 1}`."""
    job = claimed(task, reason="why", args={"a": 1})
    assert ingest_executor.execute_ingest_job(job) == "completed", now(job)["error"]
    row = now(job)
    assert (row["status"], row["error"], row["worker_id"]) == ("completed", None, None)
    return row["result"]


class Bound:
    def method(self, reason: str, args: Row) -> Any:
        return [reason, args]

    def __call__(self, args: Row) -> Any:
        return args["a"]


def _two(reason: str, args: Row) -> Any:
    return [reason, args]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (lambda reason: reason, "why"),
        (lambda anything: anything, "why"),
        (lambda args: [args], [{"a": 1}]),
        (_two, ["why", {"a": 1}]),
        (lambda x, y=None: [x, y], ["why", {"a": 1}]),
        (lambda: "alone", "alone"),
        (lambda *given: list(given), ["why", {"a": 1}]),
        (lambda *, more=5: more, 5),
        (Bound().method, ["why", {"a": 1}]),
        (Bound(), 1),
        (functools.partial(_two, "given"), ["given", {"a": 1}]),
    ],
    ids=["reason", "other name", "args", "both", "defaulted", "none", "star", "keyword-only",
         "method", "object", "partial"],
)  # fmt: skip
def test_a_task_gets_what_it_takes(task: Callable[..., Any], expected: Any) -> None:
    stored = result(task)
    assert stored == {"result": expected}


@pytest.mark.parametrize("value", [None, 3, "text", [1, {"a": 2}], True])
def test_what_is_no_dict_is_stored_as_result(value: Any) -> None:
    assert result(lambda: value) == {"result": value}


def test_a_dict_is_stored_as_it_is() -> None:
    assert result(lambda: {"result": 1, "rows": [2]}) == {"result": 1, "rows": [2]}


def test_an_unknown_task_fails_and_says_what_to_do() -> None:
    job = claimed(task_name="nobody")
    assert ingest_executor.execute_ingest_job(job) == "failed"
    row = now(job)
    assert row["status"] == "failed"
    assert "'nobody'" in row["error"]
    assert "register_ingest_task" in row["error"]


def _raises() -> Any:
    raise RuntimeError("source is down")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (_raises, "RuntimeError: source is down"),
        (lambda: sys.exit(4), "sys.exit(4)"),
        (lambda: {"x": float("nan")}, "result of task 't'"),
        (lambda: {1, 2}, "result of task 't'"),
        (lambda: "a\0b", "NUL"),
    ],
    ids=["error", "exit", "nan", "set", "nul"],
)
def test_a_failure_is_stored_and_nobody_holds_the_job(task: Any, reason: str) -> None:
    job = claimed(task)
    assert ingest_executor.execute_ingest_job(job) == "failed"
    row = now(job)
    assert (row["status"], row["attempts"], row["worker_id"]) == ("failed", 1, None)
    assert (row["lease_expires_at"], row["available_at"]) == (None, None)
    assert reason in row["error"]


def test_attempts_that_are_left_bring_it_back_later_and_later() -> None:
    job = claimed(_raises, max_attempts=3)
    waits: list[float] = []
    for attempt in (1, 2):
        assert ingest_executor.execute_ingest_job(job) == "failed"
        row = now(job)
        assert (row["status"], row["attempts"], row["worker_id"]) == ("queued", attempt, None)
        assert node_queue.claim_next_ingest_job("fetch") is None
        with database.connection() as conn:
            waits.append(
                factories.one(
                    conn,
                    "SELECT extract(epoch FROM available_at - now())::float FROM ingest_jobs",
                )
            )
            conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 second'")
        job = claim()
        assert job["claim_no"] == attempt + 1
    assert waits == [pytest.approx(30, abs=8), pytest.approx(60, abs=15)]
    assert waits[1] > waits[0]
    assert ingest_executor.execute_ingest_job(job) == "failed"
    row = now(job)
    assert (row["status"], row["attempts"], row["available_at"]) == ("failed", 3, None)


def test_a_retry_that_succeeds_leaves_no_error() -> None:
    job = claimed(_raises, max_attempts=2)
    ingest_executor.execute_ingest_job(job)
    with database.connection() as conn:
        conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 second'")
    queue_workflows.register_ingest_task("t", lambda: {"rows": 1})
    assert ingest_executor.execute_ingest_job(claim()) == "completed"
    row = now(job)
    assert (row["status"], row["error"], row["result"]) == ("completed", None, {"rows": 1})


@pytest.mark.parametrize("task", [lambda: {"late": 1}, _raises], ids=["success", "failure"])
def test_a_lost_claim_writes_nothing(task: Any) -> None:
    job = claimed(task)
    with database.connection() as conn:
        factories.expire(conn, job)
    node_queue.reclaim_expired_ingest_leases()
    newer = claim()
    before = now(job)
    assert ingest_executor.execute_ingest_job(job) == "skipped"
    assert now(job) == before
    assert (before["status"], newer["claim_no"]) == ("running", job["claim_no"] + 1)
