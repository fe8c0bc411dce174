"""The server accepts every named statement, and the code uses each."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import psycopg

import queue_workflows
from tests.support import named_statements

_PARAMETER = re.compile(rb"%\((\w+)\)s|%%")
PACKAGE = Path(queue_workflows.__file__).parent


def numbered(text: bytes) -> bytes:
    """Return a statement with the parameters that PREPARE takes."""
    names: list[bytes] = []

    def number(match: re.Match[bytes]) -> bytes:
        if match[0] == b"%%":
            return b"%"
        if match[1] not in names:
            names.append(match[1])
        return b"$%d" % (names.index(match[1]) + 1)

    return _PARAMETER.sub(number, text)


def test_the_server_takes_each(db: ModuleType) -> None:
    refused: dict[str, str] = {}
    with db.connect() as conn:
        for name, text in named_statements.texts().items():
            try:
                with conn.transaction(force_rollback=True):
                    conn.execute(b"PREPARE this_statement AS " + numbered(text))
                    conn.execute(b"DEALLOCATE this_statement")
            except psycopg.Error as error:
                refused[name] = str(error)
    assert refused == {}


def test_the_code_uses_every_statement() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"\bstatements\.(\w+\.\w+)", code))
    assert sorted({name.partition("[")[0] for name in named_statements.texts()} - used) == []
