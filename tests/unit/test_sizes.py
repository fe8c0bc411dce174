"""A long file or function of the package says in its docstring why it is long.

A docstring itself has eight lines at most.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import queue_workflows

PACKAGE = Path(queue_workflows.__path__[0])
FILE_LINES = 600
FUNCTION_LINES = 60
DOCSTRING_LINES = 8
_REASON = re.compile(r"\bits\s+length:|\bits\s+length\s+is\b", re.IGNORECASE)


def unexplained(source: str, *, options_count: bool = True) -> Iterator[str]:
    """Yield the name and length of each function, and "" for the file, that gives no reason.

    Without `options_count` the signature of a function is left out: in `cli/` it lists the options
    of a command, and its docstring is the help text.
    """
    tree = ast.parse(source)
    lines = source.count("\n")
    if lines > FILE_LINES and not _REASON.search(ast.get_docstring(tree) or ""):
        yield f"{lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.lineno if options_count else node.body[0].lineno
            lines = (node.end_lineno or first) - first + 1
            if lines > FUNCTION_LINES and not _REASON.search(ast.get_docstring(node) or ""):
                yield f"{node.name}(): {lines} lines"


def test_what_is_long_says_why() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in unexplained(
            path.read_text(encoding="utf-8"), options_count=path.parent.name != "cli"
        )
    ]
    assert not found, "make it shorter, or let its docstring say why it is long: 'Its length: ...'"


def test_docstrings_are_short() -> None:
    found: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if text.count("\n") >= DOCSTRING_LINES:
                    found.append(f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}")
    assert not found, f"more than {DOCSTRING_LINES} lines"


def test_the_search_finds_what_is_long() -> None:
    body = "\n".join(["    pass"] * FUNCTION_LINES)
    explained = f'def f():\n    """Its length: one line a case."""\n{body}\n'
    assert [*unexplained(f"def f():\n{body}\n")] == [f"f(): {FUNCTION_LINES + 1} lines"]
    assert not [*unexplained(f"def f():\n{body}\n", options_count=False)]
    assert not [*unexplained(explained)]
    file = "x = 1\n" * (FILE_LINES + 1)
    assert [*unexplained(file)] == [f"{FILE_LINES + 1} lines"]
    assert not [*unexplained('"""Its length: one line a case."""\n' + file)]
