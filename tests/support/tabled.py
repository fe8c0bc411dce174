"""Name the case of a table that a test fails for: the cases share one set-up."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from queue_workflows import db


@contextmanager
def case(*given: object) -> Generator[None]:
    """Name these values in the error of the block."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        named = ", ".join(f"{each!r:.300}" for each in given)
        raise AssertionError(f"case {named}: {error}") from error


@contextmanager
def undone(conn: db.Connection, *given: object) -> Generator[None]:
    """Name these values likewise, and roll back what the block does on the connection."""
    with case(*given), conn.transaction(force_rollback=True):
        yield
