"""SIGTERM and SIGINT as a flag that the main thread can wait for."""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
RECHECK_S = 1.0
"""Longest wait in one system call: a signal that comes just before the call does not interrupt it,
and its Python handler runs only when the call is over."""


class Flag:
    """An event that a signal handler may set: it is a pipe, not a lock.

    `threading.Event.set()` in a handler deadlocks when the interrupted code is in `wait()`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._set = False
        weakref.finalize(self, _close, self._reader, self._writer)

    def fileno(self) -> int:
        """A descriptor that is readable once the flag is set; nobody may read from it."""
        return self._reader

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set it for good and wake every waiter."""
        if not self._set:
            self._set = True
            os.write(self._writer, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is set, after waiting for that at most `timeout_s` (None: for ever)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not self._set:
            left_s = RECHECK_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                break
            poll.poll(min(left_s, RECHECK_S) * 1000)
        return self._set


class StopRequest:
    """Turns SIGTERM and SIGINT into `requested` while the `with` block runs.

    Outside the main thread no handler is installed, and only `request()` sets it. The callbacks run
    inside the handler, once each, at the first and second request: they must take no lock.
    """

    def __init__(
        self,
        *,
        on_first: Callable[[], object] | None = None,
        on_second: Callable[[], object] | None = None,
    ) -> None:
        self.requested = Flag()
        self._callbacks = {1: on_first, 2: on_second}
        self._numbers = itertools.count(1)
        self._requests: list[None] = []
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}

    @property
    def count(self) -> int:
        """How many requests have come."""
        return len(self._requests)

    def request(self) -> None:
        """Do what a signal does."""
        # A second signal may interrupt this very function: the number is drawn in one step.
        number = next(self._numbers)
        self._requests.append(None)
        self.requested.set()
        callback = self._callbacks.get(number)
        if callback is not None:
            callback()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        self.request()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                previous = signal.signal(signum, self._handle)
                self._previous[signum] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                signal.signal(*self._previous.popitem())


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
