"""Call the app's failure hooks on a thread of their own, so that one that hangs stops nothing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from queue_workflows.runtime import service
from queue_workflows.types import FailureHook, JsonDict

STEP_S = 0.1
"""Seconds between two checks whether the caller has to stop."""
JOIN_S = 0.2
_log = logging.getLogger(__name__)


class _Call(NamedTuple):
    alert: JsonDict
    text: str
    returned: threading.Event


class HookThread:
    """A thread that calls the hooks of one alert after the other, as `hooks_of` returns them."""

    def __init__(self, hooks_of: Callable[[JsonDict], list[FailureHook]]) -> None:
        self._hooks_of = hooks_of
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._last: threading.Event | None = None
        self._pool = service.Pool("failure hook", 1, lambda _: self._run())
        """Started by the first call."""

    def stop(self) -> None:
        """Let the thread end after the present call, and do not wait for a hook that hangs."""
        self._calls.put(None)
        self._pool.stop(JOIN_S)

    def is_free(self) -> bool:
        """Return whether the last call has returned."""
        return self._last is None or self._last.is_set()

    def call(
        self, alert: JsonDict, *, timeout_s: float, ends_early: Callable[[], bool]
    ) -> str | None:
        """Call the hooks; return what went wrong, or None. An error of a hook is only logged.

        After `timeout_s`, or when `ends_early()` is true, it goes on without the hooks' return.
        """
        call = _Call(alert, alert["text"], threading.Event())
        if self._last is None:
            self._pool.start()
        self._last = call.returned
        self._calls.put(call)
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if call.returned.wait(min(STEP_S, left_s)):
                return None
            if ends_early():
                return "the hook has not returned, and this process stops"
        return f"the hook has not returned within {timeout_s:g} s; until it does, it is not called"

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                for hook in self._hooks_of(call.alert):
                    # A copy: the others, and the command, get the alert whatever a hook does to it.
                    _called(hook, dict(call.alert), call.text)
            finally:
                call.returned.set()


def _called(hook: FailureHook, alert: JsonDict, text: str) -> None:
    try:
        returned: object = hook(alert)
        if hasattr(returned, "__await__"):
            getattr(returned, "close", lambda: None)()
            _log.error("the failure hook is async, and nothing awaits it: use a function")
    except BaseException as error:  # noqa: BLE001  boundary around app code: it may exit
        _log.error("the failure hook raised %s for: %s", type(error).__name__, text, exc_info=error)
