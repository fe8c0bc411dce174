"""When a worker claims again after a claim that returned fewer jobs than it may."""

from __future__ import annotations

import math
import random

import pytest

from queue_workflows.claim import claims
from queue_workflows.worker import claim_times
from tests.support.clocks import Clock

POLL_S = 1.0
NOTHING = claims.Wait()


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(100.0)


class Times:
    """A worker's times, each of whose claims is answered at once."""

    def __init__(self, clock: Clock[float]) -> None:
        self._clock, self._own = clock, claim_times.ClaimTimes()
        self._at = math.inf

    @property
    def wait_s(self) -> float:
        return max(0.0, self._at - self._clock.now)

    def claim(self, wait: claims.Wait = NOTHING, *, claimed: bool = False) -> None:
        now = self._clock.now
        self._at = self._own.after(now, now, wait, claimed=claimed)


@pytest.fixture
def times(clock: Clock[float]) -> Times:
    return Times(clock)


def test_nothing_is_known_at_first_and_after_a_claim_that_returned_no_times(
    times: Times,
) -> None:
    assert times.wait_s == math.inf
    times.claim(claims.Wait(due_s=0.5))
    times.claim()
    assert times.wait_s == math.inf


def test_a_limit_that_admits_a_job_now_is_not_asked_about_without_pause(
    clock: Clock[float], times: Times
) -> None:
    """The first job waits for a limit of its partition, but another session has locked its row."""
    waits: list[float] = []
    for _ in range(4):
        times.claim(claims.Wait(limit_s=0.0))
        waits.append(times.wait_s)
        clock.now += times.wait_s
    assert waits == pytest.approx([0.0, 0.01, 0.02, 0.04])


def test_the_earlier_of_a_limit_and_a_due_job_counts_and_comes_nearer(
    clock: Clock[float], times: Times
) -> None:
    times.claim(claims.Wait(limit_s=0.75, due_s=0.5))
    assert times.wait_s == 0.5
    clock.now += 0.25
    assert times.wait_s == 0.25
    clock.now += 0.5
    assert times.wait_s == 0.0
    times.claim(claims.Wait(limit_s=0.25, due_s=0.5))
    assert times.wait_s == 0.25


def test_a_due_job_that_others_took_delays_the_next_one_and_a_claimed_one_ends_that(
    clock: Clock[float], times: Times
) -> None:
    waits: list[float] = []
    for _ in range(5):
        times.claim(claims.Wait(due_s=0.001))
        waits.append(times.wait_s)
        clock.now += times.wait_s
    assert waits == pytest.approx([0.001, 0.01, 0.02, 0.04, 0.08])
    times.claim(claims.Wait(due_s=0.001), claimed=True)
    assert times.wait_s == pytest.approx(0.001)


def test_claims_for_other_reasons_delay_nothing(clock: Clock[float], times: Times) -> None:
    for _ in range(100):
        times.claim(claims.Wait(due_s=0.5))
        clock.now += 0.01  # a notification, before the time
    times.claim(claims.Wait(due_s=0.5))
    assert times.wait_s == 0.5


def test_the_pause_ends_when_no_job_is_due_soon(clock: Clock[float], times: Times) -> None:
    for _ in range(8):
        times.claim(claims.Wait(due_s=0.001))
        clock.now += times.wait_s
    times.claim()
    times.claim(claims.Wait(due_s=0.001))
    assert times.wait_s == pytest.approx(0.001)


@pytest.mark.parametrize("seed", range(5))
def test_jobs_that_become_due_all_the_time_and_cannot_be_claimed_cost_little(
    clock: Clock[float], times: Times, seed: int
) -> None:
    """Such as jobs whose lock key is held."""
    draw, begun, count = random.Random(seed), clock.now, 0
    while clock.now < begun + 60:
        times.claim(claims.Wait(due_s=draw.uniform(0.0, 0.002)))
        count += 1
        clock.now += min(POLL_S, times.wait_s)
    assert count <= 60 + 10
