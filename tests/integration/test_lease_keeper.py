"""Time limits and guards of an inline worker, asked through its lease keeper."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    db,
    history,
    model_cache,
    model_registry,
    models,
    node_queue,
)
from queue_workflows.worker import guards, job_guards
from tests.support import factories, timeouts, wait

pytestmark = pytest.mark.usefixtures("db")


class Body:
    """A node handler that reports when it runs and waits until it is released."""

    def __init__(self) -> None:
        self.started, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.release.wait(30)


@pytest.fixture
def body() -> Generator[Body]:
    made = Body()
    queue_workflows.register_node("body", made)
    yield made
    made.release.set()


def queued(**columns: Any) -> str:
    with db.connect() as conn:
        return factories.node(conn, node_module="body", **columns)["id"]


def job(job_id: str) -> dict[str, Any]:
    found = node_queue.get_node_job(job_id)
    assert found is not None
    return dict(found)


def test_a_result_after_the_time_limit_was_decided_is_dropped(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the decision is slower than the handler, and changes nothing."""
    decided: list[guards.Failure] = []

    def decide(failure: guards.Failure) -> None:
        decided.append(failure)
        body.release.set()

    announced: list[str] = []
    queue_workflows.set_on_node_completed(lambda job, run, delta: announced.append(job["id"]))
    job_id = queued(timeout_s=0.05)
    subject = claim_worker.ClaimWorker(queue="cpu", host="box")
    timeouts.hold_guards(monkeypatch, decide)
    thread = threading.Thread(target=subject.run_forever)
    thread.start()
    wait.until(lambda: announced)
    subject.stop()
    thread.join(30)
    assert [each.event for each in decided] == ["budget_trip"]
    shown = history.get_job(job_id)
    assert shown is not None
    first, second = shown["attempts"]
    assert [event["event_type"] for event in first["events"]] == [
        "claimed",
        "requeued",
        "budget_trip",
    ]
    assert second["outcome"] == "completed"
    assert (job(job_id)["watchdog_retries"], job(job_id)["claim_no"]) == (1, 2)
    assert announced == [job_id], "the result of the second attempt alone is announced"


def test_a_guards_failure_never_ends_the_next_job(body: Body) -> None:
    """A guard's failure of a job that has ended is dropped."""
    first = queued()
    codes: list[int] = []
    subject = claim_worker.ClaimWorker(queue="cpu", host="box", on_exit=codes.append)
    watcher = subject._keeper
    thread = threading.Thread(target=subject.run_once)
    thread.start()
    assert body.started.wait(30)
    (old,) = watcher._jobs.running
    body.release.set()
    thread.join(30)
    watcher._shutdown.end_by_guard(old, guards.Failure(75, "budget_trip", "late"))
    watcher._renew()
    watcher._close()
    assert codes == []
    assert job(first)["status"] == "completed"


def test_a_load_on_request_that_never_ends_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the time limit of a gpu job, which no configuration changes."""
    monkeypatch.setattr(job_guards, "GPU_S", 0.2)
    release = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        release.set()

    def load() -> None:
        assert release.wait(30)

    model_registry.register(model_registry.ModelSpec("a", load, lambda _: None))
    subject = claim_worker.ClaimWorker(
        queue="gpu", host="box", model_cache=model_cache.ModelCache(), on_exit=leave
    )
    thread = threading.Thread(target=subject.run_forever)
    thread.start()
    wait.until(lambda: models.list("box"))
    models.load("box", "a")
    wait.until(lambda: codes)
    subject.stop()
    thread.join(30)
    assert set(codes) == {75}
