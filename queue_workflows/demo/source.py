"""Measuring one Python source: lines by kind, functions, complexity, documentation, imports."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from pathlib import PurePosixPath
from typing import TypedDict

from queue_workflows.demo import words

COMPARED_LINES = 8
"""Shorter functions are too much alike by nature to be compared."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


class FileFigures(TypedDict):
    """One source in numbers. `problem` tells why it could not be parsed; then most of them are 0."""

    path: str
    package: str
    problem: str | None
    lines: int
    code: int
    comments: int
    docstrings: int
    classes: int
    functions: int
    public: int
    documented: int
    imports: list[str]
    words: dict[str, int]


class FunctionFigures(TypedDict):
    """One function or method; `words` is None for one that is nested or too short to compare."""

    path: str
    package: str
    name: str
    line: int
    lines: int
    complexity: int
    words: dict[str, int] | None


def unparsed(path: str, package: str, raw: bytes, problem: str) -> FileFigures:
    """The figures of a source that could not be parsed: its lines, and why."""
    return FileFigures(
        path=path, package=package, problem=problem, lines=len(_lines(raw.decode("latin-1"))),
        code=0, comments=0, docstrings=0, classes=0, functions=0, public=0, documented=0,
        imports=[], words={},
    )  # fmt: skip


def measure(path: str, package: str, raw: bytes) -> tuple[FileFigures, list[FunctionFigures]]:
    """A source's figures and those of its functions; one that does not parse has a `problem`."""
    try:
        text = _decode(raw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return unparsed(path, package, raw, _reason(error)), []
    reader = _Reader(path, package, _lines(text))
    reader.read(tree)
    return reader.figures(text), reader.functions


def _decode(raw: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    text = raw.decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding}: byte {error.object[error.start]:#04x} at {error.start}"
    return str(error) or type(error).__name__


class _Scope:
    """Where a piece of the tree stands: in the module, a class or a function."""

    __slots__ = ("function", "is_public", "name")

    def __init__(self, name: str, is_public: bool, function: FunctionFigures | None) -> None:
        self.name = name
        self.is_public = is_public
        self.function = function


class _Reader:
    """One walk over a tree, which collects all that is counted."""

    def __init__(self, path: str, package: str, lines: list[str]) -> None:
        self.path = path
        self.package = package
        self.lines = lines
        self.functions: list[FunctionFigures] = []
        self.imports: set[str] = set()
        self.classes = self.public = self.documented = 0
        self.docstring_lines: set[int] = set()
        self.string_lines: set[int] = set()

    def read(self, tree: ast.Module) -> None:
        """Visit every node with its scope; a stack of our own, as trees can be deep."""
        stem = PurePosixPath(self.path).stem
        scope = _Scope("", stem == "__init__" or not stem.startswith("_"), None)
        self._note_documentation(tree, scope)
        waiting: list[tuple[ast.AST, _Scope]] = [(tree, scope)]
        while waiting:
            node, scope = waiting.pop()
            for child in ast.iter_child_nodes(node):
                waiting.append((child, self._enter(child, scope)))

    def _enter(self, node: ast.AST, scope: _Scope) -> _Scope:
        """Count a node; the scope of its children."""
        if isinstance(node, _FUNCTIONS):
            return self._enter_function(node, scope)
        if isinstance(node, ast.ClassDef):
            return self._enter_class(node, scope)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports.update(_imported(node, self.path))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            self._note_string(node)
        elif scope.function is not None:
            scope.function["complexity"] += _branches(node)
        return scope

    def _enter_function(self, node: Function, scope: _Scope) -> _Scope:
        name = f"{scope.name}.{node.name}".lstrip(".")
        first, last = node.lineno, node.end_lineno or node.lineno
        compared = scope.function is None and last - first + 1 >= COMPARED_LINES
        figures = FunctionFigures(
            path=self.path,
            package=self.package,
            name=name,
            line=first,
            lines=last - first + 1,
            complexity=1,
            words=words.count_words("\n".join(self.lines[first - 1 : last])) if compared else None,
        )
        self.functions.append(figures)
        is_public = scope.is_public and scope.function is None and not node.name.startswith("_")
        inner = _Scope(name, is_public, figures)
        self._note_documentation(node, inner)
        return inner

    def _enter_class(self, node: ast.ClassDef, scope: _Scope) -> _Scope:
        self.classes += 1
        is_public = scope.is_public and scope.function is None and not node.name.startswith("_")
        inner = _Scope(f"{scope.name}.{node.name}".lstrip("."), is_public, None)
        self._note_documentation(node, inner)
        return inner

    def _note_documentation(self, node: ast.Module | ast.ClassDef | Function, scope: _Scope) -> None:
        docstring = _docstring(node)
        self.public += scope.is_public
        self.documented += scope.is_public and docstring is not None
        if docstring is not None:
            before = self.lines[docstring.lineno - 1].encode()[: docstring.col_offset]
            first = docstring.lineno + (1 if before.strip() else 0)
            self.docstring_lines.update(range(first, (docstring.end_lineno or first) + 1))

    def _note_string(self, node: ast.Constant | ast.JoinedStr) -> None:
        """Remember the lines that a triple-quoted string goes on to: a `#` there is no comment."""
        last = node.end_lineno or node.lineno
        if last == node.lineno:
            return
        start = self.lines[node.lineno - 1].encode()[node.col_offset :]
        if start.lstrip(b"rRbBuUfFtT").startswith((b'"""', b"'''")):
            self.string_lines.update(range(node.lineno + 1, last + 1))

    def figures(self, text: str) -> FileFigures:
        """All that was counted."""
        code = comments = 0
        for number, line in enumerate(self.lines, 1):
            if number in self.docstring_lines:
                continue
            if number in self.string_lines:
                code += 1
            elif content := line.strip():
                comments += content.startswith("#")
                code += not content.startswith("#")
        return FileFigures(
            path=self.path,
            package=self.package,
            problem=None,
            lines=len(self.lines),
            code=code,
            comments=comments,
            docstrings=len(self.docstring_lines),
            classes=self.classes,
            functions=len(self.functions),
            public=self.public,
            documented=self.documented,
            imports=sorted(self.imports),
            words=words.count_words(text),
        )


def _docstring(node: ast.Module | ast.ClassDef | Function) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def _branches(node: ast.AST) -> int:
    """How many more ways a node opens through its function (McCabe's count)."""
    if isinstance(node, _BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def _imported(node: ast.Import | ast.ImportFrom, path: str) -> list[str]:
    """The dotted names that may be modules; a relative one starts from the path's own folder."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = [node.module] if node.module else []
    if node.level:
        folders = PurePosixPath(path).parent.parts
        if node.level - 1 > len(folders):
            return []
        base = [*folders[: len(folders) - node.level + 1], *base]
    return [".".join([*base, alias.name]) for alias in node.names]
