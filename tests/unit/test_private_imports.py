"""Hold the share of test lines that a redesign of private modules may force to change."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "queue_workflows"
MOST = 0.20
PACKAGES = frozenset(
    (
        *("check", "cli", "client", "db", "declare", "demo", "embedded", "local_queue"),
        *("migrations", "model_cache", "refs", "service", "tasks", "testing"),
    )
)
"""The packages that are public by what their `__init__` exports."""
DEEPER = frozenset(
    (
        *("schedule.timetable", "schedule.expression"),
        *(f"testing.{name}" for name in ("app_harness", "faults", "plugin", "result", "servers")),
    )
)
"""The modules in packages that are public: `docs/api` documents them by these names."""
IMPORT = re.compile(
    r"^ *((?:from queue_workflows[\w.]* )import (?:\([^)]*\)|[^\n(#;]+)"
    r"|import queue_workflows[\w.]*(?: as \w+)?)",
    re.MULTILINE,
)


def imported(path: Path) -> Generator[str]:
    """Yield the modules of the package that a file or a script in it imports, as `claim.claims`.

    Only imports are parsed: all tests would take some seconds.
    """
    for statement in IMPORT.findall(path.read_text()):
        (node,) = ast.parse(statement).body
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            assert isinstance(node, ast.Import)
            names = [each.name for each in node.names]
        for name in names:
            package, *parts = name.split(".")
            while parts and not is_module(parts):
                parts.pop()
            if package == PACKAGE.name and parts:
                yield ".".join(parts)


def is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_private(module: str) -> bool:
    """Return whether this is neither a file directly in the package nor a public package."""
    if module in DEEPER | PACKAGES:
        return False
    return "." in module or (PACKAGE / module).is_dir()


def test_what_is_private() -> None:
    assert is_private("claim")
    assert is_private("claim.claims")
    assert is_private("db.pool")
    assert not is_private("db")
    assert not is_private("node_queue")
    assert not is_private("schedule.timetable")
    assert "dag.plan" in set(imported(ROOT / "tests/unit/test_dag_plan.py"))


def test_most_lines_of_tests_do_without_private_modules() -> None:
    every = private = 0
    for path in (ROOT / "tests").rglob("*.py"):
        lines = len(path.read_text().splitlines())
        every += lines
        private += lines if any(map(is_private, imported(path))) else 0
    assert private <= MOST * every, f"{private} of {every} lines, {private / every:.1%}"
