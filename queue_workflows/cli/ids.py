"""Find what a person names by an id: as it is stored, or as a command printed it."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.runtime import display
from queue_workflows.store import overview, payload
from queue_workflows.types import Row

HELP = "Put -- before an id that begins with a dash. Escapes such as \\x1b are understood."


def find(conn: db.Connection, any_id: str) -> tuple[str, Row | None]:
    """Return the stored id and what has it, as `overview.find` returns it; None: nothing has it.

    The id as it was given comes first. An id with escapes (`a\\x1b`, as commands print it) stands
    for the characters only where nothing has that very text as its id.
    """
    for one in dict.fromkeys((any_id, display.restored(any_id))):
        # The database takes neither NUL nor the surrogates that a shell makes of other bytes.
        row = overview.find(conn, one) if payload.is_storable(one) else None
        if row is not None:
            return one, row
    return any_id, None
