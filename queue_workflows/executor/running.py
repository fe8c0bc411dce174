"""Represent the job whose handler runs in this executor: reports and requests to the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.executor import protocol
from queue_workflows.types import JsonDict

PROGRESS_LIMIT: Final = 8000
"""Characters of a progress report; a longer one counts as a beat only."""
EVERY_S: Final = 0.05
"""Seconds between two progress messages; what a handler reports between them is sent later."""
Send = Callable[..., None]


class Running:
    """A `tasks.control.Control` whose worker is another process; thread-safe."""

    def __init__(self, key: int, send: Send, wake: Callable[[], object]) -> None:
        """`wake` lets another thread call `flush` soon."""
        self.key = key
        self._send = send
        self._wake = wake
        self._lock = threading.Lock()
        self._sent_at = -EVERY_S
        self._unsent: protocol.Progress | None = None
        self._noted_at = -EVERY_S
        self._cursors: dict[tuple[str, str], protocol.CursorAt] = {}
        self._take_parts: Callable[[], JsonDict | None] | None = None
        self._cancelled = False
        self._event: threading.Event | None = None
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the handler is to end at its next yield or await; None: it runs on."""

    def status(self, *values: Any, **fields: Any) -> None:
        """Report status (`status_callback`): a number 0 to 1 or a dict is progress, else a beat."""
        value: Any = fields or (values[0] if values else None)
        self.report_progress(None if isinstance(value, str) else value)

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        text, now = _progress(value), time.monotonic()
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

    @property
    def cancel(self) -> threading.Event:
        """Return the event that is set on cancel; created on first use, as short jobs need none."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self._cancelled:
                    self._event.set()
            return self._event

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job was cancelled."""
        return self._cancelled

    def request(self, reason: str) -> None:
        """Tell the handler to end: `cancelled` sets its event; the first reason counts."""
        with self._lock:
            if reason == "cancelled":
                self._cancelled = True
                if self._event is not None:
                    self._event.set()
            if self.interrupted is None:
                self.interrupted = reason
                if self._interrupt is not None:
                    self._interrupt()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set the function to call, on any thread, on an interrupt; None removes it.

        It is called at once if the job was interrupted before. It must not block.
        """
        with self._lock:
            self._interrupt = call
            if call is not None and self.interrupted is not None:
                call()


def _progress(value: Any) -> str | None:
    """Return a report as JSON text, or None if it is activity only."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, dict)):
        return None
    if isinstance(value, (int, float)) and not 0 <= value <= 1:
        return None
    try:
        text = payload.encode(value, "progress")
    except errors.InvalidPayload:
        return None
    return text if len(text) <= PROGRESS_LIMIT else None
