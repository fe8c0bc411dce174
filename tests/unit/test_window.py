"""How many jobs a worker claims beyond its free executors."""

from __future__ import annotations

import pytest

from queue_workflows.worker import queue_state


def proved(
    slots: int, *, most: int = queue_state.EACH, statement_s: float = 0.004
) -> queue_state.Window:
    """A worker whose handlers take 1 ms, and whose statements take this long."""
    found = queue_state.Window(slots, most)
    for _ in range(100):
        found.stated(statement_s)
    for _ in range(queue_state.ROUNDS * slots):
        found.ended(0.001)
    return found


def test_a_worker_claims_ahead_only_once_handlers_have_proved_to_be_short() -> None:
    found = queue_state.Window(2, queue_state.EACH)
    for _ in range(queue_state.ROUNDS * 2 - 1):
        found.ended(0.001)
        assert found.ahead == 0
    found.ended(0.001)
    assert found.ahead > 0


@pytest.mark.parametrize("slots", [1, 4])
def test_as_many_wait_as_end_during_one_statement(slots: int) -> None:
    assert proved(slots).ahead == pytest.approx(4 * slots, abs=1)


def test_one_long_handler_ends_it() -> None:
    found = proved(2)
    found.ended(queue_state.SHORT_S * 2)
    assert found.ahead == 0


def test_jobs_that_waited_too_long_end_it() -> None:
    found = proved(2)
    found.reset()
    assert found.ahead == 0


@pytest.mark.parametrize(("most", "ahead"), [(0, 0), (3, 6), (queue_state.EACH, 64)])
def test_however_short_the_handlers_are_no_more_than_the_most_wait(most: int, ahead: int) -> None:
    assert proved(2, most=most, statement_s=10.0).ahead == ahead


def test_after_the_queue_was_empty_jobs_are_claimed_ahead_only_once_claims_find_enough() -> None:
    """A chain of nodes: each claim finds the one that follows, and no more."""
    found = proved(1)
    looked = 0
    for _ in range(100):
        ahead = found.ahead
        looked += ahead > 0
        found.claimed(1, 1 + ahead, ahead=ahead > 0)
    assert looked == pytest.approx(100 / (1 + queue_state.LONGEST_PAUSE), abs=3)
    for _ in range(queue_state.LONGEST_PAUSE):
        found.claimed(1, 1, ahead=False)
    for _ in range(10):
        ahead = found.ahead
        assert ahead > 0, "the queue has enough again"
        found.claimed(1 + ahead, 1 + ahead, ahead=True)
