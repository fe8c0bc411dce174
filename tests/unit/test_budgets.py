"""The package stays within its budgets: its parts, the spine, and what `jobs` imports.

A change that needs more raises a line of the table, and its commit says why. A change that needs
much less lowers it. The goals are 48,000 lines of Python, 9,600 of SQL, 250 files, 3,200 functions,
30 files and 6,000 lines of the spine, and 5,000 lines behind `queue_workflows.jobs`. The goals of
the widths are in the comments of their lines; `tests/e2e/test_widths.py` holds them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import queue_workflows

PACKAGE = Path(queue_workflows.__path__[0])
SLACK = 0.05
"""How far a figure may be below its budget before the budget has to be lowered."""
BUDGETS = {
    ".": 8260, "admin": 2480, "alerts": 320, "check": 840, "claim": 1760, "cli": 6650,
    "client": 720, "dag": 4310, "db": 3530, "declare": 1660, "demo": 410, "dispatch": 2120,
    "embedded": 800, "event_export": 720, "local_queue": 1960, "maintenance": 580,
    "migrations": 10, "model_cache": 600, "refs": 470, "requests": 1200, "run": 4350,
    "runtime": 3460, "schedule": 720, "service": 7280, "sql": 83, "tasks": 1800,
    "telemetry": 1310, "testing": 730, "worker": 4340,
}  # fmt: skip
"""Lines of Python of each package; `.` has the modules directly below `queue_workflows`."""
TOTALS = {
    "lines of Python": 63340, "files of Python": 273, "functions": 4100, "lines of SQL": 11120,
}  # fmt: skip
CLOSURE = {"modules": 29, "lines": 6240}
"""The modules of ours that `import queue_workflows.jobs` loads, and their lines."""

SPINE = {"files": 45, "lines": 16290}
"""What a new engineer reads on the first day: the files that `tests/spine.txt` lists."""
WIDTHS = {
    "ingest": (115, 26),  # the goal is 110 functions in 25 files
    "run": (288, 47),  # 320 in 50
    "off": (188, 32),  # 150 in 30; on a busy machine a check of the guards is a part of it
    "lost-lease": (57, 15),  # 60 in 15; a random id in a log line may need four functions more
    "show": (194, 43),  # 200 in 45
}
"""The functions and files that run on each way of `tests/support/tracer.py`, and 3 to 10 % more."""


def lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def packages() -> dict[str, int]:
    parts: dict[str, list[Path]] = {".": sorted(PACKAGE.glob("*.py"))}
    for folder in sorted(PACKAGE.iterdir()):
        if files := sorted(folder.rglob("*.py")) if folder.is_dir() else []:
            parts[folder.name] = files
    return {name: lines(files) for name, files in parts.items()}


def totals() -> dict[str, int]:
    files = sorted(PACKAGE.rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        "lines of Python": lines(files),
        "files of Python": len(files),
        "functions": sum(isinstance(node, functions) for tree in trees for node in ast.walk(tree)),
        "lines of SQL": lines(sorted(PACKAGE.rglob("*.sql"))),
    }


def closure() -> dict[str, int]:
    code = (
        "import sys, queue_workflows.jobs\n"
        "print(*[m.__file__ for n, m in sys.modules.items()"
        " if n.partition('.')[0] == 'queue_workflows'], sep='\\n')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(line) for line in told.stdout.split()]
    return {"modules": len(files), "lines": lines(files)}


def spine() -> dict[str, int]:
    listed = (Path(__file__).parents[1] / "spine.txt").read_text(encoding="utf-8").splitlines()
    files = [PACKAGE / line for line in listed if line and not line.startswith("#")]
    assert len(set(files)) == len(files), "a file is listed twice"
    return {"files": len(files), "lines": lines(files)}


@pytest.mark.parametrize(
    ("measured", "budgets"),
    [(packages, BUDGETS), (totals, TOTALS), (closure, CLOSURE), (spine, SPINE)],
    ids=["packages", "totals", "jobs", "spine"],
)
def test_each_part_is_within_its_budget(
    measured: Callable[[], dict[str, int]], budgets: dict[str, int]
) -> None:
    found = measured()
    assert found.keys() == budgets.keys()
    over = {key: (value, budgets[key]) for key, value in found.items() if value > budgets[key]}
    assert not over, f"more than the budget (found, budget): {over}"
    loose = {
        key: (value, budgets[key])
        for key, value in found.items()
        if value < budgets[key] * (1 - SLACK) - 10
    }
    assert not loose, f"lower these budgets (found, budget): {loose}"
