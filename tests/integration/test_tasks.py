"""Tasks of every kind in a worker: progress, cancel, stop, context and result."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import queue_workflows
from queue_workflows import claim_worker, db, errors, ingest_executor, node_queue
from queue_workflows import jobs as jobs_api
from tests.support import constants, factories, task_app
from tests.support.batch_worker import events
from tests.support.commands import Commands
from tests.support.wait import until
from tests.support.worker_views import row

Row = dict[str, Any]
NAMES = pytest.mark.parametrize("kind", task_app.ENDS_BY_ITSELF)
UNWIND_S = "worker.desk.UNWIND_S"
"""How long before the end of the shutdown timeout, 60 s, a handler is interrupted: at once."""
BATCHES = pytest.mark.parametrize("batch", [1, 3], ids=["one by one", "in batches"])


pytestmark = pytest.mark.usefixtures("invariants_hold")


@pytest.fixture(autouse=True)
def app(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "worker.leases.PROGRESS_S", 0.1)
    task_app.setup()


def queued(task: str, **args: Any) -> str:
    return jobs_api.enqueue(task_name=task, queue=task_app.QUEUE, args=args)


def is_now(job_id: str, status: str) -> Callable[[], bool]:
    return lambda: row(job_id)["status"] == status


@contextmanager
def working(folder: Path, **more: Any) -> Generator[claim_worker.ClaimWorker]:
    """A worker; at the end all handlers may end."""
    subject = claim_worker.ClaimWorker(queue=task_app.QUEUE, host="box", **more)
    thread = threading.Thread(target=subject.run_forever, name="test-worker")
    thread.start()
    try:
        yield subject
    finally:
        (folder / "go").touch()
        subject.stop()
        thread.join(30)
        assert not thread.is_alive()


# --- in a worker ------------------------------------------------------------------------------


@BATCHES
def test_each_kind_leaves_its_result(conn: db.Connection, tmp_path: Path, batch: int) -> None:
    (tmp_path / "go").touch()
    ids = [queued(kind, folder=str(tmp_path)) for kind in task_app.KINDS]
    with working(tmp_path, batch=batch):
        until(lambda: all(row(job_id)["status"] == "completed" for job_id in ids))
    assert [row(job_id)["result"] for job_id in ids] == [{"kind": kind} for kind in task_app.KINDS]


@NAMES
@BATCHES
def test_a_cancel_ends_a_handler_that_yields_or_awaits_and_the_worker_goes_on(
    conn: db.Connection, tmp_path: Path, batch: int, kind: str
) -> None:
    codes: list[int] = []
    first, after = queued(kind, folder=str(tmp_path)), queued("function", folder=str(tmp_path))
    with working(tmp_path, batch=batch, on_exit=codes.append):
        until(lambda: f"{kind} begins" in task_app.lines(tmp_path))
        until(lambda: row(first)["progress"] == "at work")
        jobs_api.cancel(first)
        until(is_now(first, "cancelled"))
        assert task_app.lines(tmp_path)[:2] == [f"{kind} begins", f"{kind} tidies"]
        (tmp_path / "go").touch()
        until(is_now(after, "completed"))
    assert (codes, row(first)["result"], row(first)["attempts"]) == ([], None, 0)
    assert events(conn, first) == ["claimed", "cancel_requested", "cancelled"]


@NAMES
def test_a_stop_ends_a_handler_in_good_order_and_hands_the_job_back(
    conn: db.Connection, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    job_id = queued(kind, folder=str(tmp_path))
    constants.put(monkeypatch, UNWIND_S, 59.9)
    with working(tmp_path, on_exit=codes.append, shutdown_timeout_s=60) as subject:
        until(lambda: f"{kind} begins" in task_app.lines(tmp_path))
        subject.stop()
        until(lambda: f"{kind} tidies" in task_app.lines(tmp_path))
        until(is_now(job_id, "queued"))
    found = row(job_id)
    assert (codes, found["attempts"], found["crash_count"], found["result"]) == ([], 0, 0, None)
    assert events(conn, job_id) == ["claimed", "requeued"]
    why = "SELECT detail FROM ingest_job_events WHERE event_type = 'requeued'"
    assert factories.one(conn, why) == {"reason": "shutdown"}


@pytest.mark.parametrize("kind", ["generator", "async"])
def test_a_handler_that_neither_yields_nor_awaits_is_stopped_after_its_grace(
    conn: db.Connection, tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CANCEL_GRACE_S", "0.2")
    begun, release = threading.Event(), threading.Event()
    codes: list[int] = []

    def generator() -> Generator[None]:
        begun.set()
        assert release.wait(60)
        yield

    async def blocking() -> None:
        begun.set()
        assert release.wait(60)

    def leave(code: int) -> None:
        codes.append(code)
        release.set()

    task = generator if kind == "generator" else blocking
    queue_workflows.register_ingest_task("stuck", task)
    job_id = queued("stuck")
    try:
        with working(tmp_path, on_exit=leave):
            assert begun.wait(30)
            jobs_api.cancel(job_id)
            until(lambda: codes)
    finally:
        release.set()
    assert (codes[0], row(job_id)["status"]) == (79, "cancelled")


def test_a_function_that_sees_its_cancel_leaves_no_result(
    conn: db.Connection, tmp_path: Path
) -> None:
    begun = threading.Event()

    def task() -> Row:
        begun.set()
        until(lambda: queue_workflows.current_job().cancel_requested, timeout_s=30)
        return {"half": "done"}

    queue_workflows.register_ingest_task("sees", task)
    job_id = queued("sees")
    with working(tmp_path):
        assert begun.wait(30)
        jobs_api.cancel(job_id)
        until(is_now(job_id, "cancelled"))
    assert (row(job_id)["result"], row(job_id)["attempts"]) == (None, 0)


def test_real_workers_end_each_kind_at_a_cancel_and_at_sigterm(
    cli: Commands, tmp_path: Path
) -> None:
    kinds = task_app.ENDS_BY_ITSELF
    subject = cli.start(
        *("queue-claim-worker", "--queue", task_app.QUEUE, "--shutdown-timeout", "60"),
        *("--app", "tests.support.task_app:setup"),
        **constants.env({UNWIND_S: 59.9}),
    )
    for kind in kinds:
        job_id = queued(kind, folder=str(tmp_path))
        until(lambda kind=kind: f"{kind} begins" in task_app.lines(tmp_path), timeout_s=30)
        jobs_api.cancel(job_id)
        until(is_now(job_id, "cancelled"))
    job_id = queued("async_generator", folder=str(tmp_path))
    until(lambda: task_app.lines(tmp_path).count("async_generator begins") == 2)
    subject.send(signal.SIGTERM)
    assert subject.wait() == 0, subject.err
    received = [
        f"{kind} {does}" for kind in [*kinds, "async_generator"] for does in ("begins", "tidies")
    ]
    assert task_app.lines(tmp_path) == received
    assert (row(job_id)["status"], row(job_id)["crash_count"]) == ("queued", 0)


# --- what a handler receives ----------------------------------------------------------------------


def test_a_handler_of_any_kind_knows_its_job(conn: db.Connection) -> None:
    received: list[tuple[Any, ...]] = []

    def tell() -> None:
        job = queue_workflows.current_job()
        received.append(
            (job.id, job.task_name, job.queue, job.reason, job.args, job.attempt, job.headers,
             job.lock_key, job.partition_key, job.cancel_requested, job.claim, job.worker,
             job.idempotency_key, job.run_id, job.node_id)
        )  # fmt: skip

    def function() -> None:
        tell()

    def generator() -> Generator[None]:
        yield
        tell()

    async def coroutine() -> None:
        await asyncio.to_thread(tell)

    async def async_generator() -> AsyncGenerator[None, None]:
        yield
        await asyncio.create_task(asyncio.to_thread(tell))

    for task in (function, generator, coroutine, async_generator):
        queue_workflows.register_ingest_task("t", task)
        made = factories.ingest(
            conn, queue=task_app.QUEUE, reason="boot", args={"a": 1}, headers={"trace": "x"},
            lock_key="lock", partition_key="p", attempts=1, max_attempts=3,
        )  # fmt: skip
        assert node_queue.claim_next_ingest_job(task_app.QUEUE) is not None
        job = row(made["id"])
        assert ingest_executor.execute_ingest_job(job) == "completed"
        assert received.pop() == (
            made["id"], "t", task_app.QUEUE, "boot", {"a": 1}, 2, {"trace": "x"},
            "lock", "p", False, 1, job["worker_id"], made["id"], None, None,
        )  # fmt: skip
    with pytest.raises(errors.NoCurrentJob, match="no job runs here"):
        queue_workflows.current_job()


def test_async_tasks_run_beside_each_other_each_with_its_own_context(
    cli: Commands, tmp_path: Path
) -> None:
    ids = [queued("named", folder=str(tmp_path)) for _ in range(3)]
    cli.start(
        *("queue-claim-worker", "--queue", task_app.QUEUE, "--slots", "3", "--async"),
        *("--app", "tests.support.task_app:setup"),
    )
    until(lambda: task_app.lines(tmp_path) == ["named begins"] * 3)
    (tmp_path / "go").touch()
    until(lambda: all(row(job_id)["status"] == "completed" for job_id in ids))
    assert [row(job_id)["result"] for job_id in ids] == [{"job": job_id} for job_id in ids]


def test_the_traceback_of_an_async_task_begins_in_it(conn: db.Connection) -> None:
    async def task() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    queue_workflows.register_ingest_task("t", task)
    job_id = queued("t")
    job = node_queue.claim_next_ingest_job(task_app.QUEUE)
    assert job is not None
    assert ingest_executor.execute_ingest_job(job) == "failed"
    query = "SELECT detail ->> 'traceback' FROM ingest_job_events WHERE event_type = 'failed'"
    trace = factories.one(conn, query)
    assert "in task" in trace.splitlines()[1]
    assert row(job_id)["error"] == "ValueError: no"


# --- policy -----------------------------------------------------------------------------------


class Flaky(Exception):
    """What a task may raise."""


def failing(error: BaseException = Flaky("no"), **policy: Any) -> None:
    def task() -> None:
        raise error

    queue_workflows.register_ingest_task("t", task, **policy)


def attempted(conn: db.Connection, made: Row) -> Row:
    """The job after another attempt, which is let have its time."""
    conn.execute("UPDATE ingest_jobs SET available_at = now() WHERE id = %s", (made["id"],))
    job = node_queue.claim_next_ingest_job(task_app.QUEUE)
    assert job is not None
    ingest_executor.execute_ingest_job(job)
    return row(made["id"])


def inserted(conn: db.Connection, **columns: Any) -> Row:
    return factories.ingest(conn, queue=task_app.QUEUE, **columns)


def waits_s(conn: db.Connection, made: Row) -> float:
    query = "SELECT extract(epoch FROM available_at - now())::float8 FROM ingest_jobs WHERE id = %s"
    return factories.one(conn, query, made["id"])


def test_a_row_without_options_is_retried_by_its_tasks_options(conn: db.Connection) -> None:
    failing(retries=2, backoff={"kind": "constant", "base_s": 500})
    made = inserted(conn)
    found = attempted(conn, made)
    assert (found["status"], found["attempts"], found["max_attempts"]) == ("queued", 1, 3)
    assert 400 < waits_s(conn, made) <= 500
    assert attempted(conn, made)["status"] == "queued"
    found = attempted(conn, made)
    assert (found["status"], found["attempts"]) == ("failed", 3)
    assert events(conn, made["id"]) == ["claimed", "retried"] * 2 + ["claimed", "failed"]


@pytest.mark.parametrize(
    ("columns", "attempts", "wait_s"),
    [
        ({"max_attempts": 2}, 2, 500),
        ({"policy": {"retries": 0}}, 1, None),
        ({"policy": {"retries": 1}}, 2, 500),
        ({"policy": {"backoff": 900}}, 6, 900),
        ({"policy": {"discard_on": ["Flaky"]}}, 1, None),
    ],
    ids=str,
)
def test_options_of_the_row_go_before_those_of_its_task(
    conn: db.Connection, columns: Row, attempts: int, wait_s: float | None
) -> None:
    failing(retries=5, backoff=500)
    made = inserted(conn, **columns)
    found = attempted(conn, made)
    if wait_s is None:
        assert (found["status"], found["attempts"]) == ("failed", 1)
        return
    assert (found["status"], found["max_attempts"]) == ("queued", attempts)
    assert wait_s - 100 < waits_s(conn, made) <= wait_s


@pytest.mark.parametrize(
    ("policy", "error", "status"),
    [
        ({"retry_on": Flaky}, Flaky(), "queued"),
        ({"retry_on": [OSError]}, Flaky(), "failed"),
        ({"retry_on": OSError}, ConnectionError(), "queued"),
        ({"discard_on": [Flaky, "KeyError"]}, Flaky(), "failed"),
        ({"retry_on": [OSError]}, errors.Retry(), "queued"),
        ({}, errors.Discard("never"), "failed"),
    ],
    ids=str,
)
def test_a_task_decides_which_errors_are_retried(
    conn: db.Connection, policy: Row, error: BaseException, status: str
) -> None:
    failing(error, retries=1, **policy)
    assert attempted(conn, inserted(conn))["status"] == status


def test_a_policy_that_plain_sql_got_wrong_leaves_the_tasks(
    conn: db.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    failing(retries=1)
    found = attempted(conn, inserted(conn, policy={"backoff": "soon"}))
    assert (found["status"], found["max_attempts"]) == ("queued", 2)
    assert "default policy" in caplog.text


def test_the_budget_of_a_job_is_its_own_or_its_tasks() -> None:
    queue_workflows.register_ingest_task("t", lambda: None, timeout_s=7)
    job = {"queue": task_app.QUEUE, "task_name": "t"}
    assert claim_worker.budget_for(job) == 7
    assert claim_worker.budget_for(job | {"timeout_s": 3}) == 3
    assert claim_worker.budget_for(job | {"task_name": "other"}) == 3600


# --- args -------------------------------------------------------------------------------------


def test_args_that_a_task_does_not_take_fail_the_job_at_once(conn: db.Connection) -> None:
    def task(*, day: str, limit: int = 5) -> Row:
        return {"day": day, "limit": limit}

    queue_workflows.register_ingest_task("t", task, retries=5)
    found = attempted(conn, inserted(conn, args={"day": "monday", "limit": "many"}))
    assert (found["status"], found["attempts"]) == ("failed", 1)
    assert found["error"] == "ArgsRefused: args of task 't': 'limit': int, not 'many'"
    found = attempted(conn, inserted(conn, args={"day": "monday"}))
    assert found["result"] == {"day": "monday", "limit": 5}
