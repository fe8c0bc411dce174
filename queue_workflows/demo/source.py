"""Measuring one Python source: lines by kind, functions, complexity, documentation, imports."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections import Counter
from pathlib import PurePosixPath
from typing import Final, NamedTuple, TypedDict

from queue_workflows.demo import listing, words

COMPARED_LINES = 8
"""Functions shorter than this are too much alike by nature to be compared."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_REFUSALS = (SyntaxError, ValueError, LookupError, RecursionError, MemoryError)
"""What decoding and parsing raise for a source that is none (UnicodeDecodeError: a ValueError)."""


class Figures(TypedDict):
    """What is counted of a source, and added up for a package; `complexity` over all functions."""

    lines: int
    code: int
    comments: int
    docstrings: int
    classes: int
    functions: int
    complexity: int
    public: int
    documented: int


FIGURES: Final = (
    "lines", "code", "comments", "docstrings", "classes", "functions", "complexity", "public",
    "documented",
)  # fmt: skip


class File(Figures):
    """One source; a `problem` tells why it is not parsed, and then only its lines count."""

    path: str
    module: str
    package: str
    problem: str | None
    imports: list[str]


class Function(TypedDict):
    """One function or method; `words` is None for one too short, or local, to be compared."""

    path: str
    package: str
    name: str
    line: int
    lines: int
    complexity: int
    words: dict[str, int] | None


class Measured(NamedTuple):
    """What a source gives; `words` counts those of the whole text."""

    file: File
    functions: list[Function]
    words: Counter[str]


def measure(source: listing.Source, raw: bytes) -> Measured:
    """The figures of a source; one that does not parse gets a `problem`, never an error."""
    try:
        text = _unify(_decode(raw))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except _REFUSALS as error:
        return unparsed(source, raw, _reason(error))
    reader = _Reader(source, text)
    reader.read(tree)
    return Measured(reader.figures(), reader.functions, words.count_words(text))


def unparsed(source: listing.Source, raw: bytes, problem: str) -> Measured:
    """The figures of a source that has a problem: how many lines it has."""
    lines = len(_lines(_unify(raw.decode("latin-1"))))
    return Measured(_file(source, problem, lines), [], Counter())


def no_figures() -> Figures:
    """Nothing counted yet."""
    return Figures(
        lines=0, code=0, comments=0, docstrings=0, classes=0, functions=0, complexity=0, public=0,
        documented=0,
    )  # fmt: skip


def _file(source: listing.Source, problem: str | None, lines: int) -> File:
    file = File(
        **no_figures(),
        path=source["path"],
        module=source["module"],
        package=source["package"],
        problem=problem,
        imports=[],
    )
    file["lines"] = lines
    return file


def _decode(raw: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def _unify(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at {error.start} is not {error.encoding}"
    return str(error) or type(error).__name__


class _Scope(NamedTuple):
    """What a node stands in: the module, a class or a function; local: in a function."""

    name: str
    is_public: bool
    is_local: bool = False
    function: Function | None = None


class _Reader:
    """One walk over a tree that collects all that is counted."""

    def __init__(self, source: listing.Source, text: str) -> None:
        self.source = source
        self.lines = _lines(text)
        self.file = _file(source, None, len(self.lines))
        self.functions: list[Function] = []
        self.imports: set[str] = set()
        self.docstring_lines: set[int] = set()
        self.string_lines: set[int] = set()

    def read(self, tree: ast.Module) -> None:
        """Visit every node; the stack is a list, since trees can be deeper than Python's own."""
        stem = PurePosixPath(self.source["path"]).stem
        scope = _Scope("", stem == "__init__" or not stem.startswith("_"))
        self._note_documentation(tree, scope)
        waiting: list[tuple[ast.AST, _Scope]] = [(tree, scope)]
        while waiting:
            node, scope = waiting.pop()
            for child in ast.iter_child_nodes(node):
                waiting.append((child, self._enter(child, scope)))

    def figures(self) -> File:
        """All that was counted, and the lines by what they hold."""
        for number, line in enumerate(self.lines, 1):
            if number in self.docstring_lines:
                self.file["docstrings"] += 1
            elif number in self.string_lines:
                self.file["code"] += 1
            elif content := line.strip():
                self.file["comments" if content.startswith("#") else "code"] += 1
        self.file["functions"] = len(self.functions)
        self.file["complexity"] = sum(function["complexity"] for function in self.functions)
        self.file["imports"] = sorted(self.imports)
        return self.file

    def _enter(self, node: ast.AST, scope: _Scope) -> _Scope:
        """Count a node; what its children stand in."""
        if isinstance(node, _DEFINITIONS):
            return self._enter_definition(node, scope)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports.update(_imported(node, self.source))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            self._note_string(node)
        elif scope.function is not None:
            scope.function["complexity"] += _branches(node)
        return scope

    def _enter_definition(self, node: Definition, scope: _Scope) -> _Scope:
        name = f"{scope.name}.{node.name}" if scope.name else node.name
        is_public = scope.is_public and not scope.is_local and not node.name.startswith("_")
        if isinstance(node, ast.ClassDef):
            self.file["classes"] += 1
            inner = _Scope(name, is_public, scope.is_local)
        else:
            function = self._function(node, name, is_compared=not scope.is_local)
            self.functions.append(function)
            inner = _Scope(name, is_public, True, function)
        self._note_documentation(node, inner)
        return inner

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, is_compared: bool
    ) -> Function:
        body = self.lines[node.lineno - 1 : node.end_lineno]
        is_compared = is_compared and len(body) >= COMPARED_LINES
        return Function(
            path=self.source["path"],
            package=self.source["package"],
            name=name,
            line=node.lineno,
            lines=len(body),
            complexity=1,
            words=words.count_words("\n".join(body)) if is_compared else None,
        )

    def _note_documentation(self, node: ast.Module | Definition, scope: _Scope) -> None:
        docstring = _docstring(node)
        self.file["public"] += scope.is_public
        self.file["documented"] += scope.is_public and docstring is not None
        if docstring is not None:
            shared = bool(self._left_of(docstring).strip())
            first, last = docstring.lineno + shared, docstring.end_lineno or docstring.lineno
            self.docstring_lines.update(range(first, last + 1))

    def _note_string(self, node: ast.Constant | ast.JoinedStr) -> None:
        """Remember the lines that a triple-quoted string goes on to: a `#` there is no comment."""
        last = node.end_lineno or node.lineno
        if last == node.lineno:
            return
        line = self.lines[node.lineno - 1].encode()
        if line[node.col_offset :].lstrip(b"rRbBuUfFtT").startswith((b'"""', b"'''")):
            self.string_lines.update(range(node.lineno + 1, last + 1))

    def _left_of(self, node: ast.Constant) -> bytes:
        return self.lines[node.lineno - 1].encode()[: node.col_offset]


def _docstring(node: ast.Module | Definition) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def _branches(node: ast.AST) -> int:
    """How many more ways through its function a node opens (cyclomatic complexity)."""
    if isinstance(node, _BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def _imported(node: ast.Import | ast.ImportFrom, source: listing.Source) -> list[str]:
    """The dotted names that an import may find modules under; too many dots find nothing."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = [node.module] if node.module else []
    if node.level:
        own = source["module"].split(".")
        is_package = PurePosixPath(source["path"]).stem == "__init__"
        above = len(own) - node.level + is_package
        if above < 1:
            return []
        base = [*own[:above], *base]
    return [".".join([*base, alias.name]) for alias in node.names]
