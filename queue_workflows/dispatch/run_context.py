"""Read the context of a run: its inputs, and the outputs of its completed nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from queue_workflows import config, db, errors
from queue_workflows.db import statements
from queue_workflows.types import Unreadable

QUERY_KB = 32 * 1024
"""What one query should return of a context: half of what is loaded, as SQL adds spaces to JSON."""
READ_BYTES = 128 * 1024**2
"""The most that a plan reads of a context, as jsonb. Loaded, it takes up to ten times as much."""


class TooLarge(errors.UnreadableRow):
    """More than one transaction should read or write at once; a part of it may fit."""


class Room:
    """How much of a context one plan may still read."""

    def __init__(self) -> None:
        self.left = READ_BYTES


def read(
    run_id: str, heads: Iterable[str] | None, room: Room | None = None
) -> db.Script[dict[str, Any]]:
    """Read the run's context with the `context_delta` of each completed node under its id.

    Only the members that `heads` names; None: all of them. Raises `UnreadableRow` for a context
    that is no object, and for a member that cannot be loaded. Raises `TooLarge` for more than fits
    into `room`, which the reads of one plan share.
    """
    room = room or Room()
    wanted = None if heads is None else list(heads)
    at_once = max(1, QUERY_KB // max(1, config.MAX_PAYLOAD_KB.read()))
    if wanted is not None and len(wanted) > at_once:
        return (yield from _merged(run_id, wanted, at_once, room))
    row = yield from statements.nodes.context.script(heads=wanted, run_id=run_id, most=room.left)
    if row is None:
        return {}
    if row["kind"] != "object":
        raise errors.UnreadableRow(f"its inputs are a JSON {row['kind']}, not an object")
    if row["size"] > room.left:
        raise TooLarge(
            "the inputs and outputs that its next nodes refer to are larger together than the "
            f"{READ_BYTES / 1e6:.0f} MB of JSON that are read at once; keep a large value in a "
            "file or an artifact and pass its path"
        )
    found: Any = row["context"]
    if not isinstance(found, Unreadable):
        room.left -= row["size"]
        return found
    if wanted is not None and len(wanted) > 1:
        return (yield from _merged(run_id, wanted, len(wanted) // 2, room))
    what = f" under {wanted[0]!r:.120}" if wanted else ""
    raise errors.UnreadableRow(f"its inputs or outputs{what} cannot be read: {found.reason}")


def _merged(run_id: str, heads: list[str], at_once: int, room: Room) -> db.Script[dict[str, Any]]:
    """Read these members of the context, read in parts: together they may be too large."""
    found: dict[str, Any] = {}
    for start in range(0, len(heads), at_once):
        found |= yield from read(run_id, heads[start : start + at_once], room)
    return found
