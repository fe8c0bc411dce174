"""Property tests end in time, and say nothing wrong of a test that ran out of it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over from the start."""
    monkeypatch.setattr(examples, "BUDGET_S", -1.0)
    monkeypatch.setattr(examples, "FULL", False)


def limited(test: Any) -> Any:
    test.hypothesis.inner_test = examples.within_budget(test.hypothesis.inner_test)
    return test


@pytest.mark.usefixtures("late")
def test_no_example_runs_after_its_time() -> None:
    ran: list[int] = []

    @limited
    @settings(max_examples=50, database=None)
    @given(number=st.integers())
    def test(number: int) -> None:
        ran.append(number)

    test()
    assert not ran


@pytest.mark.parametrize("kind", [st.randoms(use_true_random=False), st.data()], ids=repr)
def test_a_test_that_draws_while_it_runs_draws_alike_to_the_end(
    monkeypatch: pytest.MonkeyPatch, kind: st.SearchStrategy[Any]
) -> None:
    monkeypatch.setattr(examples, "FULL", False)
    ran: list[object] = []

    @limited
    @settings(max_examples=50, database=None)
    @given(source=kind)
    def test(source: Any) -> None:
        if len(ran) == 5:
            monkeypatch.setattr(examples, "BUDGET_S", -1.0)
        draw = source.random if isinstance(source, Random) else lambda: source.draw(st.booleans())
        ran.append([draw() for _ in range(3)])

    test()
    assert len(ran) > 5
