"""Pass requests to end to a running handler, and turn its reports of progress into JSON text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.dag import payload

PROGRESS_LIMIT: Final = 8000
"""Characters of a progress report; a longer one counts as a beat only."""
_LOCK = threading.Lock()
"""Held for a moment by any job: one lock for each would cost more than short jobs take."""


class Interruptible:
    """The part of a `control.Control` that is the same in a worker and in an executor."""

    def __init__(self) -> None:
        self._event: threading.Event | None = None
        self._cancelled = False
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the handler is to end at its next yield or await; None: it may continue."""

    @property
    def cancel(self) -> threading.Event:
        """Return the event that is set on cancel; created on first use, as short jobs need none."""
        with _LOCK:
            if self._event is None:
                self._event = threading.Event()
            if self._cancelled:
                self._event.set()
            return self._event

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job was cancelled."""
        return self._cancelled

    def set_cancelled(self) -> None:
        """Set the handler's cancel event, and interrupt it."""
        with _LOCK:
            self._cancelled = True
            if self._event is not None:
                self._event.set()
        self.interrupt("cancelled")

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
        """Report status (`status_callback`): a number 0 to 1 or a dict is progress, else a beat."""
        value: Any = fields or (values[0] if values else None)
        self.report_progress(None if isinstance(value, str) else value)

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        raise NotImplementedError


def progress_text(value: Any) -> str | None:
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
