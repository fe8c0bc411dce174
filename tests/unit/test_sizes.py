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


def too_long(source: str, *, options_count: bool = True) -> Iterator[str]:
    """Yield what is too long: a file or function that gives no reason, and any docstring.

    Without `options_count` the signature of a function is left out: in `cli/` it lists the options
    of a command, and its docstring is the help text.
    """
    tree = ast.parse(source)
    lines = source.count("\n")
    if lines > FILE_LINES and not _REASON.search(ast.get_docstring(tree) or ""):
        yield f"{lines} lines"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node) or ""
        if text.count("\n") >= DOCSTRING_LINES:
            yield f"more than {DOCSTRING_LINES} lines: {text.splitlines()[0]}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.lineno if options_count else node.body[0].lineno
            lines = (node.end_lineno or first) - first + 1
            if lines > FUNCTION_LINES and not _REASON.search(text):
                yield f"{node.name}(): {lines} lines"


def test_what_is_long_says_why_and_docstrings_are_short() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in too_long(
            path.read_text(encoding="utf-8"), options_count=path.parent.name != "cli"
        )
    ]
    assert not found, "make it shorter, or let its docstring say why it is long: 'Its length: ...'"


def test_the_search_finds_what_is_long() -> None:
    body = "\n".join(["    pass"] * FUNCTION_LINES)
    explained = f'def f():\n    """Its length: one line a case."""\n{body}\n'
    assert [*too_long(f"def f():\n{body}\n")] == [f"f(): {FUNCTION_LINES + 1} lines"]
    assert not [*too_long(f"def f():\n{body}\n", options_count=False)]
    assert not [*too_long(explained)]
    file = "x = 1\n" * (FILE_LINES + 1)
    assert [*too_long(file)] == [f"{FILE_LINES + 1} lines"]
    assert not [*too_long('"""Its length: one line a case."""\n' + file)]
    assert [*too_long('"""One.' + "\n" * DOCSTRING_LINES + 'Last."""\n')] == [
        f"more than {DOCSTRING_LINES} lines: One."
    ]
    assert not [*too_long('"""One.' + "\n" * (DOCSTRING_LINES - 1) + 'Last."""\n')]
