"""Public functions raise an engine error for a value that the database's range checks refuse."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    config,
    db,
    errors,
    jobs,
    node_queue,
    queues,
    run_store,
    runs,
    scheduler,
    workers,
)
from tests.support import connections, constants, factories, flow, rows_before_checks

LATE = datetime.datetime(9999, 12, 31, 12, tzinfo=datetime.timezone.utc)
"""Python holds it, and the database takes no time after the first instant of that day."""
BIG = 10**400


@pytest.fixture
def conn(conn: db.Connection) -> db.Connection:
    config.configure(ingest_queues={"fetch"})
    queue_workflows.register_ingest_task("t", lambda **_: None)
    return conn


def in_loop(work: Callable[..., Any], **given: Any) -> Any:
    return asyncio.run(work(**given))


JOB = {"task_name": "t", "queue": "fetch"}
BIG_NUMBERS: dict[str, Callable[[], Any]] = {
    "args": lambda: jobs.enqueue(**JOB, args={"n": BIG}),
    "args of several": lambda: jobs.enqueue_many(**JOB, args=[{}, {"n": -BIG}]),
    "args of jobs": lambda: jobs.enqueue_many([{**JOB, "args": {"n": [BIG]}}]),
    "async": lambda: in_loop(jobs.enqueue_async, **JOB, args={"n": BIG}),
    "context": lambda: run_store.insert_run(workflow_name="w", context={"n": BIG}),
    "update": lambda: run_store.update_run("r", context={"n": BIG}),
    "answer": lambda: runs.answer("r", "q", BIG),
    "inputs": lambda: node_queue.enqueue_node_job(
        run_id="r", node_id="a", node_module="m", queue="cpu", inputs={"n": BIG}
    ),
}


@pytest.mark.parametrize("call", BIG_NUMBERS.values(), ids=BIG_NUMBERS)
def test_a_number_that_the_database_refuses_is_refused_before_any_write(
    conn: db.Connection, call: Callable[[], Any]
) -> None:
    factories.run(conn, id="r")
    with pytest.raises(errors.InvalidPayload, match=r"e308; store it as a text"):
        call()
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0


def test_a_number_at_the_bound_is_stored(conn: db.Connection) -> None:
    largest = 17976931348623157 * 10**292
    args = {"n": [largest, -largest, 1.7976931348623157e308]}
    job_id = jobs.enqueue(**JOB, args=args)
    stored = factories.reread(conn, {"id": job_id})["args"]["n"]
    assert stored == [largest, -largest, largest], "jsonb keeps all digits of a float's text"


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "job": (
        lambda: jobs.enqueue(**JOB, available_at=LATE),
        errors.InvalidJob,
        "ingest_jobs.available_at must be in the years 2000 to 9999",
    ),
    "jobs": (
        lambda: jobs.enqueue_many([{**JOB, "available_at": LATE}]),
        errors.InvalidJob,
        "ingest_jobs.available_at must be",
    ),
    "reason": (
        lambda: jobs.enqueue(**JOB, reason="x" * 9000),
        errors.InvalidJob,
        "ingest_jobs.reason must be at most 8000 bytes",
    ),
    "async": (
        lambda: in_loop(jobs.enqueue_async, **JOB, available_at=LATE),
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
    "priority of a run": (
        lambda: run_store.insert_run(workflow_name="w", priority=10**9),
        errors.InvalidConfig,
        r"workflow_runs: smallint out of range \(priority=1000000000\)",
    ),
    "update of a priority": (
        lambda: run_store.update_run("r", priority=10**9),
        errors.InvalidConfig,
        r"workflow_runs: smallint out of range \(priority=1000000000\)",
    ),
    "update of a number by a word": (
        lambda: run_store.update_run("r", resume_count="many"),
        errors.InvalidConfig,
        'workflow_runs: invalid input syntax for type smallint: "many"',
    ),
    "update of a number by a boolean": (
        lambda: run_store.update_run("r", priority=True),
        errors.InvalidConfig,
        r"workflow_runs: cannot cast type boolean to smallint \(priority=True\)",
    ),
    "update of a time": (
        lambda: run_store.update_run("r", finished_at="some day"),
        errors.InvalidConfig,
        'workflow_runs: invalid input syntax for type timestamp with time zone: "some day"',
    ),
    "update of a share": (
        lambda: run_store.update_run("r", progress_pct=1e39),
        errors.InvalidConfig,
        "workflow_runs: value out of range: overflow",
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
        lambda: workers.set_control("box", "cpu", desired_state="off", until=LATE),
        errors.InvalidConfig,
        "queue_workflows_time",
    ),
}


def test_an_error_of_a_trigger_of_the_app_passes_through(conn: db.Connection) -> None:
    """Its text is about the app's own rule, not about a value of the caller."""
    conn.execute(
        "CREATE FUNCTION of_the_app() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'the app says no' USING ERRCODE = '22003'; END $$"
    )
    conn.execute(
        "CREATE TRIGGER of_the_app BEFORE UPDATE ON workflow_runs"
        " FOR EACH ROW EXECUTE FUNCTION of_the_app()"
    )
    try:
        factories.run(conn, id="r")
        with pytest.raises(psycopg.errors.NumericValueOutOfRange, match="the app says no"):
            run_store.update_run("r", priority=1)
    finally:
        conn.execute("DROP FUNCTION of_the_app() CASCADE")


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_the_database_is_an_error_of_the_library(
    conn: db.Connection, name: str
) -> None:
    call, kind, words = REFUSED[name]
    factories.run(conn, id="r")
    with pytest.raises(kind, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
    kinds = (psycopg.errors.CheckViolation, psycopg.errors.DataError, psycopg.errors.CannotCoerce)
    assert isinstance(refused.value.__cause__, kinds)


def test_a_deep_answer_is_refused_by_the_database_too(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "dag.payload.MAX_DEPTH", 500)
    value: Any = 1
    for _ in range(300):
        value = [value]
    with pytest.raises(errors.InvalidPayload, match=r"context is nested deeper than 128 levels\."):
        run_store.insert_run(workflow_name="w", context={"n": value})


@pytest.mark.parametrize("kind", connections.KINDS)
def test_a_refusal_is_known_through_the_apps_connection(
    conn: db.Connection, kind: str, dsn: str
) -> None:
    for call, error in (
        (jobs.enqueue, errors.InvalidJob),
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
    conn: db.Connection, kind: str, dsn: str
) -> None:
    async def work() -> None:
        for call, error, given in (
            (jobs.enqueue_async, errors.InvalidJob, JOB | {"available_at": LATE}),
            (
                runs.submit_async,
                errors.InvalidConfig,
                {"workflow_name": "w", "out_dir": "/" + "x" * 5000},
            ),
        ):
            async with connections.ASYNC_KINDS[kind](dsn) as host:
                with pytest.raises(error, match=r"^\w+\.\w+ must be [^\n]*$"):
                    await call(**given, conn=host.conn)
                await host.rollback()

    asyncio.run(work())


def test_an_apps_own_refusal_passes_through(conn: db.Connection) -> None:
    conn.execute("ALTER TABLE ingest_jobs ADD CONSTRAINT app_check CHECK (reason <> 'no')")
    try:
        with pytest.raises(psycopg.errors.CheckViolation, match="app_check"):
            jobs.enqueue(**JOB, reason="no")
    finally:
        conn.execute("ALTER TABLE ingest_jobs DROP CONSTRAINT app_check")


LAST = 2**31 - 1


@pytest.mark.parametrize("generation", [999_999, 1_000_000, LAST])
def test_a_run_in_its_last_generation_is_not_retried(conn: db.Connection, generation: int) -> None:
    flows = flow.Flow()
    try:
        flows.dag(a="")
        run_id = flows.started()
        runs.cancel(run_id)
        rows_before_checks.change(conn, "workflow_runs", run_id, generation=str(generation))
        for node in (None, "s/a"):
            with pytest.raises(errors.InvalidConfig, match=f"in generation {generation}, the last"):
                runs.retry(run_id, from_node=node)
        (job,) = flow.jobs(run_id).values()
        with pytest.raises(errors.InvalidConfig, match="submit it again as a new run"):
            jobs.retry(job["id"])
    finally:
        flows.close()


@pytest.mark.parametrize("generation", [1_000_000, LAST])
def test_a_job_in_its_last_generation_is_not_retried_and_stops_no_other(
    conn: db.Connection, generation: int
) -> None:
    for each in ("bad", "good"):
        factories.ingest(conn, id=each)
        jobs.cancel(each)
    rows_before_checks.change(conn, "ingest_jobs", "bad", generation=str(generation))
    done = {one["id"]: one for one in jobs.retry_many(["bad", "good"])}
    assert (done["bad"]["outcome"], done["good"]["outcome"]) == ("refused", "queued")
    assert "last generation" in done["bad"]["reason"]
    with pytest.raises(errors.InvalidConfig, match="in its last generation: queue a new job"):
        jobs.retry("bad")


@pytest.mark.parametrize("count", [32767, -32768])
def test_a_run_that_was_resumed_as_often_as_can_be_counted_resumes(
    conn: db.Connection, count: int
) -> None:
    for each in ("bad", "good"):
        factories.run(conn, id=each, mode="node")
    rows_before_checks.change(conn, "workflow_runs", "bad", resume_count=str(count))
    assert run_store.reenqueue_running_for_resume() == 2
