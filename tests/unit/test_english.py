"""The five habits that make correct English hard to read may only become rarer.

Each is counted in the docstrings, comments and messages of the package, in the comments of its SQL
and in the pages of `docs/`, per 1,000 words. A new text that raises a figure has to be rewritten;
a change that lowers one lowers its line. `python -m tests.unit.test_english [HABIT]` prints the
places.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import queue_workflows

PACKAGE = Path(queue_workflows.__path__[0])
DOCS = Path(__file__).parents[2] / "docs"
GENERATED = {"commands.md", "configuration.md", "errors.md", "exit-codes.md", "schema.md"}
HABITS = {
    "a colon for a verb": re.compile(r"[\w)\"']: (?=\S)"),
    "those, that of, one of": re.compile(r"\b(?:those|that of|one of)\b", re.I),
    "a no instead of a not": re.compile(
        r"\b(?:(?:is|are|was|were|has|have|had|be) no|nothing|nobody|no one|none of)\b", re.I
    ),
    "what as a noun": re.compile(r"\bwhat\b(?![^.?!]*\?)", re.I),
    "None and a colon": re.compile(r"\bNone: "),
}
LIMITS = {
    "code": {
        "a colon for a verb": 9.9,
        "those, that of, one of": 0.8,
        "a no instead of a not": 2.9,
        "what as a noun": 1.1,
        "None and a colon": 0.1,
    },
    "sql": {
        "a colon for a verb": 9.7,
        "those, that of, one of": 2.1,
        "a no instead of a not": 2.8,
        "what as a noun": 1.5,
        "None and a colon": 0.0,
    },
    "docs": {
        "a colon for a verb": 7.4,
        "those, that of, one of": 1.0,
        "a no instead of a not": 2.2,
        "what as a noun": 1.8,
        "None and a colon": 0.0,
    },
}
"""The most of each habit, per 1,000 words."""
SLACK = 0.3
"""How far a figure may be below its limit before the limit has to be lowered."""
MARKER = re.compile(r"-- (?:(?:name|tables|fragment|both):|end$)")
MESSAGE = re.compile(r"(?:\S+\s+){3}\S")


class Text(NamedTuple):
    """A piece of English and where it stands."""

    place: str
    words: str


def _plain(text: str) -> str:
    """Return the text in one line, with a word in place of each piece of code."""
    text = re.sub(r"`[^`]*`", "`code`", text)
    return " ".join(text.split())


def code_texts() -> Iterator[Text]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = str(path.relative_to(PACKAGE))
        nodes = [*ast.walk(ast.parse(source))]
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr)
                 for part in node.values}  # fmt: skip
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                value = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "`code`"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and id(node) not in parts:
                value = node.value
            else:
                continue
            if isinstance(value, str) and MESSAGE.match(value):
                yield Text(f"{name}:{node.lineno}", _plain(value))
        block: list[str] = []
        begin = last = 0
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT or token.string.startswith(("# fmt", "# pyright")):
                continue
            if token.start[0] != last + 1 and block:
                yield Text(f"{name}:{begin}", _plain(" ".join(block)))
                block = []
            begin = begin if block else token.start[0]
            last = token.start[0]
            block.append(token.string.lstrip("# "))
        if block:
            yield Text(f"{name}:{begin}", _plain(" ".join(block)))


def sql_texts() -> Iterator[Text]:
    for path in sorted(PACKAGE.rglob("*.sql")):
        block: list[str] = []
        begin = 0
        for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
            comment = line.strip()
            if comment.startswith("-- ") and not MARKER.match(comment):
                begin = begin if block else number
                block.append(comment[3:])
            elif block:
                yield Text(f"{path.relative_to(PACKAGE)}:{begin}", _plain(" ".join(block)))
                block = []


def doc_texts() -> Iterator[Text]:
    for path in sorted(DOCS.rglob("*.md")):
        if path.name in GENERATED:
            continue
        text = re.sub(
            r"^ *```.*?^ *```|<!--.*?-->", lambda code: "\n" * code[0].count("\n"),
            path.read_text(encoding="utf-8"), flags=re.S | re.M,
        )  # fmt: skip
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith(("#", "|--", "| --")):
                yield Text(f"docs/{path.relative_to(DOCS)}:{number}", _plain(line))


SOURCES = {"code": code_texts, "sql": sql_texts, "docs": doc_texts}


def per_thousand(source: str) -> dict[str, float]:
    texts = list(SOURCES[source]())
    words = sum(len(text.words.split()) for text in texts)
    return {
        habit: round(
            1000 * sum(len(pattern.findall(text.words)) for text in texts) / words, 1
        )
        for habit, pattern in HABITS.items()
    }  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_no_habit_becomes_more_frequent(source: str) -> None:
    found = per_thousand(source)
    limits = LIMITS[source]
    over = {
        habit: (value, limits[habit]) for habit, value in found.items() if value > limits[habit]
    }
    assert not over, f"more than the limit per 1,000 words (found, limit): {over}"
    loose = {
        habit: (value, limits[habit])
        for habit, value in found.items()
        if value < limits[habit] - SLACK
    }
    assert not loose, f"lower these limits (found, limit): {loose}"


if __name__ == "__main__":
    chosen = " ".join(sys.argv[1:])
    for kind, texts in SOURCES.items():
        print(kind, per_thousand(kind))
        for text in texts():
            for habit, pattern in HABITS.items():
                if chosen and chosen in habit and pattern.search(text.words):
                    print(f"  {text.place}: {text.words}")
