"""CLAUDE.md and AGENTS.md are one text, short, and true about what it names."""

from __future__ import annotations

import re
from pathlib import Path

import queue_workflows

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CLAUDE.md").read_text(encoding="utf-8")


def test_both_files_are_the_same_bytes() -> None:
    assert (ROOT / "CLAUDE.md").read_bytes() == (ROOT / "AGENTS.md").read_bytes()


def test_they_are_short() -> None:
    assert len(TEXT.splitlines()) < 150


def test_floors_name_every_module_of_the_package() -> None:
    table = TEXT.partition("## Floors")[2].partition("## ")[0]
    package = Path(queue_workflows.__path__[0])
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert not sorted(name for name in modules if not re.search(rf"\b{name}\b", table))


def test_paths_that_they_name_exist() -> None:
    named = re.findall(r"`((?:tests|docs|\.ci|queue_workflows)/[\w./*-]+)`", TEXT)
    assert len(named) > 5
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("/")))]


def test_fifteen_laws() -> None:
    laws = TEXT.partition("## Laws")[2].partition("## ")[0]
    assert [int(n) for n in re.findall(r"^(\d+)\. ", laws, flags=re.MULTILINE)] == [*range(1, 16)]
