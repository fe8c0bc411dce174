"""The claimed jobs of a worker with slots: none is lost between the executors and the waiting."""

from __future__ import annotations

from unittest import mock

import pytest

from queue_workflows.engine import job_tables
from queue_workflows.executor import launcher_client, protocol
from queue_workflows.worker import (
    executor_set,
    executor_shape,
    executors,
    guards,
    slot_ahead,
    slot_runs,
)
from tests.support import transitions


class Waiting:
    """The claimed jobs of a worker whose executors are replaced by a mock."""

    def __init__(self, count: int) -> None:
        self.set = mock.Mock(spec=executor_set.ExecutorSet)
        self.set.traffic = mock.Mock()
        self.set.queued = 0
        self.set.busy.return_value = []
        self.set.has_room.return_value = True
        self.records, self.endings = mock.Mock(), mock.Mock()
        self.endings.decision.return_value = None
        self.handle = executors.Handle(mock.Mock(), batched=True)
        self.set.take.return_value = self.handle
        registered = mock.Mock(isolated_tasks=["alone"])
        self.runs = slot_runs.Runs(
            job_tables.INGEST_JOBS,
            transitions.who("load", "w", host="h", lease_s=60.0),
            mock.Mock(sent_at=0.0),
            registered,
            executors_=self.set,
            records=self.records,
            keeper=mock.Mock(),
            endings=self.endings,
            ahead=slot_ahead.Ahead(1, count),
            shape=executor_shape.Shape(1, count),
        )
        for number in range(count):
            self.runs.add(transitions.claimed_row(number))

    def handed_back(self) -> list[str]:
        """The ids of the jobs whose end is to be written."""
        return [call.args[0].job["id"] for call in self.records.add_ending.call_args_list]


def test_recalled_jobs_wait_again_in_their_order_and_none_is_lost_if_a_fork_fails() -> None:
    found = Waiting(4)
    found.runs.start_waiting()
    assert (found.handle.count, found.runs.waiting) == (4, 0)
    found.set.take.side_effect = launcher_client.ForkRefused("a thread runs")
    found.runs.received(found.handle, protocol.Recalled([2, 3, 4]))
    assert (found.handle.count, found.runs.waiting) == (1, 3)
    with pytest.raises(launcher_client.ForkRefused):
        found.runs.start_waiting()
    found.runs.return_waiting(stopping=True)
    assert found.handed_back() == ["1", "2", "3"]
    assert found.runs.waiting == 0


def test_a_job_that_ended_before_it_could_be_recalled_does_not_wait_again() -> None:
    found = Waiting(2)
    found.runs.start_waiting()
    ended = ("completed", 0.0, "{}", "", None, None, None, [], "", None, None, [])
    outcome = protocol.Outcome(2, *ended)
    found.runs.received(found.handle, outcome)
    found.runs.received(found.handle, protocol.Recalled([2]))
    assert (found.handle.count, found.runs.waiting) == (1, 0)


@pytest.mark.parametrize(
    ("code", "took", "kind"),
    [
        (guards.EXIT_BUDGET, 5.0, "timed_out"),
        (guards.EXIT_BUDGET, 4.9, "completed"),
        (guards.EXIT_STALL, 9.0, "completed"),
    ],
)
def test_a_decided_time_limit_holds_unless_the_result_was_complete_before_it(
    code: int, took: float, kind: str
) -> None:
    """The limit counts from the start by the worker; the handler itself may have begun later."""
    found = Waiting(0)
    found.runs.add(transitions.claimed_row(0) | {"timeout_s": 5.0})
    found.runs.start_waiting()
    assert found.handle.first is not None
    found.handle.first.decided(guards.Failure(code, "budget_trip", "too long"))
    at = found.handle.first.started + took + 1e-6
    ended = ("completed", 0.3, "{}", "", None, None, None, [], "", None, None, [], at)
    found.runs.received(found.handle, protocol.Outcome(1, *ended))
    ((_, outcome),) = [each.args for each in found.records.add.call_args_list]
    assert (outcome.kind, outcome.seconds) == (kind, 0.3)


def test_only_the_job_that_ran_is_charged_for_the_death_of_a_batch() -> None:
    found = Waiting(3)
    found.runs.start_waiting()
    found.handle.died = protocol.Died(1, None, 9, False, 1, 0.0, 0.0, False)
    found.runs.died(found.handle, found.handle.take_all())
    assert found.handed_back() == ["0"]
    assert found.runs.waiting == 2
