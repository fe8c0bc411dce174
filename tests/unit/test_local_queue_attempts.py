"""The in-process queue counts the attempts and the statistics of its jobs."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from queue_workflows import local_queue
from queue_workflows.local_queue import attempts, threads
from queue_workflows.local_queue import execution_plan as plans
from tests.support import clocks, constants, local_queue_app
from tests.support.wait import until

Job = local_queue.Job


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_between_two_steps_loses_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt, dies = attempts.Outcomes.attempt, [True]

    def attempt_or_die(self: attempts.Outcomes, job_id: str) -> int:
        if dies:
            dies.clear()
            raise MemoryError
        return attempt(self, job_id)

    monkeypatch.setattr(attempts.Outcomes, "attempt", attempt_or_die)
    constants.put(monkeypatch, "local_queue.threads.REPEAT_S", 0.05)
    plan = local_queue.MemoryPlan([Job("a", "task")])
    with local_queue_app.manager(plan, lambda _: "x", workers=1, fetch_every_s=0.02) as manager:
        until(lambda: (entry := plan.entry("a")) is not None and entry.result == "x")
        assert manager.stats()["dead_threads"] == 1


def test_a_plan_that_takes_long_to_store_an_outcome_keeps_no_thread_busy() -> None:
    stored = threading.Event()

    class Plan(local_queue.MemoryPlan):
        def mark_done(self, job: Job, result: Any, /) -> None:
            stored.wait(20)
            super().mark_done(job, result)

    clock = clocks.Clock(1000.0)
    plan = Plan([Job("a", "task", timeout_s=5.0)])
    serving = local_queue_app.manager(plan, lambda _: "x", workers=1, now_fn=clock)
    serving.start(threads=False)
    try:
        serving.run_due()
        until(lambda: serving.statistics.tasks.get("task"))
        clock.now += 10.0
        assert serving.threads.pause_s() == threads.REPEAT_S
    finally:
        stored.set()
        serving.stop()


def test_without_a_limit_a_plan_keeps_all_ended_jobs() -> None:
    count = plans.KEEP_ENDED + 1
    jobs = [Job(str(each), "t") for each in range(count)]
    for keep, kept in (({"keep_ended": None}, count), ({}, count - 1)):
        plan = local_queue.MemoryPlan(jobs, **keep)
        for job in jobs:
            plan.mark_done(job, None)
        assert sum(plan.entry(job.id) is not None for job in jobs) == kept


def test_attempts_of_claimed_jobs_are_not_counted_here() -> None:
    counts, queue = attempts.Statistics(), local_queue.JobQueue()
    own: Any = Mock(spec=plans.ClaimingPlan)
    own.mark_failed.return_value = False
    found = attempts.Outcomes(own, queue, counts, 3)
    found.failed(Job("a", "t"), "no")
    assert found.attempt("a") == 1


def test_however_many_tasks_are_named_the_statistics_stay_small() -> None:
    counts = attempts.Statistics()
    for number in range(attempts.MAX_TASKS + 50):
        counts.ended("Worker-1", str(number), 1.0)
    assert len(counts.tasks) == attempts.MAX_TASKS + 1
    assert counts.tasks[attempts.OTHER_TASKS].ended == 50
