"""Which kernel timers are armed while jobs come and go."""

from __future__ import annotations

import pytest

from queue_workflows.executor import launcher
from queue_workflows.runtime import kill_timer
from queue_workflows.worker import kill_timers


class Recorder:
    """A kill timer that only records for how long it is armed."""

    made: dict[int, Recorder] = {}  # noqa: RUF012  emptied by the fixture

    def __init__(self, code: int) -> None:
        self.left: float | None = None
        self.arms = 0
        self.made[code] = self

    def arm(self, seconds: float) -> None:
        self.left = seconds
        self.arms += 1

    def disarm(self) -> None:
        self.left = None

    close = disarm


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, Recorder]:
    monkeypatch.setattr(kill_timer, "KillTimer", Recorder)
    monkeypatch.setattr(Recorder, "made", {})
    return Recorder.made


def test_a_jobs_lease_and_budget_are_armed(made: dict[int, Recorder]) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 100.0)
    subject.begin(700.0, 130.0)
    assert made[77].left == 600 - kill_timers.EARLY_S
    assert made[75].left == 30 + kill_timers.LATE_S
    subject.keep(None, None)
    assert (made[77].left, made[75].left) == (None, None)


@pytest.mark.parametrize("later", [2000.0, None])
def test_a_job_does_not_inherit_the_shorter_budget_of_the_one_before(
    made: dict[int, Recorder], later: float | None
) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 0.0)
    subject.begin(600.0, 10.0)
    subject.begin(600.0, later)
    assert made[75].left == (None if later is None else later + kill_timers.LATE_S)


def test_a_shorter_budget_is_armed_at_once(made: dict[int, Recorder]) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 0.0)
    subject.begin(600.0, 2000.0)
    subject.begin(600.0, 10.0)
    assert made[75].left == 10 + kill_timers.LATE_S


def test_jobs_in_quick_succession_cost_no_system_calls(made: dict[int, Recorder]) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 0.0)
    for number in range(100):
        subject.begin(600 + number / 200, 2000 + number / 200)
    assert (made[77].arms, made[75].arms) == (1, 1)


def test_what_was_released_is_armed_again_by_the_next_job(made: dict[int, Recorder]) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 0.0)
    subject.begin(600.0, 10.0)
    subject.release()
    assert (made[77].left, made[75].left) == (None, None)
    subject.begin(600.0, 10.0)
    assert (made[77].arms, made[75].arms) == (2, 2)


def test_without_timers_nothing_is_armed(made: dict[int, Recorder]) -> None:
    subject = kill_timers.KillTimers(enabled=False, now_fn=lambda: 0.0)
    subject.begin(600.0, 10.0)
    subject.leave(79)
    assert [each.left for each in made.values()] == [None, None]


def test_an_exit_that_was_decided_is_not_put_off_by_a_second_decision(
    made: dict[int, Recorder],
) -> None:
    subject = kill_timers.KillTimers(enabled=True, now_fn=lambda: 0.0)
    subject.leave(79)
    first = made[79]
    subject.leave(79)
    assert (first.arms, made[79]) == (1, first)
    subject.stay()
    assert first.left is None
    subject.leave(75)
    assert made[75].left == kill_timers.EXIT_WITHIN_S


def test_the_executors_of_a_stopped_worker_and_launcher_end_before_the_lease() -> None:
    """The kernel takes some time to kill a launcher and its executors."""
    assert kill_timers.EARLY_S - launcher.GRACE_S >= 0.1 - 1e-9
