"""An executor for many async jobs runs them at once, on one event loop."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from queue_workflows.executor import channel, launcher_client, protocol
from tests.support import executors


@pytest.fixture
def worker(launcher: launcher_client.Launcher) -> Generator[executors.Worker]:
    with executors.forked(launcher, concurrent=True) as found:
        yield found


def test_a_hundred_async_jobs_run_at_once(worker: executors.Worker) -> None:
    keys = [worker.send_task("meets", {"n": n, "all": 100}) for n in range(100)]
    found = {json.loads(worker.outcome(key).result)["met"] for key in keys}
    assert found == {100}
    assert sorted(each.key or 0 for each in worker.of(protocol.Log)) == keys


def test_a_cancel_ends_one_of_them(worker: executors.Worker) -> None:
    keys = [worker.send_task("endless_await") for _ in range(5)]
    worker.request(protocol.Cancel(keys[2], "cancelled"))
    assert worker.outcome(keys[2]).kind == "cancelled"
    assert len(worker.of(protocol.Outcome)) == 1
    assert worker.task("coroutine", {"a": 1}).kind == "completed"


def test_a_cancel_that_overtakes_its_job_is_remembered(worker: executors.Worker) -> None:
    worker.request(protocol.Cancel(1, "shutdown"))
    assert worker.task("endless_await").error == "shutdown"


@pytest.mark.parametrize(
    "name", ["stream", "add", "sys_exits", "interrupts", "fails", "nobody", "terminates_child"]
)
def test_other_handlers_have_the_outcome_that_they_have_elsewhere(
    worker: executors.Worker, launcher: launcher_client.Launcher, name: str
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
    worker.request(protocol.Cancel(endless, "cancelled"))
    assert worker.outcome(endless).kind == "cancelled"


def test_progress_of_each_is_sent(worker: executors.Worker) -> None:
    keys = [worker.send_task("stream") for _ in range(3)]
    for key in keys:
        worker.outcome(key)
    last = {each.key: each.value for each in worker.of(protocol.Progress)}
    assert {json.loads(value or "") for value in last.values()} == {2 / 3}
    assert sorted(last) == keys


def test_quit_waits_for_those_that_run(worker: executors.Worker) -> None:
    key = worker.send_task("endless_await")
    worker.task("coroutine", {"a": 1})
    worker.send(protocol.Quit())
    worker.turn(0.1)
    assert worker.lost is None
    worker.request(protocol.Cancel(key, "shutdown"))
    assert worker.death().code == 0
    assert worker.of(protocol.Outcome)[-1].error == "shutdown"


def test_the_end_of_the_worker_ends_it(worker: executors.Worker) -> None:
    worker.send_task("endless_await")
    worker.executor.jobs.close()
    worker.lost = protocol.ChannelLost("closed here")
    assert worker.death().code == channel.LOST
