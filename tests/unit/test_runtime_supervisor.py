"""The restart rule, and what a supervisor refuses; processes are in the integration tests."""

from __future__ import annotations

import pytest

from queue_workflows import errors
from queue_workflows.runtime import supervisor
from tests.support import constants


def test_the_delay_doubles_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "runtime.supervisor.BACKOFF_MAX_S", 2.0)
    rule = supervisor.RestartRule()
    delays = [rule.after_exit(1, 0.5) for _ in range(6)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for _ in range(2000):
        assert rule.after_exit(None, 0.0) == 2.0


def test_a_child_that_lived_for_a_while_resets_the_back_off() -> None:
    rule = supervisor.RestartRule()
    assert [rule.after_exit(1, 1.0) for _ in range(3)] == [0.2, 0.4, 0.8]
    assert rule.after_exit(1, supervisor.HEALTHY_AFTER_S) == 0.2
    assert rule.after_exit(1, 1.0) == 0.4


def test_a_child_that_did_start_waits_for_at_most_a_quarter_of_its_life() -> None:
    rule = supervisor.RestartRule()
    delays = [rule.after_exit(None, 10.0) for _ in range(20)]
    assert delays == [0.2, 0.4, 0.8, 1.6] + [2.5] * 16, "jobs that kill it take it away for longer"


def test_the_back_off_of_one_that_does_not_start_grows_on_after_a_longer_life() -> None:
    rule = supervisor.RestartRule()
    assert [rule.after_exit(1, 1.0) for _ in range(9)][-1] == 30.0
    assert rule.after_exit(1, supervisor.STARTED_AFTER_S) == supervisor.STARTED_AFTER_S / 4
    assert rule.after_exit(1, 1.0) == supervisor.STARTED_AFTER_S / 2
    assert rule.after_exit(1, 1.0) == supervisor.STARTED_AFTER_S


def test_three_quick_usage_errors_in_a_row_are_given_up() -> None:
    rule = supervisor.RestartRule()
    assert [rule.after_exit(2, 0.1) for _ in range(3)] == [0.2, 0.4, None]


@pytest.mark.parametrize(("code", "seconds"), [(1, 0.1), (None, 0.1), (2, 30.0)])
def test_anything_else_in_between_breaks_that_row(code: int | None, seconds: float) -> None:
    rule = supervisor.RestartRule()
    codes = [(2, 0.1), (2, 0.1), (code, seconds), (2, 0.1), (2, 0.1)]
    assert None not in [rule.after_exit(*pair) for pair in codes]
    assert rule.after_exit(2, 0.1) is None


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_children_need_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(errors.InvalidConfig, match="names of their own"):
        supervisor.Supervisor([supervisor.ChildSpec(name, ["true"]) for name in names])
