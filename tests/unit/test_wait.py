"""Deadlines of tests grow with the measured slowness of the machine."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support import wait


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine, on which nothing was measured yet."""
    monkeypatch.setattr(wait, "_seen", type(wait._seen)())
    monkeypatch.setattr(wait, "_at_start", 1.0)
    monkeypatch.setattr(wait, "_IDLE_S", 60.0)


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the piece of work take much longer than on an idle machine."""
    monkeypatch.setattr(wait, "_IDLE_S", 1e-9)


@pytest.mark.usefixtures("work")
def test_an_idle_machine_gets_the_time_as_it_is_written() -> None:
    assert wait.slowness() == 1.0
    assert wait.patience(3.0) == 3.0


@pytest.mark.usefixtures("work")
def test_a_busy_machine_gets_up_to_eight_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    assert wait.patience(3.0) == 18.0


@pytest.mark.usefixtures("work")
def test_a_machine_that_was_busy_during_the_last_minute_gets_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as busy:
        slow(busy)
        wait.measure()
    assert wait.slowness() == 1.0
    assert wait.patience(3.0) == 18.0
    assert wait.Deadline(3.0).factor == 6.0


@pytest.mark.usefixtures("work")
def test_a_wait_measures_the_machine_before_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    begun, over = time.monotonic(), threading.Event()
    timer = threading.Timer(0.2, over.set)
    timer.start()
    assert wait.until(over.is_set, timeout_s=0.1)
    timer.join()
    assert time.monotonic() - begun >= 0.2


@pytest.mark.usefixtures("work")
def test_a_wait_ends_with_the_name_of_what_was_waited_for() -> None:
    def it_rains() -> bool:
        return False

    with pytest.raises(AssertionError, match=r"not true within 0\.01 s.*it_rains"):
        wait.until(it_rains, timeout_s=0.01)
