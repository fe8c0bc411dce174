"""How many jobs a worker with slots claims beyond its free executors."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("slots", "most"), [(1, 32), (2, 32), (4, 64)])
def test_many_tiny_jobs_wait(slots: int, most: int) -> None:
    ahead = slot_ahead.Ahead(slots)
    for number in range(slot_ahead.ROUNDS * slots):
        assert not ahead.are_tiny, number
        ahead.ended(slot_ahead.TINY_S / 2)
    assert ahead.are_tiny
    assert ahead.room(3) == most - 3
    assert ahead.each == 1
    assert (ahead.suffice(most // 2), ahead.suffice(most // 2 + 1)) == (False, True)


def test_a_handler_that_is_short_but_not_tiny_leaves_one_job_for_each_slot() -> None:
    ahead = slot_ahead.Ahead(2)
    for _ in range(slot_ahead.ROUNDS * 2):
        ahead.ended(slot_ahead.TINY_S / 2)
    ahead.ended(slot_ahead.TINY_S)
    assert (ahead.are_tiny, ahead.room(0)) == (False, 2)


def test_where_results_must_not_wait_one_job_waits_for_each_slot() -> None:
    ahead = slot_ahead.Ahead(2, collects=False)
    for _ in range(slot_ahead.ROUNDS * 2):
        ahead.ended(slot_ahead.TINY_S / 2)
    assert (ahead.room(0), ahead.suffice(2)) == (2, False)


def test_a_large_batch_is_not_reduced_for_tiny_jobs() -> None:
    ahead = slot_ahead.Ahead(2, batch=50)
    for _ in range(slot_ahead.ROUNDS * 2):
        ahead.ended(slot_ahead.TINY_S / 2)
    assert (ahead.room(0), ahead.each) == (100, 50)


def test_after_the_queue_was_empty_jobs_are_claimed_ahead_only_once_claims_find_enough() -> None:
    """A chain of nodes: each claim finds the one that follows, and no more."""
    ahead = proved(1)
    looked = 0
    for _ in range(100):
        room = ahead.room(0)
        looked += room > 0
        ahead.claimed(1, 1 + room, ahead=room > 0)
    assert looked == pytest.approx(100 / (1 + slot_ahead.LONGEST_PAUSE), abs=3)
    for _ in range(slot_ahead.LONGEST_PAUSE):
        ahead.claimed(1, 1, ahead=False)
    for _ in range(10):
        room = ahead.room(0)
        assert room > 0, "the queue has enough again"
        ahead.claimed(1 + room, 1 + room, ahead=True)
