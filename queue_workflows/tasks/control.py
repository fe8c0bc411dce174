"""What a task's body says to its worker while it runs, and hears from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

_log = logging.getLogger(__name__)
LAST_YIELDS = 100
"""How often a body may yield after a signal that it yielded; then it is closed, which raises."""


class Control(Protocol):
    """The worker's side of one body; `worker.current.Work` is one. Any thread may ask."""

    def said(self, value: Any) -> None:
        """A sign of life, and progress if the value is 0 to 1, a text or a dict."""
        ...

    @property
    def interrupted(self) -> str | None:
        """Why the body is to end (`cancelled`, `shutdown`); None: it goes on."""
        ...

    @property
    def cancel_requested(self) -> bool:
        """Whether the job was cancelled."""
        ...

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Call this once the body is to end, at once if it is already; None: no longer."""
        ...


class Alone:
    """Nobody listens, and nobody interrupts: a body that runs outside of a worker."""

    interrupted: str | None = None
    cancel_requested = False

    def said(self, value: Any) -> None:
        """Dropped."""

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Never."""


class Interrupted(Exception):
    """A body was told to end, and has ended; raised behind it, never into it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def not_clean(error: BaseException) -> None:
    """A body that was told to end raised something else: that is said, and nothing more."""
    _log.warning("a task that was told to end raised %s", type(error).__name__, exc_info=error)
