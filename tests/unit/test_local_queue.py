"""The in-process queue: which jobs it refuses, how its threads run them, and what it counts."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import queue_workflows
from queue_workflows import config, errors, local_queue
from tests.support import clocks, constants, local_queue_app, memory_reports, tabled
from tests.support.examples import examples
from tests.support.wait import until

Job = local_queue.Job
ROOT = Path(__file__).resolve().parents[2]
QUICK = {"grace_s": 0.0, "stagger_s": 0.0, "cooldown_s": 0.0, "fetch_every_s": 0.02}


@pytest.fixture
def clock() -> clocks.Clock[float]:
    return clocks.Clock(1000.0)


@pytest.fixture
def queue(clock: clocks.Clock[float]) -> local_queue.JobQueue:
    return local_queue.JobQueue(now_fn=clock)


def job(job_id: str, **more: Any) -> Job:
    return Job(job_id, "task", **more)


# --- The queue.


def test_jobs_come_in_the_order_in_which_they_were_added(queue: local_queue.JobQueue) -> None:
    for name in "abc":
        assert queue.add(job(name)) is None
    assert queue.queued == ["a", "b", "c"]
    assert [queue.get(0).id for _ in range(3)] == ["a", "b", "c"]  # pyright: ignore
    assert (queue.queued, queue.active) == ([], ["a", "b", "c"])


def test_a_job_that_waits_or_runs_is_refused_even_by_force(queue: local_queue.JobQueue) -> None:
    queue.add(job("a"))
    assert queue.add(job("a")) == local_queue.Refusal("queued")
    assert str(queue.add(job("a"), force=True)) == "already in queue"
    queue.get(0)
    assert queue.add(job("a")) == local_queue.Refusal("active")
    assert queue.add(job("a"), force=True) == local_queue.Refusal("active")


def test_a_job_that_has_ended_is_refused_for_30_s(
    queue: local_queue.JobQueue, clock: clocks.Clock[float]
) -> None:
    queue.add(job("a"))
    queue.get(0)
    queue.done("a")
    clock.now += 10
    refusal = queue.add(job("a"))
    assert refusal == local_queue.Refusal("processed", 20.0)
    assert "20.0 s" in str(refusal)
    assert queue.add(job("a"), force=True) is None
    queue.get(0)
    queue.done("a")
    clock.now += 29.9
    assert queue.add(job("a")) is not None
    clock.now += 0.1
    assert queue.add(job("a")) is None


def test_a_job_that_was_released_may_come_again_at_once(queue: local_queue.JobQueue) -> None:
    queue.add(job("a"))
    queue.get(0)
    queue.release("a")
    assert queue.add(job("a")) is None


def test_only_an_active_job_can_be_done(queue: local_queue.JobQueue) -> None:
    queue.add(job("a"))
    queue.done("a")
    queue.done("unknown")
    assert queue.queued == ["a"]
    assert queue.add(job("unknown")) is None


def test_get_waits_for_a_job_and_gives_up_in_time(queue: local_queue.JobQueue) -> None:
    assert queue.get(0.01) is None
    found: list[Job | None] = []
    with _thread(lambda: found.append(queue.get())):
        queue.add(job("a"))
        until(lambda: found == [job("a")])


def test_a_paused_queue_starts_nothing_until_it_is_resumed(queue: local_queue.JobQueue) -> None:
    queue.pause()
    queue.add(job("a"))
    found: list[Job | None] = []
    with _thread(lambda: found.append(queue.get())) as thread:
        thread.join(0.1)
        assert found == []
        assert (queue.queued, queue.active) == (["a"], [])
        queue.resume()
        until(lambda: found == [job("a")])


def test_a_closed_queue_wakes_all_who_wait_and_starts_nothing(queue: local_queue.JobQueue) -> None:
    queue.pause()
    queue.add(job("a"))
    found: list[Job | None] = []
    with ExitStack() as threads:
        for _ in range(3):
            threads.enter_context(_thread(lambda: found.append(queue.get())))
        assert queue.close() == [job("a")]
        until(lambda: len(found) == 3)
    assert found == [None] * 3
    assert queue.add(job("b")) == local_queue.Refusal("closed")
    assert queue.get() is None


def test_no_job_starts_while_the_queue_is_being_closed() -> None:
    taken: list[Job | None] = []

    class Racing(local_queue.JobQueue):
        def clear(self) -> list[Job]:
            taken.append(self.get(0))  # a thread that comes for a job at this moment
            return super().clear()

    queue = Racing()
    queue.add(job("a"))
    assert queue.close() == [job("a")]
    assert taken == [None]


def test_several_jobs_are_added_in_order_with_an_answer_for_each(
    queue: local_queue.JobQueue,
) -> None:
    names = [str(number) for number in range(250)]
    found = queue.add_all([job("7"), *map(job, names)])
    assert found == [None, *([None] * 7), local_queue.Refusal("queued"), *([None] * 242)]
    assert queue.queued == ["7", *names[:7], *names[8:]]


def test_a_job_that_waits_can_be_removed_and_an_active_one_cannot(
    queue: local_queue.JobQueue,
) -> None:
    queue.add_all(map(job, "abcd"))
    queue.get(0)
    assert [queue.remove(name) for name in "ac?"] == [False, True, False]
    assert queue.clear() == [job("b"), job("d")]
    assert (queue.queued, queue.active) == ([], ["a"])
    assert queue.add_all(map(job, "bcd")) == [None] * 3


class QueueMachine(RuleBasedStateMachine):
    """The queue beside what it should do, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = clocks.Clock(1000.0)
        self.queue = local_queue.JobQueue(now_fn=self.clock)
        self.queued: list[str] = []
        self.active: list[str] = []
        self.ended: dict[str, float] = {}

    @rule(name=st.sampled_from("abcde"), force=st.booleans())
    def add(self, name: str, force: bool) -> None:
        refusal = self.queue.add(job(name), force=force)
        rest_s = self.ended.get(name, -100.0) + 30 - self.clock.now
        if name in self.queued:
            assert refusal == local_queue.Refusal("queued")
        elif name in self.active:
            assert refusal == local_queue.Refusal("active")
        elif rest_s > 0 and not force:
            assert refusal == local_queue.Refusal("processed", pytest.approx(rest_s))
        else:
            assert refusal is None
            self.queued.append(name)
            self.ended.pop(name, None)  # its next end counts, and a release is none

    @rule()
    def get(self) -> None:
        found = self.queue.get(0)
        expected = self.queued.pop(0) if self.queued else None
        assert (found and found.id) == expected
        if found:
            self.active.append(found.id)

    @rule(name=st.sampled_from("abcde"), for_good=st.booleans())
    def end(self, name: str, for_good: bool) -> None:
        (self.queue.done if for_good else self.queue.release)(name)
        if name in self.active:
            self.active.remove(name)
            if for_good:
                self.ended[name] = self.clock.now

    @rule(seconds=st.sampled_from([1.0, 15.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def shows_what_waits_and_runs(self) -> None:
        assert self.queue.queued == self.queued
        assert self.queue.active == self.active


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = hypothesis_settings(
    max_examples=examples(50),
    stateful_step_count=40,
)


# --- The manager.


class _thread:  # noqa: N801  a context manager
    """A thread that has ended when the block ends."""

    def __init__(self, target: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=target)

    def __enter__(self) -> threading.Thread:
        self.thread.start()
        return self.thread

    def __exit__(self, *_: object) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


class Fake:
    """A manager on a fake clock, whose loops the test drives."""

    def __init__(self, plan: Any, execute: Callable[[Job], Any], **more: Any) -> None:
        self.clock = clocks.Clock(1000.0)
        self.ram: float | None = None
        throttle = memory_reports.throttle(lambda: self.ram, now_fn=self.clock)
        self.manager = local_queue.JobQueueManager(
            plan, execute, throttle=throttle, now_fn=self.clock, **more
        )
        self.manager.start(threads=False)

    def after(self, seconds: float) -> dict[str, Any]:
        self.clock.now += seconds
        self.manager.run_due()
        return self.manager.stats()


@pytest.fixture
def managers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def started(managers: ExitStack) -> Callable[..., local_queue.JobQueueManager]:
    """Start a manager that is stopped at the end of the test."""

    def start(plan: Any, execute: Any = None, **more: Any) -> local_queue.JobQueueManager:
        given = {"workers": 3, "single_job": None} | QUICK | more
        return managers.enter_context(local_queue_app.manager(plan, execute, **given))

    return start


@pytest.fixture
def fake(managers: ExitStack) -> Callable[..., Fake]:
    def start(plan: Any, execute: Callable[[Job], Any] = lambda _: None, **more: Any) -> Fake:
        found = Fake(plan, execute, **more)
        managers.callback(found.manager.stop)
        return found

    return start


def state(plan: local_queue.MemoryPlan, job_id: str) -> str | None:
    entry = plan.entry(job_id)
    return entry and entry.state


def test_jobs_run_and_their_results_are_in_the_plan(started: Any) -> None:
    plan = local_queue.MemoryPlan([job(str(number), args={"n": number}) for number in range(50)])
    manager = started(plan, lambda each: each.args["n"] * 2)
    until(lambda: manager.stats()["finished"] == 50)
    assert [plan.entry(str(number)).result for number in range(50)] == [*range(0, 100, 2)]
    found = manager.stats()
    assert (found["finished"], found["failed"], found["total_workers"]) == (50, 0, 3)
    assert found["tasks"]["task"]["ended"] == 50


def test_without_execute_the_registered_task_runs_and_knows_its_job(started: Any) -> None:
    from queue_workflows import current_job, register_ingest_task

    def add(*, a: int, b: int) -> dict[str, Any]:
        return {"sum": a + b, "id": current_job().id, "attempt": current_job().attempt}

    def steps(*, count: int) -> Iterator[float]:
        yield from (number / count for number in range(count))

    async def later(*, value: int) -> int:
        return value

    def told(what: str = "all") -> int:
        return 8

    for name, task in (("add", add), ("steps", steps), ("later", later), ("told", told)):
        register_ingest_task(name, task)
    plan = local_queue.MemoryPlan(
        [
            Job("1", "add", {"a": 1, "b": 2}), Job("2", "steps", {"count": 3}),
            Job("3", "later", {"value": 7}), Job("4", "unknown"), Job("5", "add", {"a": 1}),
            Job("6", "told", {"day": 1}),
        ]
    )  # fmt: skip
    started(plan, max_attempts=1)
    until(lambda: {state(plan, each) for each in "123456"} == {"completed", "failed"})
    assert plan.entry("1").result == {"sum": 3, "id": "1", "attempt": 1}
    assert (plan.entry("2").result, plan.entry("3").result) == (None, 7)
    assert "knows no task 'unknown'" in plan.entry("4").error
    assert plan.entry("5").state == "failed"
    assert plan.entry("6").result == 8, "what it does not read is no fault here"


def test_the_first_fetch_comes_after_15_s_and_then_one_each_minute(fake: Any) -> None:
    asked: list[float] = []

    class Plan(local_queue.MemoryPlan):
        def fetch_ready(self) -> list[Job]:
            asked.append(found.clock.now - 1000)
            return []

    found = fake(Plan())
    for _ in range(200):
        found.after(1.0)
    assert asked == [15.0, 75.0, 135.0, 195.0]


def test_an_app_can_request_a_fetch_at_once(fake: Any) -> None:
    plan = local_queue.MemoryPlan([job("a")])
    found = fake(plan, workers=1)
    found.manager.fetch_now()
    found.after(0.0)
    until(lambda: state(plan, "a") == "completed")


def test_workers_start_one_second_apart(fake: Any) -> None:
    found = fake(local_queue.MemoryPlan(), workers=4)
    assert [found.after(0.5)["alive_workers"] for _ in range(8)] == [1, 2, 2, 3, 3, 4, 4, 4]


def test_a_thread_ends_after_one_job_and_is_replaced_after_10_s(fake: Any) -> None:
    threads: list[int] = []
    plan = local_queue.MemoryPlan([job("a"), job("b")])
    found = fake(plan, lambda _: threads.append(threading.get_ident()), workers=1, grace_s=0.0)
    found.after(0.0)
    until(lambda: state(plan, "a") == "completed")
    until(lambda: found.after(0.0)["alive_workers"] == 0)
    assert found.after(9.9)["alive_workers"] == 0
    assert state(plan, "b") == "pending"
    found.after(0.2)
    until(lambda: state(plan, "b") == "completed")


def test_with_single_job_mode_off_a_thread_runs_many_jobs(started: Any) -> None:
    threads: set[str] = set()
    plan = local_queue.MemoryPlan([job(str(number)) for number in range(20)])
    started(plan, lambda _: threads.add(threading.current_thread().name), workers=1,
            single_job=False)  # fmt: skip
    until(lambda: all(state(plan, str(number)) == "completed" for number in range(20)))
    assert threads == {"local-queue-worker-1"}


@pytest.mark.parametrize(
    ("text", "single"), [("true", True), ("1", True), ("False", False), ("0", False), ("x", True)]
)
def test_single_job_mode_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, single: bool
) -> None:
    monkeypatch.setenv("WORKER_SINGLE_JOB_MODE", text)
    manager = local_queue.JobQueueManager(local_queue.MemoryPlan())
    assert manager.settings.single_job is single


def test_times_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_queue.JobQueueManager(local_queue.MemoryPlan()).settings[1:5] == (True, 15, 1, 10)
    monkeypatch.setenv("MASTER_GRACE_PERIOD_SECONDS", "1")
    monkeypatch.setenv("WORKER_STAGGER_SECONDS", "2")
    monkeypatch.setenv("WORKER_COOLDOWN_SECONDS", "3")
    assert local_queue.JobQueueManager(local_queue.MemoryPlan()).settings[2:5] == (1, 2, 3)


@pytest.mark.parametrize(("cores", "workers"), [(1, 10), (11, 10), (12, 10), (20, 18), (64, 57)])
def test_nine_tenths_of_the_cores_work_at_least_ten(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert local_queue.JobQueueManager(local_queue.MemoryPlan()).settings.workers == workers


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    cases: list[Any] = [
        {"workers": 0}, {"max_attempts": 0}, {"grace_s": -1.0}, {"stagger_s": float("nan")},
        {"cooldown_s": float("inf")}, {"fetch_every_s": 0.0}, {"timeout_s": 0.0},
    ]  # fmt: skip
    for wrong in cases:
        with (
            tabled.case(wrong),
            pytest.raises(errors.InvalidConfig, match=next(iter(wrong))),
        ):
            local_queue.JobQueueManager(local_queue.MemoryPlan(), **wrong)


def test_a_failed_job_is_tried_three_times_and_then_failed_with_its_error(started: Any) -> None:
    tried: list[str] = []

    def execute(each: Job) -> None:
        tried.append(each.id)
        raise ValueError(f"wrong {len(tried)}")

    plan = local_queue.MemoryPlan([job("a")])
    manager = started(plan, execute)
    until(lambda: state(plan, "a") == "failed")
    assert tried == ["a"] * 3
    assert plan.entry("a").error == "ValueError: wrong 3"
    found = manager.stats()
    assert found["tasks"]["task"] | {"seconds": 0} == {"ended": 3, "failed": 3, "seconds": 0}
    assert "wrong" in next(iter(found["last_errors"].values()))


def test_a_success_forgets_the_failed_attempts_before_it(started: Any) -> None:
    fails = iter([True, True, False, True, True, False])

    def execute(_: Job) -> str:
        if next(fails):
            raise ValueError
        return "done"

    plan = local_queue.MemoryPlan([job("a")])
    manager = started(plan, execute, workers=1)
    until(lambda: state(plan, "a") == "completed")
    plan.add(job("a"))
    manager.add([job("a")], force=True)
    until(lambda: state(plan, "a") == "completed")
    assert next(fails, None) is None


def test_a_job_that_is_discarded_is_not_tried_again(started: Any) -> None:
    def execute(_: Job) -> None:
        raise errors.Discard("no use")

    plan = local_queue.MemoryPlan([job("a")])
    started(plan, execute)
    until(lambda: state(plan, "a") == "failed")
    assert plan.entry("a").error == "Discard: no use"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_handler_that_exits_fails_alone(started: Any, error: BaseException) -> None:
    def execute(each: Job) -> None:
        if each.id == "bad":
            raise error

    plan = local_queue.MemoryPlan([job("bad"), job("good")])
    manager = started(plan, execute, workers=1, max_attempts=1)
    until(lambda: (state(plan, "bad"), state(plan, "good")) == ("failed", "completed"))
    assert manager.stats()["dead_threads"] == 0


def test_a_job_that_takes_too_long_is_pending_again_and_its_late_result_is_dropped(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    results = iter(["late", "in time"])

    def execute(_: Job) -> str:
        result = next(results)
        if result == "late":
            go_on.wait(30)
        return result

    plan = local_queue.MemoryPlan([job("a", timeout_s=7.0)])
    found = fake(plan, execute, workers=1, grace_s=0.0)
    found.after(0.0)
    until(lambda: state(plan, "a") == "running")
    until(lambda: found.manager.stats()["active_jobs"] == 1)
    found.after(6.9)
    assert state(plan, "a") == "running"
    until(lambda: found.after(0.1)["timed_out"] == 1)
    assert (state(plan, "a"), plan.entry("a").error) == ("pending", "timed out after 7 s")
    assert found.after(0.0)["abandoned_threads"] == 1
    found.after(60.0)
    until(lambda: state(plan, "a") == "completed")
    assert plan.entry("a").result == "in time"
    go_on.set()
    until(lambda: found.manager.stats()["late_results"] == 1)
    until(lambda: found.after(0.0)["abandoned_threads"] == 0)
    assert plan.entry("a").result == "in time"
    assert "late result of job a is dropped" in caplog.text


@pytest.mark.parametrize(
    ("signal", "waits_s", "counted"),
    [
        (errors.Snooze(5), 5.0, False), (errors.Snooze(0), 1.0, False),
        (errors.Retry(5), 5.0, True), (errors.Retry(), 0.0, True),
    ],
    ids=["snooze", "shortest", "retry", "at once"],
)  # fmt: skip
def test_a_job_that_asks_to_wait_does_so_and_a_snooze_counts_no_attempt(
    fake: Any, signal: errors.JobSignal, waits_s: float, counted: bool
) -> None:
    plan, calls = local_queue.MemoryPlan([job("a")]), list[float]()

    def execute(_: Job) -> Any:
        calls.append(found.clock.now)
        return signal

    found = fake(plan, execute, workers=1, single_job=False, max_attempts=2, **QUICK)

    def has_run(times: int) -> bool:
        counts = found.after(0.1)
        return len(calls) == times and counts["active_jobs"] == 0

    until(lambda: has_run(1))
    if waits_s:
        assert str(found.manager.add([job("a")])[0]).startswith("asked to wait, refused for ")
    until(lambda: has_run(2))
    assert calls[1] - calls[0] >= waits_s
    assert state(plan, "a") == ("failed" if counted else "pending")
    assert found.manager.stats()["tasks"]["task"]["failed"] == (2 if counted else 0)


def test_waits_of_jobs_that_do_not_come_again_are_forgotten(
    queue: local_queue.JobQueue, clock: clocks.Clock[float]
) -> None:
    for number in range(3):
        queue.add(job(str(number)))
        queue.get(0)
        queue.release(str(number), wait_s=10.0 * (number + 1))
    assert [queue.add(job(name)) for name in "012"] == [
        local_queue.Refusal("waits", wait_s) for wait_s in (10.0, 20.0, 30.0)
    ]
    assert queue.add(job("2"), force=True) is None
    clock.now += 10.0
    assert (queue.add(job("0")), queue.add(job("1"))) == (None, local_queue.Refusal("waits", 10.0))


def test_threads_that_were_abandoned_are_bounded(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    plan = local_queue.MemoryPlan([job(str(number), timeout_s=5.0) for number in range(9)])

    def execute(each: Job) -> None:
        if not go_on.is_set():
            go_on.wait(30)

    found = fake(plan, execute, workers=2, single_job=False, max_attempts=9, **QUICK)
    for number in (1, 2):
        until(lambda: found.after(0.0)["active_jobs"] == 2)
        until(lambda n=number: found.after(5.1)["timed_out"] == 2 * n)
    counts = found.after(2.0)
    assert (counts["abandoned_threads"], counts["alive_workers"]) == (4, 0)
    assert "4 threads still run jobs that have timed out, and at most 4 threads are" in caplog.text
    assert caplog.text.count("does not start") == 1
    assert found.manager.add([job("x")]) == [local_queue.Refusal("stuck")]
    assert "every thread runs a job that has timed out" in str(local_queue.Refusal("stuck"))
    fetched = counts["fetched"]
    assert found.after(61.0)["fetched"] == fetched, "nothing is claimed that cannot start"
    go_on.set()
    until(lambda: found.after(1.0)["abandoned_threads"] == 0)
    until(lambda: found.after(1.0) and all(state(plan, str(n)) == "completed" for n in range(9)))


def test_a_generator_that_takes_too_long_ends_at_its_next_yield(started: Any) -> None:
    from queue_workflows import register_ingest_task

    closed = threading.Event()

    def forever() -> Iterator[None]:
        try:
            while True:
                time.sleep(0.001)
                yield
        finally:
            closed.set()

    register_ingest_task("forever", forever)
    plan = local_queue.MemoryPlan([Job("a", "forever")])
    started(plan, timeout_s=0.05, max_attempts=1)
    until(lambda: state(plan, "a") == "failed")
    until(closed.is_set)


DEAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@DEAD
def test_a_worker_thread_that_dies_is_replaced_and_no_job_is_lost(
    started: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, dies = local_queue.JobQueue.get, [True]

    def get_or_die(queue: local_queue.JobQueue, **more: Any) -> Any:
        if dies:
            dies.clear()
            raise SystemExit
        return get(queue, **more)

    # Not by PyThreadState_SetAsyncExc: while one is pending for a thread that waits, CPython 3.11
    # lets the other threads make no progress under a trace function, such as that of coverage.
    monkeypatch.setattr(local_queue.JobQueue, "get", get_or_die)
    constants.put(monkeypatch, "local_queue.threads.REPEAT_S", 0.05)
    plan = local_queue.MemoryPlan()
    manager = started(plan, lambda _: "x", workers=1)
    until(lambda: manager.stats()["dead_threads"] == 1)
    plan.add(job("a"))
    until(lambda: state(plan, "a") == "completed")
    assert "FATAL: Worker-1 has died" in caplog.text


@DEAD
def test_a_thread_that_dies_between_two_jobs_ends_none_of_them_again(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, dies, ran = local_queue.JobQueue.get, [True], list[str]()

    def get_or_die(queue: local_queue.JobQueue, **more: Any) -> Any:
        if ran and dies:
            dies.clear()
            raise SystemExit
        return get(queue, **more)

    monkeypatch.setattr(local_queue.JobQueue, "get", get_or_die)
    plan = local_queue.MemoryPlan([job("a")])
    manager = started(plan, lambda each: ran.append(each.id), workers=1, single_job=False)
    until(lambda: manager.stats()["dead_threads"] == 1)
    plan.add(job("b"))
    until(lambda: state(plan, "b") == "completed")
    assert (ran, state(plan, "a")) == (["a", "b"], "completed")


@DEAD
def test_a_master_thread_that_dies_is_replaced(
    started: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "local_queue.threads.REPEAT_S", 0.05)
    plan = local_queue.MemoryPlan()
    manager = started(plan, lambda _: None, fetch_every_s=0.01)
    master = next(each for each in threading.enumerate() if each.name == "local-queue-master")
    until(lambda: _raise_in(master))
    until(lambda: manager.stats()["dead_threads"] == 1)
    until(lambda: manager.stats()["master_thread_alive"])
    plan.add(job("a"))
    until(lambda: state(plan, "a") == "completed")
    assert "FATAL: the master thread has died" in caplog.text


def _raise_soon(thread_id: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit)
    )


def _raise_in(thread: threading.Thread) -> bool:
    """End a thread by an exception outside of its tasks; return whether it has ended."""
    _raise_soon(thread.ident or 0)
    thread.join(0.05)
    return not thread.is_alive()


def test_full_memory_pauses_fetch_and_pull_until_it_is_free_again(fake: Any) -> None:
    go_on = threading.Event()
    fetched: list[float] = []

    class Plan(local_queue.MemoryPlan):
        def fetch_ready(self) -> list[Job]:
            fetched.append(found.clock.now)
            return super().fetch_ready()

    plan = Plan([job("a"), job("b")])
    found = fake(plan, lambda each: go_on.wait(30) if each.id == "a" else None, workers=1,
                 grace_s=0.0, cooldown_s=0.0, single_job=False)  # fmt: skip
    found.after(0.0)
    until(lambda: state(plan, "a") == "running")
    found.ram = 95.0
    assert found.after(5.0)["throttled_by"] == "RAM at 95.0 % (limit 90 %)"
    found.after(120.0)
    assert len(fetched) == 1
    found.ram = 79.0
    found.after(5.0)
    assert len(fetched) == 2
    go_on.set()
    until(lambda: state(plan, "b") == "completed")
    assert found.manager.stats()["throttle_seconds"] == {"RAM": pytest.approx(125.0)}


def test_memory_that_is_free_again_resumes_no_queue_that_the_app_paused(fake: Any) -> None:
    go_on = threading.Event()
    plan = local_queue.MemoryPlan([job("a")])
    found = fake(plan, lambda each: go_on.wait(30) if each.id == "a" else None, workers=1,
                 grace_s=0.0, cooldown_s=0.0, single_job=False)  # fmt: skip
    queue = found.manager.queue
    found.after(0.0)
    until(lambda: state(plan, "a") == "running")
    queue.pause()
    found.ram = 95.0
    assert found.after(5.0)["throttled_by"] is not None
    found.ram = 79.0
    assert found.after(5.0)["throttled_by"] is None
    plan.add(job("b"))
    assert found.manager.add([job("b")]) == [None]
    assert queue.get(0) is None
    queue.resume()
    go_on.set()
    until(lambda: state(plan, "b") == "completed")


def test_a_job_that_only_the_plan_calls_running_is_refused_and_reported_once(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Plan(local_queue.MemoryPlan):
        stale = True

        def fetch_ready(self) -> list[Job]:
            return [job("a")]

        def is_currently_running(self, job_id: str, /) -> bool:
            return self.stale

    plan = Plan([job("a")])
    found = fake(plan, workers=1)
    for _ in range(30):
        found.after(15.0)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "is marked as running" in caplog.text
    assert found.after(0.0)["stale_running_job_ids"] == ["a"]
    plan.stale = False
    found.after(60.0)
    until(lambda: state(plan, "a") == "completed")
    assert found.after(0.0)["stale_running_job_ids"] == []


def test_a_job_that_another_process_has_taken_does_not_run(started: Any) -> None:
    class Plan(local_queue.MemoryPlan):
        def mark_running(self, job: Job, /) -> bool:
            return False

    ran: list[Job] = []
    manager = started(Plan([job("a")]), ran.append)
    until(lambda: manager.stats()["fetched"] >= 2)
    assert ran == []


def test_a_plan_that_raises_is_called_again_and_loses_no_outcome(
    started: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "local_queue.threads.REPEAT_S", 0.05)
    broken = {"fetch_ready", "mark_running", "mark_done"}

    class Plan(local_queue.MemoryPlan):
        def _fails_once(self, what: str) -> None:
            if what in broken:
                broken.discard(what)
                raise OSError(what)

        def fetch_ready(self) -> list[Job]:
            self._fails_once("fetch_ready")
            return super().fetch_ready()

        def mark_running(self, job: Job, /) -> bool:
            self._fails_once("mark_running")
            return super().mark_running(job)

        def mark_done(self, job: Job, result: Any, /) -> None:
            self._fails_once("mark_done")
            super().mark_done(job, result)

    ran: list[Job] = []
    plan = Plan([job("a")])
    started(plan, ran.append)
    until(lambda: state(plan, "a") == "completed")
    assert (len(ran), broken) == (1, set())
    assert "the plan does not take the outcome of job a" in caplog.text


def test_the_log_has_the_documented_words(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "queue_workflows.local_queue")
    plan = local_queue.MemoryPlan([job("a", name="Nightly")])
    manager = started(plan, lambda _: None, workers=1)
    until(lambda: manager.stats()["finished"] == 1)
    # The master logs the counts once it has added the jobs, which may have ended by then.
    until(lambda: re.search(r"📊 [01] jobs in the queue, [01] active, [01] of 1 ", caplog.text))
    for words in (
        "👑 Master fetched 1 jobs from database", "📥 Added job 'Nightly' to queue",
        "👷 Worker-1 pulled job 'Nightly' from queue", "✅ Worker-1 finished job 'Nightly'",
    ):  # fmt: skip
        assert words in caplog.text


def test_the_log_has_the_documented_words_for_what_is_refused_fails_or_is_full(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "queue_workflows")
    go_on = threading.Event()

    def execute(each: Job) -> None:
        go_on.wait(30)
        raise ValueError("wrong")

    plan = local_queue.MemoryPlan([job("a", name="Nightly"), job("b")])
    found = fake(plan, execute, workers=1, grace_s=0.0, max_attempts=1)
    found.after(0.0)
    until(lambda: state(plan, "a") == "running")
    found.manager.add([job("b", name="Weekly")])
    found.ram = 93.14
    found.after(5.0)
    found.ram = 42.0
    found.after(5.0)
    go_on.set()
    until(lambda: state(plan, "a") == "failed")
    for words in (
        "job 'Weekly' (b): already in queue", "❌ Worker-1 failed job 'Nightly' (a)",
        "🚨 MEMORY THROTTLE ACTIVE: RAM at 93.1 % (limit 90 %)",
        "✅ MEMORY THROTTLE RELEASED after 5 s: RAM at 42.0 % (limit 90 %)",
    ):  # fmt: skip
        assert words in caplog.text


def test_the_statistics_have_the_documented_names() -> None:
    text = (ROOT / "docs" / "local-queue-faults.md").read_text()
    documented = text.partition("`manager.stats()` returns ")[2].partition("\n\n|")[0]
    names = set(re.findall(r"`([a-z_]+)`", documented))
    assert names == set(local_queue.JobQueueManager(local_queue.MemoryPlan()).stats())
    assert names > {
        "queue_size", "active_jobs", "active_job_ids", "queued_job_ids", "total_workers",
        "alive_workers", "master_thread_alive",
    }  # fmt: skip


def test_stop_waits_for_running_jobs_and_starts_no_other(started: Any) -> None:
    go_on, running = threading.Event(), threading.Event()

    def execute(_: Job) -> str:
        running.set()
        go_on.wait(30)
        return "done"

    plan = local_queue.MemoryPlan([job("a"), job("b")])
    manager = started(plan, execute, workers=1)
    until(running.is_set)
    drained: list[bool] = []
    with _thread(lambda: drained.append(manager.stop(10))):
        until(lambda: manager.add([job("c")]) == [local_queue.Refusal("closed")])
        go_on.set()
    assert drained == [True]
    assert (state(plan, "a"), state(plan, "b")) == ("completed", "pending")
    assert manager.stats()["alive_workers"] == 0


def test_a_job_that_still_runs_at_the_deadline_of_stop_is_pending_again(started: Any) -> None:
    go_on, running = threading.Event(), threading.Event()

    def execute(_: Job) -> None:
        running.set()
        go_on.wait(30)

    plan = local_queue.MemoryPlan([job("a")])
    manager = started(plan, execute, workers=1)
    until(running.is_set)
    assert manager.stop(0.01) is False
    assert (state(plan, "a"), plan.entry("a").error) == ("pending", "the queue was stopped")
    go_on.set()
    until(lambda: manager.stats()["alive_workers"] == 0)
    assert state(plan, "a") == "pending"


def test_stop_ends_a_thread_that_rests_while_another_one_works(started: Any) -> None:
    working = threading.Event()

    def execute(_: Job) -> None:
        # The first thread works: it is the one that is waited for first.
        if threading.current_thread().name == "local-queue-worker-1":
            until(lambda: len(_workers()) == 2)
            working.set()
            until(lambda: _workers() == ["local-queue-worker-1"], timeout_s=5)
        else:
            until(working.is_set)

    plan = local_queue.MemoryPlan([job("a"), job("b")])
    manager = started(plan, execute, workers=2, single_job=False, cooldown_s=1000.0)
    until(lambda: working.is_set() and "completed" in (state(plan, "a"), state(plan, "b")))
    assert manager.stop(20) is True
    assert (state(plan, "a"), state(plan, "b")) == ("completed", "completed")


def _workers() -> list[str]:
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("local-queue-worker")]


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_plan_that_raises_at_the_start_of_a_job_gives_it_up_until_the_next_fetch(
    started: Any, error: type[BaseException]
) -> None:
    class Plan(local_queue.MemoryPlan):
        asked = 0

        def mark_running(self, job: Job, /) -> bool:
            self.asked += 1
            if self.asked == 1:
                raise error
            return super().mark_running(job)

    plan = Plan([job("a")])
    manager = started(plan, lambda _: None)
    until(lambda: state(plan, "a") == "completed")
    assert manager.stats()["dead_threads"] == 0


def test_a_manager_starts_once(started: Any) -> None:
    manager = started(local_queue.MemoryPlan())
    with pytest.raises(RuntimeError, match="started before"):
        manager.start()


def test_an_id_is_unique_in_a_plan() -> None:
    plan = local_queue.MemoryPlan([job("a")])
    with pytest.raises(errors.InvalidConfig, match="'a' is pending"):
        plan.add(job("a"))


def test_with_many_threads_no_job_runs_twice_at_once_and_none_is_lost(started: Any) -> None:
    now: set[str] = set()
    runs: dict[str, int] = {}
    overlaps: list[str] = []
    lock = threading.Lock()

    def execute(each: Job) -> None:
        with lock:
            runs[each.id] = runs.get(each.id, 0) + 1
            if each.id in now:
                overlaps.append(each.id)
            now.add(each.id)
        time.sleep(0.0005)
        with lock:
            now.remove(each.id)
        if runs[each.id] == 1 and int(each.id) % 3 == 0:
            raise ValueError("first attempt")

    names = [str(number) for number in range(150)]
    plan = local_queue.MemoryPlan([job(name) for name in names])
    manager = started(plan, execute, workers=16, fetch_every_s=0.01)
    with ExitStack() as threads:
        for _ in range(4):
            threads.enter_context(
                _thread(lambda: [manager.add([job(name)], force=True) for name in names])
            )
        until(lambda: all(state(plan, name) == "completed" for name in names))
    assert overlaps == []
    assert runs == {name: 2 if int(name) % 3 == 0 else 1 for name in names}


def test_a_task_gets_the_reason_that_its_job_has() -> None:
    told: list[Any] = []
    config.register_ingest_task(
        "both", lambda reason, args: told.append((reason, queue_workflows.current_job().reason))
    )
    manager = local_queue.JobQueueManager(
        local_queue.MemoryPlan([Job("a", "both", {})]), workers=1, **QUICK
    )
    manager.start()
    until(lambda: told)
    manager.stop()
    assert told == [("tick", "tick")]
