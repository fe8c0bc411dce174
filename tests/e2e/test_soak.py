"""A short soak: real processes, seeded faults, and a report that must be clean."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.soak import mutants, report
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
MARK = "QW_TEST_SOAK"
SEED = 5
FAULTS = 10
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


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold figures\n{report.END}\nafter\n")
    load = ["--minutes", "0.5", "--gap", "1.5"]
    options = [*load, "--seed", str(SEED), "--markdown", str(page)]
    with soaking(tmp_path / "out", *options) as running:
        assert running.process.wait(240) == 0, running.text
        assert not running.family()
        text = running.text
    found = re.search(r"^faults +(\d+)$", text, re.MULTILINE)
    assert found and int(found[1]) >= FAULTS, text
    assert text.endswith("clean\n")
    written = page.read_text()
    assert written.startswith(f"before\n{report.BEGIN}\n")
    assert written.endswith(f"\n{report.END}\nafter\n")
    assert f"seed {SEED}" in written and "old figures" not in written


def test_ctrl_c_ends_all_that_was_started(tmp_path: Path) -> None:
    with soaking(tmp_path / "out", "--minutes", "5", "--gap", "0.5") as running:
        until(lambda: " held " in running.text, timeout_s=60, every_s=0.1)
        assert len(running.family()) > 8
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 130, running.text
        assert not running.family(), running.text


def test_the_checker_finds_a_schedule_that_fires_twice(tmp_path: Path) -> None:
    """The cheapest of the mutants; `--mutant` runs the others."""
    assert len(mutants.MUTANTS) >= 8
    options = ["--minutes", "0.2", "--seed", str(SEED), "--mutant", "fires"]
    with soaking(tmp_path / "out", *options) as running:
        assert running.process.wait(240) == 0, running.text
    assert "did not fire" in running.text or "without its fire" in running.text
