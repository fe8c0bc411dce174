"""A range check of the database reaches callers of public functions as an error of ours."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    config,
    dispatcher,
    errors,
    jobs,
    node_queue,
    queues,
    run_store,
    scheduler,
    worker_control,
)
from queue_workflows import db as engine
from tests.support import connections, factories, flow, rows_before_checks

LATE = datetime.datetime(9999, 12, 31, 12, tzinfo=datetime.timezone.utc)
"""Python holds it, and the database takes no time after the first instant of that day."""
BIG = 10**400


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    config.configure(ingest_queues={"fetch"})
    queue_workflows.register_ingest_task("t", lambda **_: None)
    with db.connect() as own:
        yield own


def in_loop(work: Callable[..., Any], **given: Any) -> Any:
    return asyncio.run(work(**given))


JOB = {"task_name": "t", "queue": "fetch"}
BIG_NUMBERS: dict[str, Callable[[], Any]] = {
    "args": lambda: node_queue.enqueue_ingest_job(**JOB, args={"n": BIG}),
    "args of several": lambda: node_queue.enqueue_ingest_jobs(**JOB, args=[{}, {"n": -BIG}]),
    "args of jobs": lambda: node_queue.enqueue_ingest_jobs([{**JOB, "args": {"n": [BIG]}}]),
    "async": lambda: in_loop(node_queue.enqueue_ingest_job_async, **JOB, args={"n": BIG}),
    "context": lambda: run_store.insert_run(workflow_name="w", context={"n": BIG}),
    "update": lambda: run_store.update_run("r", context={"n": BIG}),
    "answer": lambda: dispatcher.submit_input("r", "q", BIG),
    "inputs": lambda: node_queue.enqueue_node_job(
        run_id="r", node_id="a", node_module="m", queue="cpu", inputs={"n": BIG}
    ),
}


@pytest.mark.parametrize("call", BIG_NUMBERS.values(), ids=BIG_NUMBERS)
def test_a_number_that_the_database_refuses_is_refused_before_any_write(
    conn: engine.Connection, call: Callable[[], Any]
) -> None:
    factories.run(conn, id="r")
    with pytest.raises(errors.InvalidPayload, match=r"e308; store it as a text"):
        call()
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0


def test_a_number_at_the_bound_is_stored(conn: engine.Connection) -> None:
    largest = 17976931348623157 * 10**292
    args = {"n": [largest, -largest, 1.7976931348623157e308]}
    job_id = node_queue.enqueue_ingest_job(**JOB, args=args)
    stored = factories.reread(conn, {"id": job_id})["args"]["n"]
    assert stored == [largest, -largest, largest], "jsonb keeps all digits of a float's text"


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "job": (
        lambda: node_queue.enqueue_ingest_job(**JOB, available_at=LATE),
        errors.InvalidJob,
        "ingest_jobs.available_at must be in the years 2000 to 9999",
    ),
    "jobs": (
        lambda: node_queue.enqueue_ingest_jobs([{**JOB, "available_at": LATE}]),
        errors.InvalidJob,
        "ingest_jobs.available_at must be",
    ),
    "reason": (
        lambda: node_queue.enqueue_ingest_job(**JOB, reason="x" * 9000),
        errors.InvalidJob,
        "ingest_jobs.reason must be at most 8000 bytes",
    ),
    "async": (
        lambda: in_loop(node_queue.enqueue_ingest_job_async, **JOB, available_at=LATE),
        errors.InvalidJob,
        "ingest_jobs.available_at must be",
    ),
    "run": (
        lambda: run_store.insert_run(workflow_name="w", out_dir="/" + "x" * 5000),
        errors.InvalidConfig,
        "workflow_runs.out_dir must be at most 4096 bytes",
    ),
    "update": (
        lambda: run_store.update_run("r", finished_at=LATE),
        errors.InvalidConfig,
        "workflow_runs.finished_at must be",
    ),
    "schedule": (
        lambda: scheduler.enqueue_due(
            [scheduler.ScheduleEntry("e", 5, "t", "fetch")], reason="x" * 9000
        ),
        errors.InvalidJob,
        "ingest_jobs.reason must be at most 8000 bytes",
    ),
    "pause": (
        lambda: queues.pause("fetch", until=LATE),
        errors.InvalidConfig,
        "queue_workflows_time",
    ),
    "control": (
        lambda: worker_control.set_worker_control(
            host="box", queue="cpu", desired_state="off", until=LATE
        ),
        errors.InvalidConfig,
        "queue_workflows_time",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_the_database_is_an_error_of_the_library(
    conn: engine.Connection, name: str
) -> None:
    call, kind, words = REFUSED[name]
    factories.run(conn, id="r")
    with pytest.raises(kind, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, psycopg.errors.CheckViolation)


def test_a_deep_answer_is_refused_by_the_database_too(
    conn: engine.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_DEPTH", "500")
    value: Any = 1
    for _ in range(300):
        value = [value]
    with pytest.raises(errors.InvalidPayload, match=r"context is nested deeper than 128 levels\."):
        run_store.insert_run(workflow_name="w", context={"n": value})


@pytest.mark.parametrize("kind", connections.KINDS)
def test_a_refusal_is_known_through_the_apps_connection(
    conn: engine.Connection, kind: str, dsn: str
) -> None:
    for call, error in (
        (node_queue.enqueue_ingest_job, errors.InvalidJob),
        (run_store.insert_run, errors.InvalidConfig),
    ):
        given = (
            {**JOB, "available_at": LATE}
            if error is errors.InvalidJob
            else {"workflow_name": "w", "out_dir": "/" + "x" * 5000}
        )
        with connections.KINDS[kind](dsn) as host:
            with pytest.raises(error, match=r"^\w+\.\w+ must be [^\n]*$"):
                call(**given, conn=host.conn)
            host.rollback()


@pytest.mark.parametrize("kind", connections.ASYNC_KINDS)
def test_a_refusal_is_known_through_the_apps_asynchronous_connection(
    conn: engine.Connection, kind: str, dsn: str
) -> None:
    async def work() -> None:
        for call, error, given in (
            (node_queue.enqueue_ingest_job_async, errors.InvalidJob, JOB | {"available_at": LATE}),
            (
                run_store.insert_run_async,
                errors.InvalidConfig,
                {"workflow_name": "w", "out_dir": "/" + "x" * 5000},
            ),
        ):
            async with connections.ASYNC_KINDS[kind](dsn) as host:
                with pytest.raises(error, match=r"^\w+\.\w+ must be [^\n]*$"):
                    await call(**given, conn=host.conn)
                await host.rollback()

    asyncio.run(work())


def test_an_apps_own_refusal_passes_through(conn: engine.Connection) -> None:
    conn.execute("ALTER TABLE ingest_jobs ADD CONSTRAINT app_check CHECK (reason <> 'no')")
    try:
        with pytest.raises(psycopg.errors.CheckViolation, match="app_check"):
            node_queue.enqueue_ingest_job(**JOB, reason="no")
    finally:
        conn.execute("ALTER TABLE ingest_jobs DROP CONSTRAINT app_check")


LAST = 2**31 - 1


@pytest.mark.parametrize("generation", [999_999, 1_000_000, LAST])
def test_a_run_in_its_last_generation_is_not_retried(
    conn: engine.Connection, generation: int
) -> None:
    flows = flow.Flow()
    try:
        flows.dag(a="")
        run_id = flows.started()
        dispatcher.cancel_run(run_id)
        rows_before_checks.change(conn, "workflow_runs", run_id, generation=str(generation))
        for node in (None, "s/a"):
            with pytest.raises(errors.InvalidConfig, match=f"in generation {generation}, the last"):
                dispatcher.retry_run(run_id, from_node=node)
        (job,) = flow.jobs(run_id).values()
        with pytest.raises(errors.InvalidConfig, match="submit it again as a new run"):
            dispatcher.retry_job(job["id"])
    finally:
        flows.close()


@pytest.mark.parametrize("generation", [1_000_000, LAST])
def test_a_job_in_its_last_generation_is_not_retried_and_stops_no_other(
    conn: engine.Connection, generation: int
) -> None:
    for each in ("bad", "good"):
        factories.ingest(conn, id=each)
        dispatcher.cancel_job(each)
    rows_before_checks.change(conn, "ingest_jobs", "bad", generation=str(generation))
    done = {one["id"]: one for one in jobs.retry_jobs(["bad", "good"])}
    assert (done["bad"]["outcome"], done["good"]["outcome"]) == ("refused", "queued")
    assert "last generation" in done["bad"]["reason"]
    with pytest.raises(errors.UnknownJob, match="with a generation to go"):
        dispatcher.retry_job("bad")


@pytest.mark.parametrize("count", [32767, -32768])
def test_a_run_that_was_resumed_as_often_as_can_be_counted_resumes(
    conn: engine.Connection, count: int
) -> None:
    for each in ("bad", "good"):
        factories.run(conn, id=each, mode="node")
    rows_before_checks.change(conn, "workflow_runs", "bad", resume_count=str(count))
    assert run_store.reenqueue_running_for_resume() == 2
