"""List and count the outbox events that no dispatcher has processed."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.engine import outbox
from queue_workflows.types import Row


def listed(limit: int) -> list[Row]:
    """Return outbox events that no dispatcher has processed, the oldest first."""
    with db.transaction() as conn:
        return outbox.unprocessed(conn, limit)


def count() -> int:
    """Return the number of outbox events that no dispatcher has processed."""
    with db.statement() as conn:
        return outbox.count_unprocessed(conn)
