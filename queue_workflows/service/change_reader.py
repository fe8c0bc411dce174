"""Wait on an event loop for the changes that a filter asks for, which another thread offers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

PARTS: Final = "job_parts"
"""The channel of notifications about new parts, and the kind of change that stands for them."""
BACKLOG: Final = 2_000
"""Changes that a slow reader may be behind; then its stream ends, and it has to come again."""


class Change(NamedTuple):
    """A change: its place in the order of all, the kind `job` or `run`, and its data."""

    id: str
    kind: str
    data: dict[str, Any]

    def matches(self, wanted: dict[str, str]) -> bool:
        """Return whether the change has these members."""
        return all(
            (self.kind if name == "kind" else self.data.get(name)) == text
            for name, text in wanted.items()
        )


class Reader:
    """One waiter for changes, on an event loop; it gets those that match its filter."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wanted: dict[str, str], parts_of: str | None = None
    ) -> None:
        """`parts_of`: the id of a job whose new parts wake it too."""
        self._loop = loop
        self.parts_of = parts_of
        self._wanted = wanted
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self.closed = False

    def offer(self, found: Iterable[Change]) -> None:
        """Add the changes that match; called on the thread that follows the changes."""
        mine = [change for change in found if change.matches(self._wanted)]
        if mine:
            self._call(self._put, mine)

    def wake(self) -> None:
        """Let `next` return, once if it was not called meanwhile; called on that thread too."""
        self._call(self._wake)

    def begin(self) -> None:
        """Note that every later change is offered; called on the thread that follows them."""
        self._call(self._begun.set)

    async def begun(self, timeout_s: float) -> bool:
        """Wait until every later change is offered; return False if that takes longer."""
        try:
            await asyncio.wait_for(self._begun.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def end(self) -> None:
        """End the reader's iteration."""
        self._call(self._finish)

    def _call(self, call: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            self.closed = True  # its event loop has ended

    def _put(self, found: list[Change]) -> None:
        if self._changes.qsize() + len(found) > BACKLOG:
            self._finish()
        elif not self.closed:
            for change in found:
                self._changes.put_nowait(change)

    def _wake(self) -> None:
        if not self.closed and self._changes.empty():
            self._changes.put_nowait(Change("", PARTS, {}))

    def _finish(self) -> None:
        if not self.closed:
            self.closed = True
            self._changes.put_nowait(None)

    async def next(self, timeout_s: float) -> Change | None:
        """Return the next change; None after the timeout, and once the reader was ended."""
        try:
            return await asyncio.wait_for(self._changes.get(), timeout_s)
        except asyncio.TimeoutError:
            return None
