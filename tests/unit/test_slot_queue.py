"""When a worker with slots records the results of a queue: at once, or with those of other jobs."""

from __future__ import annotations

import math
from unittest import mock

import pytest

from queue_workflows.engine import job_tables, outcomes
from queue_workflows.runtime import clock
from queue_workflows.worker import (
    current_job,
    executor_shape,
    guards,
    slot_ahead,
    slot_queue,
)
from tests.support import transitions

MANY = slot_ahead.TINY // 2 + 1
"""More than half of the jobs that wait for two slots."""
OUTCOME = outcomes.Outcome("completed", 0.0001, "{}")


class Queue:
    """A queue of two slots whose executors are replaced by mocks, at a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
        self.now = clock.boot_s()
        self.holds_crashed = False
        monkeypatch.setattr(clock, "boot_s", lambda: self.now)
        registered = mock.Mock(isolated_tasks=[], async_tasks=[], announces=False)
        self.queue = slot_queue.SlotQueue(
            mock.Mock(who=lambda: transitions.who("load", "w", host="h", lease_s=60.0)),
            executor_shape.Shape(2),
            limits=executor_shape.NO_LIMITS,
            mux=mock.Mock(),
            registered=registered,
            keeper=mock.Mock(holds_crashed=lambda: self.holds_crashed),
            endings=mock.Mock(),
            dedicated=mock.Mock(),
        )
        self.queue.executors = mock.Mock(idle=0, replace_at=math.inf)
        self.queue.replace(0.0, fork=False)  # no limit of the queue is known
        for _ in range(slot_ahead.ROUNDS * 2):
            self.queue.ahead.ended(seconds)

    def claimed(self, count: int) -> None:
        """Let so many claimed jobs wait for an executor."""
        for number in range(count):
            self.queue.runs.add(transitions.claimed_row(100 + number))

    def ended(self, number: int) -> None:
        """Let the handler of a job end."""
        work = current_job.Work(
            job_tables.INGEST_JOBS, transitions.claimed_row(number), guards.LeaseEnd(self.now, 60.0)
        )
        self.queue.records.add(work, OUTCOME)

    @property
    def waits_s(self) -> float:
        """In how many seconds the queue has something to do."""
        return self.queue.timeout(0.0, stopping=False)


def test_a_tiny_result_waits_for_those_of_claimed_jobs_and_not_longer_than_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Queue(monkeypatch, seconds=0.0001)
    found.claimed(MANY)
    found.ended(2)
    assert found.waits_s == pytest.approx(slot_ahead.COLLECT_S)
    found.now += slot_ahead.COLLECT_S * 0.6
    found.ended(3)
    assert found.waits_s == pytest.approx(slot_ahead.COLLECT_S * 0.4)
    found.now += slot_ahead.COLLECT_S * 0.6
    assert found.waits_s == 0.0


def test_a_tiny_result_is_recorded_at_once_if_a_statement_must_claim_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Queue(monkeypatch, seconds=0.0001)
    found.claimed(MANY - 1)
    found.ended(2)
    assert found.waits_s == 0.0


def test_a_result_is_recorded_at_once_if_handlers_are_not_tiny(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Queue(monkeypatch, seconds=slot_ahead.TINY_S)
    found.claimed(MANY)
    found.ended(2)
    assert found.waits_s == 0.0


def test_the_end_of_a_job_whose_executor_died_makes_results_be_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Queue(monkeypatch, seconds=0.0001)
    found.claimed(MANY)
    found.ended(2)
    found.queue.runs.hand_back(
        current_job.Work(
            job_tables.INGEST_JOBS, transitions.claimed_row(3), guards.LeaseEnd(found.now, 60.0)
        ),
        "test",
    )
    assert found.waits_s == 0.0


def test_a_worker_that_stops_records_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Queue(monkeypatch, seconds=0.0001)
    found.claimed(MANY)
    found.ended(2)
    assert found.queue.timeout(0.0, stopping=True) == 0.0


@pytest.mark.parametrize("holds_crashed", [False, True])
def test_nothing_is_claimed_ahead_while_a_job_is_held_that_may_kill_the_worker(
    monkeypatch: pytest.MonkeyPatch, *, holds_crashed: bool
) -> None:
    found = Queue(monkeypatch, seconds=0.0001)
    found.holds_crashed = holds_crashed
    found.ended(2)
    step = mock.Mock(return_value=[])
    monkeypatch.setattr(found.queue.records, "step", step)
    found.queue.step(stopping=False)
    ((free,), _) = step.call_args
    assert free == (0 if holds_crashed else slot_ahead.TINY)
