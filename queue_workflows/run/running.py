"""Pass a running handler's reports to its worker, and the worker's stop requests to the handler."""

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
"""Least seconds between two messages of a kind; reports in between are sent later."""
PROGRESS_LIMIT: Final = 8000
"""The most characters of a progress report; a longer one only counts as a heartbeat."""
Send = Callable[..., None]
_LOCK: Final = threading.Lock()
"""Held briefly; shared by all jobs, since a lock per job would cost more than a short job."""


def _drop(*_: object) -> None: ...


class Running:
    """A `tasks.control.Control` whose worker is another process; thread-safe."""

    def __init__(
        self, key: int = 0, send: Send = _drop, wake: Callable[[], object] = _drop
    ) -> None:
        """`wake` lets another thread soon call `flush`.

        Without `send`, the handler runs outside of a worker, and its reports are dropped.
        """
        self._event: threading.Event | None = None
        self.cancel_requested = False
        """Whether the job was cancelled. A handler may set the event for threads of its own."""
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the handler has to end at its next yield or await; None if it may continue."""
        self.key = key
        self._send = send
        self._wake = wake
        self._sent: dict[int, float] = {}
        self._unsent: dict[tuple[int, str], bytes] = {}
        self._flush_parts: Callable[[Callable[[JsonDict], object]], object] | None = None

    def report_progress(self, value: Any) -> None:
        """Report a yielded value; a dict, text or number from 0 to 1 is progress as well."""
        text = progress_text(value)
        unsent = self._unsent.get((wire.PROGRESS, ""), b"")
        self._report(wire.PROGRESS, "", unsent if text is None else text.encode())

    def note_cursor(self, name: str, key: str, position: int) -> None:
        """Report the position of a cursor, at once or soon."""
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

    def send_later(self, flush: Callable[[Callable[[JsonDict], object]], object]) -> None:
        """Soon call `flush` with a function that sends a request and waits for no answer."""
        self._flush_parts = flush
        self._wake()

    def _send_request(self, request: JsonDict) -> None:
        body = wire.encoded({"no": 0, "what": "step", "request": request})
        self._send(wire.ASK, self.key, body)

    def flush(self) -> bool:
        """Send the delayed reports and parts of a stream; return whether there were any."""
        reports = self._taken()
        for kind, body in reports:
            self._send(kind, self.key, body)
        flush, self._flush_parts = self._flush_parts, None
        if flush is not None:
            flush(self._send_request)
        return bool(reports) or flush is not None

    def take_unsent(self) -> bytes:
        """Return the frames of the last reports that are not sent yet."""
        if not self._unsent:
            return b""
        return b"".join(wire.frame(kind, self.key, body) for kind, body in self._taken())

    def _taken(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while self._unsent:
            try:
                (kind, _), body = self._unsent.popitem()
            except KeyError:  # another thread has taken the last one
                break
            found.append((kind, body))
        return found

    @property
    def cancel(self) -> threading.Event:
        """Return the event that a cancel sets; it is created on first use to save time."""
        with _LOCK:
            if self._event is None:
                self._event = threading.Event()
            if self.cancel_requested:
                self._event.set()
            return self._event

    def interrupt(self, reason: str) -> None:
        """End the handler at its next yield or await; the first reason counts."""
        with _LOCK:
            if self.interrupted is None:
                self.interrupted = reason
                if self._interrupt is not None:
                    self._interrupt()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set or remove (None) a function that an interrupt calls, on any thread.

        It is called at once if the job was interrupted before. It must not block.
        """
        with _LOCK:
            self._interrupt = call
            if call is not None and self.interrupted is not None:
                call()

    def status(self, *values: Any, **fields: Any) -> None:
        """Report status (`status_callback`); a dict or a number from 0 to 1 is progress."""
        value: Any = fields or (values[0] if values else None)
        self.report_progress(None if isinstance(value, str) else value)

    def request(self, reason: str) -> None:
        """Ask the handler to end; `cancelled` also sets its event. The first reason counts."""
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
