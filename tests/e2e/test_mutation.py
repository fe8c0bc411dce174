"""A sample of the mutants of `python -m tests.mutation`, and that the command sees a survivor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation import mutants, runner, targets

CLAIM_TIMES = "worker/claim_times.py"
READINESS = "dag/readiness.py"
SAMPLED = (READINESS, "dag/policy.py", "worker/guards.py", "schedule/entry.py", CLAIM_TIMES)


def test_a_sample_of_the_mutants_is_killed_or_listed(capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [f"--module={module}" for module in SAMPLED]
    assert command.main([*chosen, "--sample", "30"]) == 0, capfd.readouterr().err


def test_the_command_sees_a_survivor(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--module", CLAIM_TIMES, "--sample", "2"], {CLAIM_TIMES: ()}) == 1
    printed = capfd.readouterr()
    assert printed.err.count(f"{CLAIM_TIMES}: no test fails") == 2
    assert printed.out.splitlines()[-1].split() == ["all", "2", "0", "2"]


def test_a_listed_mutant_that_is_killed_and_too_many_survivors_are_reported() -> None:
    one, two = (mutants.Change(CLAIM_TIMES, "x = 1", f"x = {number}") for number in (2, 3))
    assert command.wrong([runner.Outcome(one, False)], set(), sampled=False, whole=True) == []
    (stale,) = command.wrong([runner.Outcome(one, False)], {one}, sampled=False, whole=True)
    assert "listed, but killed" in stale and "+ x = 2" in stale
    assert command.wrong([runner.Outcome(two, True)], {two}, sampled=False, whole=True) == [
        "more than 5% of the mutants survive"
    ]


def test_the_mutant_that_no_test_noticed_in_a_takeover_trial_is_killed(tmp_path: Path) -> None:
    source = runner.source(READINESS)
    swaps = [place for place in mutants.places(READINESS, source) if place.operator == "Swap"]
    made = {place: mutants.mutated(place, source) for place in swaps}
    (wanted,) = [p for p, mutant in made.items() if mutant and mutant[0].after == "return any("]
    ((change, survived),) = runner.run(tmp_path, [wanted], targets.TARGETS)
    assert (change.before, survived) == ("return all(", False)


def test_annotations_make_no_mutants() -> None:
    source = "def f(x: int | None, *, y: bool = True) -> int | None:\n    return x\n"
    made = [mutants.mutated(place, source) for place in mutants.places("f.py", source)]
    assert [mutant[0].after for mutant in made if mutant] == [
        "def f(x: int | None, *, y: bool = False) -> int | None:"
    ]
