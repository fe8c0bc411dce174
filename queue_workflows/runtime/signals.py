"""Turn SIGTERM and SIGINT into a flag that the main thread can wait for."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
RECHECK_S = 1.0
"""Longest wait in one system call, in seconds.

A signal just before the call does not interrupt it, and its Python handler runs only after the
call.
"""


class Flag:
    """An event that a signal handler may set, since it uses a pipe instead of a lock.

    `threading.Event.set()` in a handler deadlocks if the interrupted code is in `wait()`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._set = False
        weakref.finalize(self, _close, self._reader, self._writer)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the flag is set; callers must not read it."""
        return self._reader

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set the flag for good and wake every waiter."""
        if not self._set:
            self._set = True
            os.write(self._writer, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the flag, at most `timeout_s` (None for no limit); return whether it is set."""
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
    """Turn SIGTERM and SIGINT into `requested` while the `with` block runs.

    Outside the main thread no handler is installed, and only `request()` sets it. The callbacks run
    inside the handler at the first and second request, so they must take no lock.
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
        self._seen: list[int] = []
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}

    @property
    def count(self) -> int:
        """Return the number of requests so far."""
        return len(self._seen)

    def request(self) -> None:
        """Request a stop, as a signal does."""
        # A second signal may interrupt this function, so the number is taken in one step.
        number = next(self._numbers)
        self._seen.append(number)
        try:
            callback = self._callbacks.get(number)
            if callback is not None:
                callback()
        finally:
            # Set last, since it releases the GIL, and a waiter expects the callback to have run.
            self.requested.set()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        self.request()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                previous = signal.signal(signum, self._handle)
                self._previous[signum] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


class Wakeups:
    """Let a thread receive SIGTERM and SIGINT although the main thread is in C code (Linux).

    The interpreter's C handler writes a signal's number to the wakeup descriptor at once. A forked
    child shares the descriptor, so the kernel's sender pid identifies the writer. The main thread
    enters the block.
    """

    _SENDER = struct.Struct("=iII")
    """`struct ucred`: pid, uid, gid."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._receiving_end, self._wakeup_end = socket.socketpair()
        for each in (self._receiving_end, self._wakeup_end):
            each.setblocking(False)
        self._receiving_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._count = 0

    def fileno(self) -> int:
        """Return a descriptor that is readable once `received` may return a higher number."""
        return self._receiving_end.fileno()

    def received(self) -> int:
        """Return how many signals this process itself has received so far."""
        with contextlib.suppress(BlockingIOError):
            space = socket.CMSG_SPACE(self._SENDER.size)
            numbers, ancillary, _, _ = self._receiving_end.recvmsg(4096, space)
            senders = [self._SENDER.unpack(data)[0] for _, _, data in ancillary]
            if senders in ([], [self._pid]):
                self._count += sum(each in SIGNALS for each in numbers)
        return self._count

    def take(self) -> None:
        """Take the wakeup descriptor back from a handler's ended event loop, unless it is in use.

        Only the main thread may call it.
        """
        own = self._wakeup_end.fileno()
        before = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        if before not in (-1, own):
            signal.set_wakeup_fd(before)

    def __enter__(self) -> Wakeups:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._wakeup_end.fileno()):
            signal.set_wakeup_fd(before)
        for each in (self._receiving_end, self._wakeup_end):
            each.close()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
