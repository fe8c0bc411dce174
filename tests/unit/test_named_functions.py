"""Every function of a public module that docs, SQL comments and messages name exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import queue_workflows

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(queue_workflows.__path__[0])
MODULES = "|".join(sorted(path.stem for path in PACKAGE.glob("[a-z]*.py")))
FULL = re.compile(r"\bqueue_workflows\.([a-z_]+)\.([A-Za-z_]+)")
SHORT = re.compile(rf"`({MODULES})\.(?!py\b|sql\b)([A-Za-z_]+)[`(]")


def _named(text: str) -> Iterator[tuple[str, str]]:
    for pattern in (FULL, SHORT):
        yield from pattern.findall(text)


def _exists(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(f"queue_workflows.{module}")
    except ModuleNotFoundError:
        return False
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"queue_workflows.{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def _pages() -> list[Path]:
    docs = (path for path in (ROOT / "docs").rglob("*.md") if "_site" not in path.parts)
    return [
        *docs,
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(PACKAGE / "sql").rglob("*.sql"),
    ]


def test_the_functions_that_pages_and_sql_comments_name_exist() -> None:
    wrong = {
        f"{path.name}: {module}.{name}"
        for path in _pages()
        for module, name in _named(path.read_text(encoding="utf-8"))
        if not _exists(module, name)
    }
    assert wrong == set()


@pytest.mark.parametrize(
    "text", ["queue_workflows.retention.prune()", "`queues.when`", "`jobs.x(`"]
)
def test_a_wrong_name_is_found(text: str) -> None:
    assert [_exists(*name) for name in _named(text)] == [False]


@pytest.mark.parametrize("text", ["queue_workflows.jobs.enqueue()", "`runs.submit`", "`config.py`"])
def test_a_right_name_is_accepted(text: str) -> None:
    assert all(_exists(*name) for name in _named(text))
