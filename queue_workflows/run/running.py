"""Pass a running handler's reports to its worker, and the worker's requests to end to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.run import wire
from queue_workflows.types import JsonDict

EVERY_S: Final = 0.05
"""Seconds between two reports of a kind; what a handler reports between them is sent later."""
PROGRESS_LIMIT: Final = 8000
"""Characters of a progress report; a longer one counts as a heartbeat only."""
Send = Callable[..., None]
_LOCK: Final = threading.Lock()
"""Held for a moment by any job: one lock for each would cost more than short jobs take."""


class Running:
    """A `tasks.control.Control` whose worker is another process; thread-safe."""

    def __init__(self, key: int, send: Send, wake: Callable[[], object]) -> None:
        """`wake` lets another thread send what `take_unsent` returns soon."""
        self._event: threading.Event | None = None
        self.cancel_requested = False
        """Whether the job was cancelled. A handler may set the event for threads of its own."""
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the handler is to end at its next yield or await; None: it may continue."""
        self.key = key
        self._send = send
        self._wake = wake
        self._sent: dict[int, float] = {}
        self._unsent: dict[tuple[int, str], bytes] = {}
        self._take_parts: Callable[[], JsonDict | None] | None = None

    def report_progress(self, value: Any) -> None:
        """Report a yielded value: a number 0 to 1, dict or text is progress, else a heartbeat."""
        text = progress_text(value)
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

    @property
    def cancel(self) -> threading.Event:
        """Return the event that is set on cancel; created on first use, as short jobs need none."""
        with _LOCK:
            if self._event is None:
                self._event = threading.Event()
            if self.cancel_requested:
                self._event.set()
            return self._event

    def interrupt(self, reason: str) -> None:
        """End a handler that yields or awaits there; the first reason counts."""
        with _LOCK:
            if self.interrupted is None:
                self.interrupted = reason
                if self._interrupt is not None:
                    self._interrupt()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set the function to call, on any thread, on an interrupt; None removes it.

        It is called at once if the job was interrupted before. It must not block.
        """
        with _LOCK:
            self._interrupt = call
            if call is not None and self.interrupted is not None:
                call()

    def status(self, *values: Any, **fields: Any) -> None:
        """Report status (`status_callback`): a number 0 to 1 or dict is progress."""
        value: Any = fields or (values[0] if values else None)
        self.report_progress(None if isinstance(value, str) else value)

    def request(self, reason: str) -> None:
        """Tell the handler to end: `cancelled` sets its event; the first reason counts."""
        if reason == "cancelled":
            with _LOCK:
                self.cancel_requested = True
                if self._event is not None:
                    self._event.set()
        self.interrupt(reason)


def progress_text(value: Any) -> str | None:
    """Return a report as JSON text, or None if it counts as a heartbeat only."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, dict)):
        return None
    if isinstance(value, (int, float)) and not 0 <= value <= 1:
        return None
    try:
        text = payload.encode(value, "progress")
    except errors.InvalidPayload:
        return None
    return text if len(text) <= PROGRESS_LIMIT else None
