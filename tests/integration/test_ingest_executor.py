"""Running one ingest job: the arguments of the task, and how its result is stored."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import config, db, ingest_executor, jobs, node_queue
from tests.support import factories, rows_before_checks, tabled, transitions

Row = dict[str, Any]
ARGS = {"scenario": 7}
pytestmark = pytest.mark.usefixtures("invariants_hold")


def claimed(task: Callable[..., Any], **columns: Any) -> Row:
    """A job of this task under a claim of this process."""
    queue_workflows.register_ingest_task("t", task)
    given = {"reason": "boot", "args": ARGS} | columns
    jobs.enqueue(task_name="t", queue="fetch", **given)
    row = node_queue.claim_next_ingest_job("fetch", host="box")
    assert row is not None
    return row


def after(job: Row) -> Row:
    found = node_queue.get_ingest_job(job["id"])
    assert found is not None
    return found


def run(task: Callable[..., Any], **columns: Any) -> Row:
    """The job's row after its task has run."""
    job = claimed(task, **columns)
    ingest_executor.execute_ingest_job(job)
    return after(job)


def _reason(reason: str) -> Row:
    return {"got": [reason]}


def _anything(why: str) -> Row:
    return {"got": [why]}


def _both(reason: str, args: Row) -> Row:
    return {"got": [reason, args]}


def _named_otherwise(why: str, what: Row | None = None) -> Row:
    return {"got": [why, what]}


def _args(args: Row) -> Row:
    return {"got": [args]}


def _rest(*given: Any) -> Row:
    return {"got": list(given)}


def _nothing() -> Row:
    return {"got": []}


class _Method:
    def task(self, reason: str, args: Row) -> Row:
        return {"got": [reason, args]}


class _Callable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, reason: str) -> Row:
        return {"got": [reason]}


def test_a_task_is_given_the_reason_and_the_args_that_it_takes() -> None:
    cases: list[Any] = [
        (_reason, ["boot"]),
        (_anything, ["boot"]),
        (_both, ["boot", ARGS]),
        (_named_otherwise, ["boot", ARGS]),
        (_args, [ARGS]),
        (_rest, ["boot", ARGS]),
        (_nothing, []),
        (_Method().task, ["boot", ARGS]),
        (_Callable(), ["boot"]),
        (partial(_both, "bound"), [ARGS]),
    ]
    for task, got in cases:
        with tabled.case(task, got):
            if isinstance(task, partial):
                got = ["bound", *got]
            row = run(task)
            assert (row["status"], row["error"], row["result"]) == ("completed", None, {"got": got})


def test_a_job_by_plain_sql_has_empty_args() -> None:
    queue_workflows.register_ingest_task("t", _both)
    with db.connect() as conn:
        factories.ingest(conn)
    job = node_queue.claim_next_ingest_job("fetch", host="box")
    assert job is not None
    ingest_executor.execute_ingest_job(job)
    assert after(job)["result"] == {"got": ["tick", {}]}


def by_sql(task: Callable[..., Any], args: Any, reason: str = "boot") -> Row:
    """The job's row after its task has run with what a plain SQL INSERT stored."""
    queue_workflows.register_ingest_task("t", task)
    with db.connect() as conn:
        factories.ingest(conn, reason=reason, args=Jsonb(args))
    job = node_queue.claim_next_ingest_job("fetch", host="box")
    assert job is not None
    ingest_executor.execute_ingest_job(job)
    return after(job)


def test_args_that_are_no_object_reach_the_task() -> None:
    for task in (_both, _rest, _Method().task):
        for args in ([1, 2], "text", 5, 0, True, None, []):
            with tabled.case(args, task):
                row = by_sql(task, args)
                assert (row["error"], row["result"]) == (None, {"got": ["boot", args]})


def test_a_task_can_read_args_that_are_no_object() -> None:
    def body() -> Row:
        job = queue_workflows.current_job()
        return {"got": job.args}

    assert by_sql(body, [1, 2])["result"] == {"got": [1, 2]}


def _keywords(*, n: int = 1) -> Row:
    return {"got": n}


@dataclasses.dataclass
class _Record:
    n: int


def _record(args: _Record) -> Row:
    return {"got": args.n}


def test_a_task_that_takes_a_model_or_keywords_refuses_what_is_no_object() -> None:
    for args in ([1, 2], "text", 5):
        for task in (_keywords, _record):
            with tabled.case(task, args):
                row = by_sql(task, args)
                assert (row["status"], row["result"]) == ("failed", None)
                assert "args of task 't'" in row["error"]
                assert type(args).__name__ in row["error"] or repr(args) in row["error"]


def test_a_job_without_a_reason_is_called_with_tick() -> None:
    def body(reason: str) -> Row:
        return {"got": [reason, queue_workflows.current_job().reason]}

    assert by_sql(body, {}, reason="")["result"] == {"got": ["tick", "tick"]}
    assert by_sql(body, {}, reason=" ")["result"] == {"got": [" ", " "]}
    assert by_sql(_both, {}, reason="")["result"] == {"got": ["tick", {}]}


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        (None, {"result": None}),
        (5, {"result": 5}),
        ("text", {"result": "text"}),
        ([1, 2], {"result": [1, 2]}),
    ],
    ids=repr,
)
def test_a_result_that_is_no_dict_is_stored_as_one(value: Any, result: Row) -> None:
    row = run(lambda reason: value)
    assert (row["status"], row["result"]) == ("completed", result)
    assert row["seconds"] >= 0


@pytest.mark.parametrize(
    "value",
    [{"a": "\x00"}, {"a": math.nan}, {1, 2}, "\ud800", {1: 2}, b"x", "x" * 1_100_000],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_cannot_be_stored_fails_the_job_with_the_reason(value: Any) -> None:
    row = run(lambda reason: value)
    assert row["status"] == "failed"
    assert row["error"].startswith("InvalidPayload: result of task 't'")


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError("a\x00b"), "ValueError: a\ufffdb"),
        (SystemExit(1), "the handler called sys.exit(1)"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
    ids=repr,
)
def test_whatever_a_task_raises_fails_its_job(raised: BaseException, error: str) -> None:
    def task(reason: str) -> None:
        raise raised

    row = run(task)
    assert (row["status"], row["error"]) == ("failed", error)
    with db.connect() as conn:
        detail = factories.one(
            conn, "SELECT detail FROM ingest_job_events WHERE event_type = 'failed'"
        )
    assert "in task" in detail["traceback"]


def test_ctrl_c_is_the_operators_and_not_the_tasks() -> None:
    def task(reason: str) -> None:
        raise KeyboardInterrupt

    job = claimed(task)
    with pytest.raises(KeyboardInterrupt):
        ingest_executor.execute_ingest_job(job)
    assert after(job)["status"] == "running"


def test_a_task_that_this_worker_does_not_know_fails_its_job_and_is_named() -> None:
    job = claimed(_reason)
    config.get_config().ingest_task_map.clear()
    assert ingest_executor.execute_ingest_job(job) == "failed"
    assert "knows no ingest task 't'" in after(job)["error"]


def test_a_failed_job_is_queued_again_while_attempts_are_left() -> None:
    def task(reason: str) -> None:
        raise ValueError("no")

    queue_workflows.register_ingest_task("t", task)
    with db.connect() as conn:
        made = factories.ingest(conn, max_attempts=2)
        job = node_queue.claim_next_ingest_job("fetch", host="box")
        assert job is not None
        assert ingest_executor.execute_ingest_job(job) == "failed"
        row = after(job)
        assert (row["status"], row["attempts"], row["blocked_reason"]) == ("queued", 1, "not_due")
        conn.execute("UPDATE ingest_jobs SET available_at = now() WHERE id = %s", (made["id"],))
    again = node_queue.claim_next_ingest_job("fetch", host="box")
    assert again is not None
    assert ingest_executor.execute_ingest_job(again) == "failed"
    assert (after(job)["status"], after(job)["attempts"]) == ("failed", 2)


@pytest.mark.parametrize("value", [{"a": 1}, {1: 1}], ids=["success", "failure"])
def test_a_lost_claim_writes_nothing(value: Any) -> None:
    job = claimed(lambda reason: value)
    with db.connect() as conn:
        transitions.expire(conn, job)
    node_queue.reclaim_expired_ingest_leases()
    assert ingest_executor.execute_ingest_job(job) == "skipped"
    row = after(job)
    assert (row["status"], row["result"], row["error"]) == ("queued", None, None)


@pytest.mark.parametrize("policy", ["5", "true", '{"backoff": 1%s}' % ("0" * 400)])
def test_a_policy_that_sql_got_wrong_fails_the_job_by_the_default_one(
    policy: str, db: ModuleType
) -> None:
    def raises() -> None:
        raise KeyError("x")

    job = claimed(raises)
    with db.connect() as conn:
        rows_before_checks.change(
            conn,
            "ingest_jobs",
            job["id"],
            policy=rows_before_checks.quoted(policy),
            max_attempts="2",
        )
    ingest_executor.execute_ingest_job(job)
    row = after(job)
    assert (row["status"], row["attempts"], row["blocked_reason"]) == ("queued", 1, "not_due")
