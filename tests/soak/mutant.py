"""Define a mutant: the engine with one defence switched off, and the check that must find it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from queue_workflows import db
from queue_workflows.db import statements

Conn = db.Connection


class Mutant(NamedTuple):
    """What is off, the check that has to find it, and what it does to a process and the schema."""

    off: str
    caught_by: str
    process: Callable[[], None] | None = None
    schema: Callable[[Conn], None] | None = None
    focus: str | None = None
    """The kind of fault that shows it, which most of them then are."""
    load: Mapping[str, int] = {}
    """Weights of workflows that show it."""
    gap_s: float | None = None
    """Mean seconds between faults: those that last need others at work meanwhile."""
    jobs: Mapping[str, int] = {}
    """Weights of orders of jobs that show it."""
    hostile: tuple[str, ...] = ()
    """Columns whose extreme values show it, which most hostile rows then have."""
    values: str = ""
    """Of these values only those whose name matches."""
    calls: float | None = None
    """Share of calls of functions among what the hostile roles do."""
    strangers: str = ""
    """The kind of a stranger's transaction that shows it, which all then are."""
    grants: str = ""
    """What the hostile submitter is granted in addition."""


class Replaced(NamedTuple):
    """One name of the package that `replace` has bound to something else."""

    owner: object
    name: str
    old: Any


replaced: list[Replaced] = []
"""What `replace` and `rewrite` have changed in this process, in order."""


def replace(owner: object, name: str, new: Any) -> None:
    """Replace a function of a module or class, under every name that a module gave it.

    A module may have bound the function when it was imported, as `line = display.line` does. Such
    a name is replaced too, else the engine would go on calling the old function. AssertionError if
    `owner` does not define the name any more.
    """
    assert name in vars(owner), f"{owner!r} does not define {name} any more"
    old = vars(owner)[name]
    _set(owner, name, new)
    if isinstance(owner, type):
        return
    ours = [each for key, each in sys.modules.items() if key.startswith("queue_workflows")]
    for module in ours:
        for alias in [key for key, value in vars(module).items() if value is old]:
            _set(module, alias, new)


def _set(owner: object, name: str, new: Any) -> None:
    replaced.append(Replaced(owner, name, vars(owner)[name]))
    setattr(owner, name, new)


def undo() -> None:
    """Put back what `replace` and `rewrite` have changed in this process."""
    while replaced:
        owner, name, old = replaced.pop()
        setattr(owner, name, old)


def rewrite(statement: Mapping[str, statements.Named], old: bytes, new: bytes) -> None:
    """Replace `old` in a statement of this process, for both job families; it has to be there."""
    for table, own in statement.items():
        assert old in own.text, f"the statement for {table} does not say {old!r} any more"
        replaced.append(Replaced(own, "text", own.text))
        own.text = own.text.replace(old, new)


def edit(conn: Conn, function: str, *changes: tuple[str, str]) -> None:
    """Replace what in an SQL function matches; AssertionError when nothing does."""
    row = conn.execute("SELECT pg_get_functiondef(%s::regproc) AS text", (function,)).fetchone()
    assert row is not None
    text: str = row["text"]
    for pattern, new in changes:
        text, count = re.subn(pattern, lambda _, new=new: new, text)
        assert count, f"{function} does not say {pattern!r} any more"
    conn.execute(text.encode())
