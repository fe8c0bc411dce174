"""A sample of the mutants of `python -m tests.mutation`, and that the command sees a survivor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation import checkouts, mutants, runner, targets
from tests.support import commands
from tests.support.wait import patience, until

CLAIM_TIMES = "worker/claim_times.py"
PLAN = "dag/plan.py"
PASSES = "def test_one():\n    pass\n"
FAILS = "def test_one():\n    assert False\n"
ENDLESS = "def test_one():\n    while True:\n        pass\n"
SAMPLED = (PLAN, "dag/policy.py", "worker/guards.py", "schedule/timetable.py", CLAIM_TIMES)


def test_a_sample_of_the_mutants_is_killed_or_listed(capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [f"--module={module}" for module in SAMPLED]
    assert command.main([*chosen, "--sample", "12"]) == 0, capfd.readouterr().err


def test_the_command_sees_a_survivor(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--module", CLAIM_TIMES, "--sample", "2"], {CLAIM_TIMES: ()}) == 1
    printed = capfd.readouterr()
    assert printed.err.count(f"{CLAIM_TIMES}: no test fails") == 2
    assert printed.out.splitlines()[-1].split() == ["all", "2", "0", "2"]


def test_a_listed_mutant_that_is_killed_and_too_many_survivors_are_reported() -> None:
    one, two = (mutants.Change(CLAIM_TIMES, "x = 1", f"x = {number}") for number in (2, 3))
    killed = runner.Outcome(one, checkouts.Fate("a test"))
    assert command.wrong([killed], set(), sampled=False, whole=True) == []
    (stale,) = command.wrong([killed], {one}, sampled=False, whole=True)
    assert "listed, but killed" in stale and "+ x = 2" in stale
    assert command.wrong(
        [runner.Outcome(two, checkouts.Fate(""))], {two}, sampled=False, whole=True
    ) == ["more than 5% of the mutants survive"]


READY = "return [node_id for node_id in candidates if node_id {} blocked]"


def test_a_planner_that_queues_what_has_to_wait_is_killed(tmp_path: Path) -> None:
    source = runner.source(PLAN)
    swaps = [place for place in mutants.places(PLAN, source) if place.operator == "Swap"]
    made = {place: mutants.mutated(place, source) for place in swaps}
    after = READY.format("in")
    (wanted,) = [p for p, mutant in made.items() if mutant and mutant[0].after == after]
    ((change, fate),) = runner.run(tmp_path, [wanted], targets.TARGETS)
    assert (change.before, fate.survived, fate.problem) == (READY.format("not in"), False, "")


def test_annotations_make_no_mutants() -> None:
    source = "def f(x: int | None, *, y: bool = True) -> int | None:\n    return x\n"
    made = [mutants.mutated(place, source) for place in mutants.places("f.py", source)]
    assert [mutant[0].after for mutant in made if mutant] == [
        "def f(x: int | None, *, y: bool = False) -> int | None:"
    ]


@pytest.mark.parametrize(
    ("text", "expected"), [(PASSES, ""), (FAILS, "FAILED"), ("import nowhere", "ERROR")]
)
def test_a_mutant_is_killed_by_a_failure_or_by_a_file_that_cannot_be_imported(
    tmp_path: Path, text: str, expected: str
) -> None:
    output = failure(tmp_path, text)
    assert expected in output if expected else output == ""


@pytest.mark.parametrize(("text", "code"), [("", 5), ("import os\nos._exit(3)", 3), (PASSES, 4)])
def test_a_mutant_whose_pytest_ends_in_another_way_is_not_judged(
    tmp_path: Path, text: str, code: int
) -> None:
    if code == 4:
        (tmp_path / "conftest.py").write_text("import nowhere")
    with pytest.raises(RuntimeError, match=f"pytest exits with {code}: "):
        failure(tmp_path, text)


def test_a_mutant_that_takes_too_long_is_judged_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, most_s, message in (
        ((f"--timeout={patience(1)}",), 60, "time-out of a test"),
        ((), 1, "time-out of"),
    ):
        with pytest.raises(TimeoutError, match=message):
            failure(tmp_path, ENDLESS, *options, most_s=most_s)
    monkeypatch.setattr(checkouts, "ROOT", tmp_path)
    calls: list[str] = []

    def judge(copy: Path, item: str) -> str:
        calls.append(item)
        if item == "endless" or (item == "slow" and calls.count(item) == 1):
            raise TimeoutError("time-out")
        if item == "broken":
            raise RuntimeError("pytest exits with 3")
        return "a test" if item == "killed" else ""

    copies = checkouts.Copies(tmp_path.with_name("copies"))
    items = ["endless", "slow", "killed", "broken", "survives"]
    fates = dict(copies.fates(items, judge))
    assert {item: fate[:3] for item, fate in fates.items()} == {
        "killed": ("a test", "", False),
        "broken": ("", "pytest exits with 3", False),
        "survives": ("", "", False),
        "slow": ("", "", False),
        "endless": ("time-out", "", True),
    }
    assert sorted(calls[-2:]) == ["endless", "slow"] and len(calls) == 7


def failure(folder: Path, text: str, *options: str, most_s: float = 60) -> str:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_it.py").write_text(text)
    given = ("-c", os.devnull, "--rootdir", str(folder), *options)
    return checkouts.failure(folder, given, ["test_it.py"], most_s=patience(most_s))


def test_a_mutant_that_cannot_be_judged_is_reported_and_is_neither_killed_nor_a_survivor() -> None:
    one = mutants.Change(CLAIM_TIMES, "x = 1", "x = 2")
    outcome = runner.Outcome(one, checkouts.Fate("", "pytest exits with 4: a word of it"))
    (found,) = command.wrong([outcome], {one}, sampled=False, whole=True)
    assert "cannot be judged: pytest exits with 4: a word of it" in found and "+ x = 2" in found


def test_what_the_command_started_ends_with_it(tmp_path: Path) -> None:
    own = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    argv = [sys.executable, "-m", "tests.mutation", "--module", CLAIM_TIMES]
    started = subprocess.Popen(argv, cwd=commands.ROOT, env={**own, "TMPDIR": str(tmp_path)})
    pid = until(lambda: pytest_below(tmp_path))
    try:
        os.kill(pid, signal.SIGSTOP)  # so that it does not end by itself
        started.kill()
        started.wait(patience(10))
        until(lambda: not Path(f"/proc/{pid}/cwd").exists())
        until(lambda: not [*tmp_path.iterdir()])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pytest_below(folder: Path) -> int:
    """Return a pytest that works in a copy below this folder, or 0.

    Between `fork` and `exec` a process has the environment of its parent, and no mark.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"pytest" not in (process / "cmdline").read_bytes():
                continue
            if (process / "cwd").readlink().is_relative_to(folder):
                return int(process.name)
    return 0
