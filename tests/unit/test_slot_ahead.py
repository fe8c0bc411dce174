"""How many jobs a worker with slots claims beyond its free executors."""

from __future__ import annotations

from queue_workflows.worker import slot_ahead


def proved(slots: int) -> slot_ahead.Ahead:
    """A worker whose handlers have all been short."""
    ahead = slot_ahead.Ahead(slots)
    for _ in range(slot_ahead.ROUNDS * slots):
        ahead.ended(0.001)
    return ahead


def test_a_worker_claims_ahead_only_once_handlers_have_proved_to_be_short() -> None:
    ahead = slot_ahead.Ahead(2)
    for _ in range(slot_ahead.ROUNDS * 2 - 1):
        ahead.ended(0.001)
        assert ahead.room(0) == 0
    ahead.ended(0.001)
    assert ahead.room(0) == 2


def test_one_long_handler_ends_it() -> None:
    ahead = proved(2)
    ahead.ended(slot_ahead.SHORT_S * 2)
    assert ahead.room(0) == 0


def test_one_job_waits_for_each_slot_at_most() -> None:
    ahead = proved(4)
    assert [ahead.room(waiting) for waiting in range(6)] == [4, 3, 2, 1, 0, 0]


def test_jobs_that_waited_too_long_end_it() -> None:
    ahead = proved(2)
    ahead.reset()
    assert ahead.room(0) == 0
