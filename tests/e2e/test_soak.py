"""The soak's command line and its checker; CI itself runs two minutes of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.soak import __main__ as command
from tests.soak import (
    acknowledgements,
    check_recovery,
    checker,
    evidence,
    faults,
    fleet,
    mutants,
    report,
)
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
MARK = "QW_TEST_SOAK"
SEED = 5
pytestmark = pytest.mark.timeout(300)


class Soak:
    """A running soak, and whether anything that it started is still there."""

    def __init__(self, out: Path, *options: str) -> None:
        self._mark = secrets.token_hex(8)
        self._out = out
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak", *options],
                cwd=ROOT,
                env={**os.environ, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._out.read_text(errors="replace")

    def family(self) -> list[int]:
        """Every live process that it started, itself among them; the server has another account."""
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def soaking(out: Path, *options: str) -> Generator[Soak]:
    """A soak that is over, or killed, when the block ends."""
    started = Soak(out, *options)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize(
    "options",
    [
        ["--minutes", "0"],
        ["--gap", "-1"],
        ["--rate", "nan"],
        ["--hostile", "-1"],
        ["--seed", "x"],
        ["--mutant", "unheard-of"],
        ["--mutant", "fires,unheard-of"],
        ["--markdown", "no/such/page.md"],
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(options)
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_ctrl_c_ends_all_that_was_started(tmp_path: Path) -> None:
    with soaking(tmp_path / "out", "--minutes", "5", "--gap", "0.5") as running:
        until(lambda: " held " in running.text, timeout_s=90, every_s=0.1)
        assert len(running.family()) > 8
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(90) == 130, running.text
        assert not running.family(), running.text


def test_mutants_that_are_caught_exit_with_0_and_say_by_whom(tmp_path: Path) -> None:
    """Those that show soonest, all in one engine; `--mutants` runs each by itself."""
    assert len(mutants.MUTANTS) >= 8
    assert {mutant.caught_by for mutant in mutants.MUTANTS.values()} <= checker.CHECKS.keys()
    names = "fires,keys,lock-keys,limits"
    options = ["--minutes", "0.2", "--seed", str(SEED), "--rate", "3", "--gap", "4"]
    with soaking(tmp_path / "out", *options, "--mutant", names) as running:
        assert running.process.wait(240) == 0, running.text
        text = running.text
        assert not running.family()
    assert f"seed {SEED}" in text
    assert "VIOLATIONS: " in text
    assert "caught by: " in text.splitlines()[-1]
    for name in mutants.names(names):
        assert f"{mutants.MUTANTS[name].caught_by} (" in text.splitlines()[-1]


@pytest.mark.parametrize("found", [{}, {"lost": ["run x is gone"]}])
def test_a_soak_fails_when_anything_was_found(
    found: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = report.Report("head", [("faults", "3")], [("kill", 3)], [], {"lost": []} | found)
    monkeypatch.setattr(command.run, "soak", lambda _: made)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak:begin -->\nold\n<!-- soak:end -->\nafter\n")
    kept = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main(["--markdown", str(page)]) == len(found)
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert page.read_text() == (
        f"before\n<!-- soak:begin -->\n{made.markdown()}\n<!-- soak:end -->\nafter\n"
    )


# The recovery figures, on evidence made up for it.


def seen(
    seat: str,
    taken: float,
    *others: faults.Fault,
    kind: str = "reclaimed",
    again: float | None = None,
    idle: bool = True,
) -> evidence.Evidence:
    """A worker of this seat claimed a job at 95 s, was killed at 100 s, and lost it at `taken`.

    Another, which did a job `k` before, claimed it `again`; unless `idle`, it did one meanwhile.
    """
    where = next(s for s in fleet.SEATS if s.name == seat)
    worker = f"{where.label}:77:machine:random"

    def event(number: int, what: str, at: float) -> evidence.Event:
        return evidence.Event("j", number, what, 1, worker, where.label, where.queue, at, at)

    def other(job: str, what: str, claim: int, at: float) -> evidence.Event:
        box = ("box-z", where.queue)
        return evidence.Event(job, 9, what, claim, "box-z:88:machine:random", *box, at, at)

    events = {"j": [event(1, "claimed", 95.0), event(2, kind, taken)]}
    if again is not None:
        events["j"].append(other("j", "claimed", 2, again))
        ends = 90.0 if idle else taken + 0.5
        events["k"] = [other("k", "claimed", 1, 80.0), other("k", "completed", 1, ends)]

    killed = faults.Fault(
        f"kill, {where.care}",
        seat,
        100.0,
        100.0,
        (77,),
        [faults.HeldJob("node", "j", 1, False)],
    )
    known: dict[str, Any] = dict.fromkeys(
        ("runs", "fires", "lines", "off", "stuck", "invariants", "slow"), ()
    )
    return evidence.Evidence(
        **known,
        jobs={job: {"lock_key": None, "partition": None, "queue": where.queue} for job in events},
        events=events,
        books=acknowledgements.Acknowledgements(),
        faults=[killed, *others],
        ended=[fleet.Ended(100.0, seat, 77, None, 9)],
        time=None,  # type: ignore[arg-type]
        began=0.0,
        ended_load=200.0,
    )


@pytest.mark.parametrize(
    ("seat", "most_s"), [("cpu-3", 3.0), ("notes-1", 3.0), ("cpu-1", 3.0), ("cpu-4", 45.0)]
)
def test_a_recovery_beyond_its_promise_is_found(seat: str, most_s: float) -> None:
    assert not list(check_recovery.late(seen(seat, 100 + most_s)))
    (text,) = check_recovery.late(seen(seat, 100.1 + most_s))
    assert "job j: claim 1" in text
    assert f"not {most_s:g} s" in text


@pytest.mark.parametrize("again", [102.9, 103.1])
def test_a_job_that_an_idle_worker_leaves_alone_is_found(again: float) -> None:
    assert len(list(check_recovery.late(seen("cpu-3", 100.1, again=again)))) == (again > 103)
    assert not list(check_recovery.late(seen("cpu-3", 100.1, again=again, idle=False)))


def test_a_recovery_delayed_by_another_fault_is_timed_from_its_end() -> None:
    restart = faults.Fault("restart", "server", 101.0, 104.0)
    assert not list(check_recovery.late(seen("cpu-3", 106.9, restart)))
    assert list(check_recovery.late(seen("cpu-3", 107.1, restart)))
    elsewhere = faults.Fault("stop", "cpu-2", 101.0, 104.0, (78,))
    assert list(check_recovery.late(seen("cpu-3", 104.0, elsewhere)))


def test_a_late_recovery_is_excused_only_if_both_orchestrators_were_hit() -> None:
    """Both orchestrators have to be for the 45 s to begin later."""
    first = faults.Fault("kill", "orchestrator-1", 120.0, 120.0, (1,))
    second = faults.Fault("kill", "orchestrator-2", 130.0, 130.0, (2,))
    assert list(check_recovery.late(seen("cpu-4", 150.0, first)))
    assert not list(check_recovery.late(seen("cpu-4", 169.0, first, second)))
    assert list(check_recovery.late(seen("cpu-4", 171.0, first, second)))


def test_a_claim_whose_parent_died_too_is_left_to_its_lease() -> None:
    parent = faults.Fault(faults.KILL_PARENT, "cpu-3", 100.2, 100.2, (70, 77))
    assert not list(check_recovery.late(seen("cpu-3", 108.9, parent)))
    assert list(check_recovery.late(seen("cpu-3", 109.1, parent)))


def test_a_job_that_was_done_when_its_worker_was_killed_is_no_recovery() -> None:
    assert check_recovery.deaths(seen("cpu-3", 180.0, kind="completed")) == []
