"""Prints a command of README.md as it stands there: `readme_command.py demo` or `... test`."""

from __future__ import annotations

import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
ENDS = {"demo": "demo --yes", "test": "-m pytest -n 4"}


def command(name: str, text: str) -> str:
    """The one set-up command of that name; ValueError when there is none or more than one."""
    found = [
        line.removeprefix("$ ")
        for line in text.splitlines()
        if line.startswith("$ python3 -m venv ") and line.endswith(ENDS[name])
    ]
    if len(found) != 1:
        raise ValueError(f"README.md has {len(found)} commands for {name!r}, not one")
    return found[0]


if __name__ == "__main__":
    print(command(sys.argv[1], README.read_text(encoding="utf-8")))
