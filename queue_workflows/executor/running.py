"""Send a running handler's reports and requests from its executor to the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows.executor import protocol
from queue_workflows.tasks import interruptible
from queue_workflows.types import JsonDict

EVERY_S: Final = 0.05
"""Seconds between two progress messages; what a handler reports between them is sent later."""
Send = Callable[..., None]


class Running(interruptible.Interruptible):
    """A `tasks.control.Control` whose worker is another process; thread-safe."""

    def __init__(self, key: int, send: Send, wake: Callable[[], object]) -> None:
        """`wake` lets another thread call `flush` soon."""
        super().__init__()
        self.key = key
        self._send = send
        self._wake = wake
        self._sent_at = -EVERY_S
        self._unsent: protocol.Progress | None = None
        self._noted_at = -EVERY_S
        self._cursors: dict[tuple[str, str], protocol.CursorAt] = {}
        self._take_parts: Callable[[], JsonDict | None] | None = None

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        text, now = interruptible.progress_text(value), time.monotonic()
        if text is None and self._unsent is not None:
            text = self._unsent.value
        message = protocol.Progress(self.key, text)
        if now - self._sent_at >= EVERY_S:
            self._sent_at, self._unsent = now, None
            self._send(message)
            return
        first, self._unsent = self._unsent is None, message
        if first:
            self._wake()

    def note_cursor(self, name: str, key: str, position: int) -> None:
        """Report how many items of a cursor are done, at once or soon."""
        now = time.monotonic()
        message = protocol.CursorAt(self.key, name, key, position)
        if now - self._noted_at >= EVERY_S:
            self._noted_at = now
            self._cursors.pop((name, key), None)
            self._send(message)
            return
        if not self._cursors:
            self._wake()
        self._cursors[name, key] = message

    def send_later(self, take: Callable[[], JsonDict | None]) -> None:
        """Send the request that `take` returns, soon, without a wait for its answer."""
        self._take_parts = take
        self._wake()

    def take_unsent(self) -> list[protocol.Message]:
        """Return the last reports that are not sent yet."""
        unsent, self._unsent = self._unsent, None
        found: list[protocol.Message] = [] if unsent is None else [unsent]
        take, self._take_parts = self._take_parts, None
        if take is not None and (request := take()) is not None:
            found.append(protocol.Ask(self.key, "parts", request))
        while self._cursors:
            found.append(self._cursors.popitem()[1])
        return found

    def request(self, reason: str) -> None:
        """Tell the handler to end: `cancelled` sets its event; the first reason counts."""
        if reason == "cancelled":
            self.set_cancelled()
        else:
            self.interrupt(reason)
