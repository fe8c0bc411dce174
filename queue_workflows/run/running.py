"""Send a running handler's reports from its executor to the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows.run import wire
from queue_workflows.tasks import interruptible
from queue_workflows.types import JsonDict

EVERY_S: Final = 0.05
"""Seconds between two reports of a kind; what a handler reports between them is sent later."""
Send = Callable[..., None]


class Running(interruptible.Interruptible):
    """A `tasks.control.Control` whose worker is another process; thread-safe."""

    def __init__(self, key: int, send: Send, wake: Callable[[], object]) -> None:
        """`wake` lets another thread send what `take_unsent` returns soon."""
        super().__init__()
        self.key = key
        self._send = send
        self._wake = wake
        self._sent: dict[int, float] = {}
        self._unsent: dict[tuple[int, str], bytes] = {}
        self._take_parts: Callable[[], JsonDict | None] | None = None

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        text = interruptible.progress_text(value)
        unsent = self._unsent.get((wire.PROGRESS, ""), b"")
        self._report(wire.PROGRESS, "", unsent if text is None else text.encode())

    def note_cursor(self, name: str, key: str, position: int) -> None:
        """Report how many items of a cursor are done, at once or soon."""
        self._report(wire.CURSOR, f"{name}\0{key}", wire.encoded([name, key, position]))

    def _report(self, kind: int, what: str, body: bytes) -> None:
        now = time.monotonic()
        if now - self._sent.get(kind, -EVERY_S) >= EVERY_S:
            self._sent[kind] = now
            self._unsent.pop((kind, what), None)
            self._send(kind, self.key, body)
            return
        first = not self._unsent
        self._unsent[kind, what] = body
        if first:
            self._wake()

    def send_later(self, take: Callable[[], JsonDict | None]) -> None:
        """Send the request that `take` returns, soon, without a wait for its answer."""
        self._take_parts = take
        self._wake()

    def take_unsent(self) -> bytes:
        """Return the frames of the last reports that are not sent yet."""
        found: list[bytes] = []
        while self._unsent:
            (kind, _), body = self._unsent.popitem()
            found.append(wire.frame(kind, self.key, body))
        take, self._take_parts = self._take_parts, None
        if take is not None and (request := take()) is not None:
            body = wire.encoded({"no": 0, "what": "step", "request": request})
            found.append(wire.frame(wire.ASK, self.key, body))
        return b"".join(found)

    def request(self, reason: str) -> None:
        """Tell the handler to end: `cancelled` sets its event; the first reason counts."""
        if reason == "cancelled":
            self.set_cancelled()
        else:
            self.interrupt(reason)
