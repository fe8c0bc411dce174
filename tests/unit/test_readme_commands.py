"""`.ci/readme_command.py` prints the set-up commands of README.md, which CI then runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import markdown

ROOT = Path(__file__).resolve().parents[2]


def _command(name: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / ".ci" / "readme_command.py"), name],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["demo", "test"])
def test_a_command_is_printed_as_readme_shows_it(name: str) -> None:
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


def test_a_command_that_readme_lacks_fails(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = (ROOT / ".ci" / "readme_command.py").read_text()
    (tmp_path / ".ci" / "readme_command.py").write_text(script)
    (tmp_path / "README.md").write_text("$ python3 -m venv .venv && .venv/bin/python -m unittest\n")
    done = _command("test", tmp_path)
    assert done.returncode == 1
    assert "0 commands for 'test'" in done.stderr


def test_the_example_is_the_one_in_readme() -> None:
    (app,) = [b for b in markdown.blocks(ROOT / "README.md") if b.file == "hello.py"]
    assert (ROOT / "examples" / "hello.py").read_text(encoding="utf-8") == app.text
