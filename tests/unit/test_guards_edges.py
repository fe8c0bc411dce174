"""Guards at their edges: the exact second, the exact share, and what the reasons say."""

from __future__ import annotations

import pytest

from queue_workflows.runtime import exit_codes
from queue_workflows.telemetry.worker_usage import Sample
from queue_workflows.worker import guards
from tests.unit.test_guards import (
    BUDGET_S,
    BUSY,
    EDGE,
    IDLE,
    LOAD_S,
    T0,
    UNKNOWN,
    code,
    health,
    stall,
)


def test_the_exit_codes_are_those_of_the_contract() -> None:
    names = ("BUDGET", "STALL", "LOST", "GPU_HEALTH", "CONTROL")
    assert [getattr(exit_codes, name) for name in names] == [75, 76, 77, 78, 79]


def test_a_guard_of_the_time_fails_at_any_time_after_its_end() -> None:
    assert code(guards.Budget(T0, 10.0).check(T0 + 500)) == 75
    assert code(guards.LeaseEnd(T0, 600.0).check(T0 + 5000)) == 77


def test_a_quarter_of_a_short_lease_is_left_when_it_is_given_up() -> None:
    guard = guards.LeaseEnd(T0, 4.0)
    assert guard.check(T0 + 2.9) is None
    assert code(guard.check(T0 + 3)) == 77


# --- GPU health


def test_a_sample_is_due_every_30_s_or_ten_times_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guards.GpuHealth(T0, BUDGET_S)
    assert [guard.wants_sample(T0 + s) for s in (29.5, 30)] == [False, True]
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S", "100")
    guard = guards.GpuHealth(T0, BUDGET_S)
    assert [guard.wants_sample(T0 + s) for s in (9.5, 10)] == [False, True]


def test_one_sample_is_due_from_the_end_of_the_window_on() -> None:
    guard = guards.GpuHealth(T0, BUDGET_S)
    guard.sample(T0 + LOAD_S - 5, UNKNOWN)
    assert [guard.wants_sample(T0 + LOAD_S + s) for s in (-1, 0, 1)] == [False, True, True]
    guard.sample(T0 + LOAD_S + 2, UNKNOWN)
    assert not guard.wants_sample(T0 + LOAD_S + 3)


def test_three_intervals_without_a_sample_are_bridged() -> None:
    guard = guards.GpuHealth(T0, BUDGET_S)
    assert [guard.is_blind(T0 + s) for s in (80, 90, 90.5)] == [False, False, True]


def test_five_seconds_without_a_sample_are_bridged_in_a_short_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S", "2")
    guard = guards.GpuHealth(T0, BUDGET_S)
    assert [guard.is_blind(T0 + s) for s in (4.5, 5, 5.5)] == [False, False, True]


def test_three_samples_count_from_the_last_activity_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_INTERVAL_S", "2")
    guard = guards.GpuHealth(T0, BUDGET_S)
    guard.beat(T0)
    guard.sample(T0 + 1, BUSY)
    guard.sample(T0 + 3, IDLE)
    guard.sample(T0 + 3.5, IDLE)
    assert guard.check(T0 + 3.5) is None
    guard.sample(T0 + 4, IDLE)
    assert code(guard.check(T0 + 4)) == 78


def test_the_reason_says_how_long_the_gpu_was_idle() -> None:
    trip = health().run(LOAD_S + 60)
    assert trip is not None
    assert trip.reason.startswith("for 1200 s the GPU was used 5 % or less")


# --- stall


def silent() -> guards.Stall:
    """Return a guard that was beaten at T0 and checked until the stall is suspected."""
    guard = guards.Stall(T0)
    guard.beat(T0)
    for second in range(0, 121, 20):
        assert guard.check(T0 + second) is None
    return guard


@pytest.mark.parametrize("still", [EDGE, Sample(0.0, 2032.0), Sample(0.0, 1968.0)])
def test_the_highest_share_and_the_largest_change_still_confirm_a_stall(still: Sample) -> None:
    guard = silent()
    for second, found in ((120, IDLE), (121, still), (122, still)):
        guard.sample(T0 + second, found)
    assert code(guard.check(T0 + 122)) == 76


def test_more_samples_than_needed_confirm_a_stall() -> None:
    guard = silent()
    for second in range(120, 126):
        guard.sample(T0 + second, IDLE)
    assert code(guard.check(T0 + 126)) == 76


@pytest.mark.parametrize(("second", "reported"), [(119.9, False), (120, True), (300, True)])
def test_a_stall_is_suspected_from_its_second_on(second: float, reported: bool) -> None:
    guard = guards.Stall(T0)
    guard.beat(T0)
    assert (guard.suspicion(T0 + second) is not None) is reported


@pytest.mark.parametrize(("pause_s", "resumed"), [(30, False), (35, True)])
def test_a_worker_that_was_frozen_for_over_a_quarter_of_the_time_starts_again(
    pause_s: float, resumed: bool
) -> None:
    guard = guards.Stall(T0)
    guard.beat(T0)
    guard.check(T0)
    guard.check(T0 + pause_s)
    assert guard.wants_sample(T0 + 120) is not resumed
    assert (guard.suspicion(T0 + 120) is None) is resumed
    assert guard.suspicion(T0 + pause_s + 120) is not None or not resumed


def test_the_reason_counts_from_the_beat_also_after_a_denial() -> None:
    watcher = stall()
    watcher.beat()
    watcher.run(121)
    watcher.run(1, BUSY)
    trip = watcher.run(200, IDLE)
    assert trip is not None
    assert trip.reason == "no beat for 244 s, and GPU and RAM did not change"


@pytest.mark.parametrize("timeout_s", [0.5, 1, "2"])
def test_the_shortest_timeout_of_a_row_is_its_budget(timeout_s: float | str) -> None:
    job = {"queue": "cpu", "node_module": "n", "timeout_s": timeout_s}
    assert guards.budget_for(job) == float(timeout_s)
