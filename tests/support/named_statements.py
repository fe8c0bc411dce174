"""The SQL statements of the library, which are the files of `queue_workflows/sql/queries/`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queue_workflows import sql
from queue_workflows.db import statements

BACKGROUND = {"maintenance", "prune"}
"""The names of the threads of the service that execute statements by the clock."""


def texts() -> dict[str, bytes]:
    """Return the texts of `every`. Parameters are those of psycopg, such as `%(name)s`."""
    return {name: one.text for name, one in every().items()}


def every() -> dict[str, statements.Named]:
    """Return each statement by `file.name`, or by `file.name[table]` if each table has one."""
    found: dict[str, statements.Named] = {}
    for path in sorted(sql.QUERIES.glob("*.sql")):
        for name, one in statements.parse(path.read_text("utf-8"), path.name).items():
            if isinstance(one, statements.Named):
                found[f"{path.stem}.{name}"] = one
                continue
            for table, own in one.items():
                found[f"{path.stem}.{name}[{table}]"] = own
    return found


def executed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list to which the text of each statement is added when it is executed.

    Those that set something for a transaction do not count, nor those of the service's own threads,
    whose time may come at any moment.
    """
    found: list[bytes] = []
    real = statements.Named.__call__

    def call(self: statements.Named, conn: Any, /, **given: Any) -> Any:
        is_setting = b"set_config" in self.text or b"SET " in self.text
        if not is_setting and threading.current_thread().name not in BACKGROUND:
            found.append(self.text)
        return real(self, conn, **given)

    monkeypatch.setattr(statements.Named, "__call__", call)
    return found
