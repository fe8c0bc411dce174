"""CI runs what README says, word for word, and examples/ shows what README shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import markdown

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / ".ci" / "run"


def _command(name: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / ".ci" / "readme_command.py"), name],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["demo", "test"])
def test_commands_are_taken_from_readme(name: str) -> None:
    shown = [
        command.text
        for block in markdown.blocks(ROOT / "README.md")
        if block.language == "console" and block.no_run
        for command in markdown.commands(block)
    ]
    done = _command(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") in shown
    assert len(shown) == 2
    assert f"$(python3 .ci/readme_command.py {name})" in RUN.read_text()


def test_both_halves_of_the_second_command_are_run() -> None:
    steps = RUN.read_text()
    install = steps.index('bash -c "${TEST% && *}"')
    assert install < steps.index('bash -c "${TEST##* && }"')
    command = _command("test").stdout.rstrip("\n")
    assert command.rpartition(" && ")[2].startswith(".venv/bin/python -m pytest")


def test_a_command_that_readme_lacks_fails(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = (ROOT / ".ci" / "readme_command.py").read_text()
    (tmp_path / ".ci" / "readme_command.py").write_text(script)
    (tmp_path / "README.md").write_text("$ python3 -m venv .venv && .venv/bin/python -m unittest\n")
    done = _command("test", tmp_path)
    assert done.returncode == 1
    assert "0 commands for 'test'" in done.stderr


def test_ci_is_a_script_that_bash_reads() -> None:
    assert os.access(RUN, os.X_OK)
    assert "set -euo pipefail" in RUN.read_text()
    subprocess.run(["bash", "-n", str(RUN)], check=True)


def test_ci_soaks_for_three_minutes_when_nothing_else_runs() -> None:
    steps = RUN.read_text()
    soak = steps.index(".venv/bin/python -m tests.soak")
    line = steps[steps.rindex("\n", 0, soak) + 1 : steps.index("\n", soak)]
    assert line.startswith("timeout --kill-after")
    assert '--minutes "$SOAK_MINUTES" --seed "$SOAK_SEED"' in line
    assert "||" not in line
    assert "SOAK_MINUTES=3\n" in steps
    assert "seed $SOAK_SEED" in steps[:soak]  # said before it starts
    assert steps.rindex("finish_second_run\n") < soak
    assert steps.index('bash -c "${TEST##* && }"') < soak


def test_the_example_is_the_one_in_readme() -> None:
    (app,) = [b for b in markdown.blocks(ROOT / "README.md") if b.file == "hello.py"]
    assert (ROOT / "examples" / "hello.py").read_text(encoding="utf-8") == app.text
