"""Load the named statements of `sql/queries/`, each as an attribute: `statements.runs.start`.

A file `sql/queries/<noun>.sql` holds statements. Each stands below a line `-- name: <name>` and a
comment that describes it. Parameters are psycopg's, `%(name)s`. Every statement is complete
and names real tables. A statement that both job families need has one more line after its name:
`-- tables: ingest_jobs workflow_node_jobs`. Its text is the one for `ingest_jobs`, and its
attribute is a mapping from table name to text. Type checkers read `statements.pyi`, which
`python -m tests.support.stubgen` makes.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

from queue_workflows import sql

JOB_TABLES = ("ingest_jobs", "workflow_node_jobs")
_NODE_NAMES = {"ingest_jobs": "workflow_node_jobs", "ingest_job_events": "workflow_node_events"}
_INGEST_NAME = re.compile(r"\b(?:ingest_jobs|ingest_job_events)\b")
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_TABLES = f"-- tables: {' '.join(JOB_TABLES)}\n"
_COMMENT = re.compile(r"(?:--[^\n]*\n)*")


class Statement(SimpleNamespace):
    """One statement: its `comment`, and its `text` or, for both job families, its `texts`."""

    comment: str
    text: bytes | None
    texts: dict[str, bytes] | None


def parse(source: str, file: str) -> dict[str, Statement]:
    """Return the statements of a file by name, in the order of the file.

    Raises ValueError for text before the first name, a name that is taken, and a statement that is
    empty or has no comment.
    """
    before, *parts = _NAME.split(source)
    if _COMMENT.sub("", before).strip():
        raise ValueError(f"{file}: there is text before the first `-- name:` line")
    found: dict[str, Statement] = {}
    for name, rest in zip(parts[::2], parts[1::2], strict=True):
        shared = rest.startswith(_TABLES)
        commented = rest.removeprefix(_TABLES)
        comment = _COMMENT.match(commented)
        assert comment is not None
        text = commented[comment.end() :].strip().removesuffix(";")
        lines = [line.removeprefix("--").strip() for line in comment[0].splitlines()]
        if name in found or not text or not any(lines):
            raise ValueError(f"{file}: {name} is there twice, or has no comment, or no text")
        texts = {table: _named(text, table) for table in JOB_TABLES} if shared else None
        found[name] = Statement(
            comment="\n".join(lines), text=None if shared else text.encode(), texts=texts
        )
    return found


def _named(text: str, table: str) -> bytes:
    """Return a statement over `ingest_jobs` as the one over `table`."""
    if table == "ingest_jobs":
        return text.encode()
    return _INGEST_NAME.sub(lambda match: _NODE_NAMES[match[0]], text).encode()


@cache
def _parsed(noun: str) -> dict[str, Statement]:
    return parse((sql.QUERIES / f"{noun}.sql").read_text(encoding="utf-8"), f"{noun}.sql")


@cache
def _file(noun: str) -> SimpleNamespace:
    found = _parsed(noun)
    return SimpleNamespace(**{name: one.texts or one.text for name, one in found.items()})


def comments(noun: str) -> dict[str, str]:
    """Return the comment of each statement of a file, as one line, by the statement's name."""
    return {name: " ".join(one.comment.split()) for name, one in _parsed(noun).items()}


def __getattr__(noun: str) -> SimpleNamespace:
    """Return the statements of one file; it is read once, when it is first named."""
    try:
        found = globals()[noun] = _file(noun)
    except FileNotFoundError:
        raise AttributeError(f"there is no sql/queries/{noun}.sql") from None
    return found
