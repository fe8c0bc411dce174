"""The in-process queue with jobs, handlers and errors that no app should have."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import errors, local_queue
from tests.support import constants, local_queue_app, memory_reports, tabled
from tests.support.wait import until

Job = local_queue.Job
Start = Callable[..., local_queue.JobQueueManager]


@pytest.fixture
def managers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def started(managers: ExitStack) -> Start:
    """Start a manager that is stopped at the end of the test."""

    def start(plan: Any, execute: Any = None, **more: Any) -> local_queue.JobQueueManager:
        quick = {"workers": 1, "fetch_every_s": 0.02}
        return managers.enter_context(local_queue_app.manager(plan, execute, **{**quick, **more}))

    return start


def ended(plan: local_queue.MemoryPlan, job_id: str) -> Any:
    """The entry of a job, once it has ended."""

    def entry() -> Any:
        found = plan.entry(job_id)
        assert found is not None
        return found if found.state in ("completed", "failed") else None

    found = until(entry, timeout_s=10)
    assert found is not None
    return found


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unstorable(Exception):
    def __str__(self) -> str:
        return "a\0b"


@pytest.mark.parametrize("error", [Unprintable(), Unstorable(), ValueError("x" * 100_000)])
def test_an_error_that_cannot_be_printed_fails_its_job_alone(
    started: Start, error: Exception
) -> None:
    def execute(job: Job) -> None:
        if job.id == "bad":
            raise error

    plan = local_queue.MemoryPlan([Job("bad", "task"), Job("good", "task")])
    manager = started(plan, execute, max_attempts=1)
    found = ended(plan, "bad")
    assert found.state == "failed"
    assert (found.error or "").startswith(type(error).__name__)
    assert len(found.error or "") <= 2000
    assert ended(plan, "good").state == "completed"
    assert manager.stats()["dead_threads"] == 0


@pytest.mark.parametrize("wrong", ["5", -1.0, 0.0, math.nan, True, [1]])
def test_a_time_out_that_is_no_number_fails_its_job_alone(started: Start, wrong: Any) -> None:
    ran: list[str] = []
    plan = local_queue.MemoryPlan([Job("bad", "task", timeout_s=wrong), Job("good", "task")])
    manager = started(plan, lambda job: ran.append(job.id))
    found = ended(plan, "bad")
    assert found.state == "failed"
    assert f"timeout_s={wrong!r}" in (found.error or "")
    assert ended(plan, "good").state == "completed"
    assert ran == ["good"]
    assert manager.stats()["dead_threads"] == 0


def test_jobs_before_one_with_a_wrong_id_start_nevertheless() -> None:
    queue = local_queue.JobQueue()
    found: list[Job | None] = []
    thread = threading.Thread(target=lambda: found.append(queue.get(10)))
    thread.start()
    wrong: Any = []
    with pytest.raises(TypeError, match="unhashable"):
        queue.add_all([Job("a", "task"), Job(wrong, "task")])
    thread.join(30)
    assert found == [Job("a", "task")]


async def _async(_: Job) -> int:
    return 1


def _generator(_: Job) -> Iterator[int]:
    yield 1


async def _async_generator(_: Job) -> Any:
    yield 1


@pytest.mark.parametrize("execute", [_async, _generator, _async_generator])
def test_a_function_whose_result_would_have_to_be_run_is_refused(execute: Any) -> None:
    with pytest.raises(errors.InvalidConfig, match="register_ingest_task"):
        local_queue.JobQueueManager(local_queue.MemoryPlan(), execute)


def test_a_discard_that_is_returned_fails_the_job_as_one_that_is_raised(started: Start) -> None:
    plan = local_queue.MemoryPlan([Job("a", "task")])
    started(plan, lambda _: errors.Discard("no use"))
    assert (ended(plan, "a").state, ended(plan, "a").error) == ("failed", "Discard: no use")


def test_a_queue_that_an_app_has_paused_stays_paused(
    managers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_CHECK_INTERVAL", "0.01")
    readings: list[int] = []

    def read() -> float:
        readings.append(1)
        return 10.0

    queue = local_queue.JobQueue()
    queue.pause()
    plan = local_queue.MemoryPlan([Job("a", "task")])
    manager = local_queue.JobQueueManager(
        plan, lambda _: "x", queue=queue, throttle=memory_reports.throttle(read), grace_s=0.0
    )
    managers.enter_context(manager)
    until(lambda: queue.queued == ["a"])
    seen = len(readings)
    until(lambda: len(readings) > seen + 3)
    assert queue.queued == ["a"]
    queue.resume()
    assert ended(plan, "a").result == "x"


def test_without_a_limit_of_its_own_the_managers_counts(started: Start) -> None:
    go_on = threading.Event()
    endless = Job("endless", "task", timeout_s=math.inf)
    plan = local_queue.MemoryPlan([endless, Job("limited", "task")])
    started(plan, lambda _: go_on.wait(60), workers=2, timeout_s=0.05, max_attempts=1)
    assert ended(plan, "limited").error == "timed out after 0.05 s"
    go_on.set()
    assert ended(plan, "endless").state == "completed"


def test_a_thread_that_cannot_be_started_is_tried_again(
    started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, refused = threading.Thread.start, []

    def start_or_refuse(self: threading.Thread) -> None:
        if self.name == "local-queue-worker-1" and not refused:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    constants.put(monkeypatch, "local_queue.threads.REPEAT_S", 0.05)
    plan = local_queue.MemoryPlan([Job("a", "task")])
    manager = started(plan, lambda _: "x", workers=2)
    assert ended(plan, "a").result == "x"
    until(lambda: manager.stats()["alive_workers"] == 2)
    assert "Worker-1 does not start" in caplog.text
    assert manager.stats()["dead_threads"] == 0


def test_a_job_whose_start_ends_after_the_stop_does_not_run(started: Start) -> None:
    starts, go_on, ran = threading.Event(), threading.Event(), list[str]()

    class Plan(local_queue.MemoryPlan):
        def mark_running(self, job: Job, /) -> bool:
            found = super().mark_running(job)
            starts.set()
            go_on.wait(30)
            return found

    plan = Plan([Job("a", "task")])
    manager = started(plan, lambda job: ran.append(job.id))
    until(starts.is_set)
    assert manager.stop(0.1) is False
    go_on.set()
    until(lambda: manager.stats()["alive_workers"] == 0)
    entry = plan.entry("a")
    assert (entry and entry.state, ran) == ("pending", [])


def test_a_handler_may_stop_its_manager(started: Start) -> None:
    stopped: list[bool] = []
    plan = local_queue.MemoryPlan([Job("a", "task"), Job("b", "task")])
    manager = started(plan, lambda _: stopped.append(manager.stop(0.2)))
    until(lambda: stopped)
    until(lambda: manager.stats()["alive_workers"] == 0)
    entries = [plan.entry("a"), plan.entry("b")]
    assert [each and each.state for each in entries] == ["pending", "pending"]


@pytest.mark.parametrize("where", ["fetch_ready", "mark_done", "is_currently_running"])
def test_a_plan_that_hangs_does_not_hold_up_the_stop(
    started: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    constants.put(monkeypatch, "local_queue.manager.LOOP_END_S", 0.5)
    hangs, go_on = threading.Event(), threading.Event()

    class Plan(local_queue.MemoryPlan):
        def _hang(self, here: str) -> None:
            if here == where:
                hangs.set()
                go_on.wait(60)

        def fetch_ready(self) -> list[Job]:
            self._hang("fetch_ready")
            return super().fetch_ready()

        def mark_done(self, job: Job, result: Any, /) -> None:
            self._hang("mark_done")
            super().mark_done(job, result)

        def is_currently_running(self, job_id: str, /) -> bool:
            self._hang("is_currently_running")
            return super().is_currently_running(job_id)

    manager = started(Plan([Job("a", "task")]), lambda _: None)
    until(hangs.is_set)
    stopped: list[bool] = []
    thread = threading.Thread(target=lambda: stopped.append(manager.stop(0.5)))
    thread.start()
    thread.join(30)
    go_on.set()
    thread.join(30)
    assert stopped == [False]


class Silent(local_queue.MemoryPlan):
    """A plan whose `mark_running` forgets to return anything."""

    def mark_running(self, job: Job, /) -> None:  # type: ignore[override]
        super().mark_running(job)


def test_a_plan_that_returns_nothing_at_the_start_of_a_job_lets_it_run(started: Start) -> None:
    plan = Silent([Job("a", "t")])
    started(plan, lambda job: job.id)
    assert ended(plan, "a").result == "a"


class Mixed(local_queue.MemoryPlan):
    """A plan that returns objects which are no jobs among its jobs."""

    def fetch_ready(self) -> list[Any]:
        return [None, {"id": "x"}, Job(["x"], "t"), *super().fetch_ready()]  # type: ignore[arg-type]


def test_what_is_no_job_among_fetched_jobs_stops_no_other(
    started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Mixed([Job("a", "t")])
    started(plan, lambda job: job.id)
    assert ended(plan, "a").result == "a"
    for kind in (type(None), dict, Job):
        assert f"the plan returned a {kind}, whose `id` cannot be used" in caplog.text


def test_a_manager_does_not_start_after_its_stop() -> None:
    manager = local_queue.JobQueueManager(local_queue.MemoryPlan())
    assert manager.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        manager.start()


def test_a_setting_of_a_wrong_type_is_refused_by_name() -> None:
    cases: list[Any] = [
        {"workers": "3"}, {"workers": 2.5}, {"workers": True}, {"max_attempts": None},
        {"max_attempts": math.nan}, {"timeout_s": "5"}, {"grace_s": "1"}, {"cooldown_s": True},
        {"single_job": "false"},
    ]  # fmt: skip
    for wrong in cases:
        with (
            tabled.case(wrong),
            pytest.raises(errors.InvalidConfig, match=next(iter(wrong))),
        ):
            local_queue.JobQueueManager(local_queue.MemoryPlan(), **wrong)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("leaves", ["return", "exit", "raise"])
def test_a_child_that_a_handler_forks_runs_no_further_job(
    started: Start, tmp_path: Path, leaves: str
) -> None:
    parent = os.getpid()
    journal = os.open(tmp_path / "journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def work(job: Job) -> int:
        os.write(journal, f"{job.id}\n".encode())
        if os.getpid() != parent:  # the child goes on as a worker
            os._exit(99)
        if job.id != "fork" or (child := os.fork()):
            return job.id == "fork" and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if leaves == "exit":
            sys.exit(7)
        if leaves == "raise":
            raise ValueError("in the child")
        return 0

    plan = local_queue.MemoryPlan([Job("fork", "t"), *(Job(each, "t") for each in "abc")])
    try:
        started(plan, work)
        assert ended(plan, "fork").result == {"return": 0, "exit": 7, "raise": 1}[leaves]
        assert ended(plan, "c").state == "completed"
        assert (tmp_path / "journal").read_text().split() == ["fork", "a", "b", "c"]
    finally:
        os.close(journal)


def test_ids_and_names_cannot_forge_lines_of_the_log(
    started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "queue_workflows.local_queue")

    def work(_: Job) -> None:
        raise errors.Discard("no\nERROR forged")

    plan = local_queue.MemoryPlan([Job("a\n\x1b[2J", "t\nERROR forged", name="x\u202e")])
    started(plan, work)
    assert ended(plan, "a\n\x1b[2J").state == "failed"
    for record in caplog.records:
        if record.name == "queue_workflows.local_queue":
            assert not {"\n", "\x1b", "\u202e"} & {*record.getMessage()}


def test_ended_jobs_are_forgotten_the_first_ended_first() -> None:
    plan = local_queue.MemoryPlan((Job(each, "t") for each in "abcd"), keep_ended=2)
    for job in plan.fetch_ready()[:3]:
        assert plan.mark_running(job)
        if job.id == "a":
            plan.mark_failed(job, "no", True)
        else:
            plan.mark_done(job, job.id)
    assert [plan.entry(each) is None for each in "abcd"] == [True, False, False, False]
    plan.add(Job("b", "t"))  # it has not ended any more, so it takes no place of those that have
    job = plan.fetch_ready()[0]
    assert plan.mark_running(job)
    plan.mark_done(job, "d")
    assert [plan.entry(each) is None for each in "abcd"] == [True, False, False, False]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_how_many_ended_jobs_a_plan_keeps_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(errors.InvalidConfig, match="keep_ended"):
        local_queue.MemoryPlan(keep_ended=wrong)
