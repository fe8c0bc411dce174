"""The set of SQL functions and triggers that this code installs, in two parts of these names."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from queue_workflows import db
from queue_workflows.db import functions, schema

if TYPE_CHECKING:
    import pytest

PARTS = ("functions", "triggers")


def text(part: str) -> str:
    """Return the SQL that installs a part."""
    return functions.parts()[PARTS.index(part)].text


def names(part: str) -> list[str]:
    """Return the names of the functions or triggers that a part creates, in its order."""
    return functions.parts()[PARTS.index(part)].objects


def checksum(part: str) -> str:
    """Return what the database records of a part that is installed."""
    return hashlib.sha256(text(part).encode()).hexdigest()


def replace(monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Let this process install other texts of the parts: `replace(..., triggers="...")`."""
    made = tuple(part._replace(text=texts.get(part.name, part.text)) for part in functions.parts())
    monkeypatch.setattr(functions, "parts", lambda: made)


def retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again after 20 ms to install triggers whose tables were in use."""
    monkeypatch.setattr(schema, "GIVEN_WAY_S", 0.02)


def install(conn: db.Connection, *parts: str) -> None:
    """Install parts, by default both, whatever is there; joins the transaction of `conn`."""
    for part in parts or PARTS:
        functions.install(conn, functions.parts()[PARTS.index(part)])


def problems(conn: db.Connection) -> list[str]:
    """Return the faults of what is installed, each as a sentence."""
    return [problem.text for problem in functions.problems(conn)]
