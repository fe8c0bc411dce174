"""An executor for many async jobs runs them at once, on one event loop."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator

import pytest

from queue_workflows.run import wire
from tests.support import executors
from tests.support.wait import until


@pytest.fixture
def worker(launcher: executors.Launched) -> Generator[executors.Worker]:
    with executors.forked(launcher, shared=True) as found:
        yield found


def test_a_hundred_async_jobs_run_at_once(worker: executors.Worker) -> None:
    jobs = [worker.send_task("meets", {"n": n, "all": 100}) for n in range(100)]
    found = {json.loads(worker.outcome(job).result)["met"] for job in jobs}
    assert found == {100}
    assert {job.printed for job in jobs} == {b"waits\n"}


def test_a_cancel_ends_one_of_them(worker: executors.Worker) -> None:
    jobs = [worker.send_task("endless_await") for _ in range(5)]
    worker.interrupt(jobs[2], "cancelled")
    assert worker.outcome(jobs[2]).kind == "cancelled"
    assert worker.ended_jobs == [jobs[2]]
    assert worker.task("coroutine", {"a": 1}).kind == "completed"


@pytest.mark.parametrize(
    "name", ["stream", "add", "sys_exits", "interrupts", "fails", "nobody", "terminates_child"]
)
def test_other_handlers_have_the_outcome_that_they_have_elsewhere(
    worker: executors.Worker, launcher: executors.Launched, name: str
) -> None:
    endless = worker.send_task("endless_await")
    found = worker.task(name, {"a": 1, "b": 1})
    with executors.forked(launcher) as other:
        expected = other.task(name, {"a": 1, "b": 1})
    assert (found.kind, found.result, found.error) == (
        expected.kind,
        expected.result,
        expected.error,
    )
    worker.interrupt(endless, "cancelled")
    assert worker.outcome(endless).kind == "cancelled"


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_sent_is_read_before_the_launcher_tells_of_the_fork(
    launcher: executors.Launched, shared: bool
) -> None:
    with launcher.late():
        worker = executors.Worker(launcher, shared=shared, waits=False)
        job = worker.send_task("coroutine", {"a": 1})
        until(lambda: worker.executors.catch_up() or job.outcome)
        assert (job.starts, worker.pid) == (1, 0)
    worker.until(lambda: worker.pid)
    assert worker.task("coroutine", {"a": 1}).kind == "completed"
    worker.close()


def test_progress_of_each_is_sent(worker: executors.Worker) -> None:
    jobs = [worker.send_task("stream") for _ in range(3)]
    for job in jobs:
        worker.outcome(job)
    assert {json.loads(job.reports[-1] or "") for job in jobs} == {2 / 3}


def test_quit_waits_for_those_that_run(worker: executors.Worker) -> None:
    job = worker.send_task("endless_await")
    worker.task("coroutine", {"a": 1})
    worker.executors.let_go(worker.place)
    worker.turn(0.1)
    assert not worker.place.lost
    worker.interrupt(job, "shutdown")
    assert worker.death()["code"] == 0
    assert worker.outcome(job).error == "shutdown"


def test_the_end_of_the_worker_ends_it(worker: executors.Worker) -> None:
    worker.send_task("endless_await")
    worker.place.channel.shutdown(socket.SHUT_WR)
    assert worker.death()["code"] == wire.LOST
