"""Read a run or a job with its events, as the public `history` module shows it, and find ids."""

from __future__ import annotations

import re

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

_UUID = "00000000-0000-0000-0000-000000000000"


def starting_with(conn: db.Connection, prefix: str, *, limit: int) -> list[Row]:
    """Return runs and jobs whose id is a UUID with this prefix; at most `limit` of each kind.

    Each row has `kind` and `id`. The ids are ranges of the primary keys: UUIDs have one form, so
    that every collation orders them by their digits. Ids of another form, which apps give, are not
    found.
    """
    low, high = prefix + _UUID[len(prefix) :], prefix + _UUID.replace("0", "f")[len(prefix) :]
    if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", low):
        return []
    return statements.history_rows.ids_in_range(
        conn, prefix=prefix, low=low, high=high, limit=limit
    )
