"""CLAUDE.md and AGENTS.md are the same text, short, and name only things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import queue_workflows
from queue_workflows.admin import audit
from queue_workflows.db import statements

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CLAUDE.md").read_text(encoding="utf-8")


def test_both_files_are_the_same_bytes() -> None:
    assert (ROOT / "CLAUDE.md").read_bytes() == (ROOT / "AGENTS.md").read_bytes()


def test_they_are_short() -> None:
    assert len(TEXT.splitlines()) < 150


def test_layers_name_every_module_of_the_package() -> None:
    table = TEXT.partition("## Layers")[2].partition("## ")[0]
    package = Path(queue_workflows.__path__[0])
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert not sorted(name for name in modules if not re.search(rf"\b{name}\b", table))


def test_paths_that_they_name_exist() -> None:
    named = re.findall(r"`((?:tests|docs|\.ci|queue_workflows)/[\w./*-]+)`", TEXT)
    assert len(named) > 5
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("/")))]


def test_the_invariants_are_word_for_word_those_that_audit_checks() -> None:
    section = TEXT.partition("## Invariants")[2].partition("## ")[0]
    listed = re.findall(r"^(\d+)\. (.+)$", section, flags=re.MULTILINE)
    assert listed == [(str(each.number), each.sentence) for each in audit.INVARIANTS]
    comments = statements.comments("audit")
    checked = [each.sentence for each in audit.INVARIANTS if each.statement is not None]
    assert checked == list(comments.values())[-len(checked) :]


def test_the_page_shows_the_invariants_as_audit_prints_them() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^invariant +(\d+)  (?:ok|-) +(.+?)(?: \(\.\.\.\))?$", page, flags=re.MULTILINE
    )
    assert shown == [(str(each.number), each.sentence) for each in audit.INVARIANTS]
