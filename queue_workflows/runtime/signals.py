"""Turn SIGTERM and SIGINT into a flag that the main thread can wait for."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

from queue_workflows.runtime import service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
RECHECK_S = 1.0
"""Longest wait in one system call, in seconds.

A signal just before the call does not interrupt it, and its Python handler runs only after the
call.
"""


class Flag:
    """An event that a signal handler may set: it is a pipe, not a lock.

    `threading.Event.set()` in a handler deadlocks if the interrupted code is in `wait()`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._set = False
        weakref.finalize(self, _close, self._reader, self._writer)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the flag is set; nobody may read from it."""
        return self._reader

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set the flag for good and wake every waiter."""
        if not self._set:
            self._set = True
            os.write(self._writer, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` (without end if None) for the flag; return whether it is set."""
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
    inside the handler at the first and second request, so they must take no lock. With
    `signal_thread` (Linux) a thread also receives signals while the main thread is in C code that
    releases the GIL. Then a callback may run twice, since the two do not wait for each other.
    """

    def __init__(
        self,
        *,
        on_first: Callable[[], object] | None = None,
        on_second: Callable[[], object] | None = None,
        signal_thread: bool = False,
    ) -> None:
        self.requested = Flag()
        self._callbacks = {1: on_first, 2: on_second}
        self._requested = itertools.count(1)
        self._handled = itertools.count(1)
        self._received = itertools.count(1)
        self._requests: dict[tuple[bool, int], None] = {}
        """Requests by signals that the extra thread sees too, each once, and all others."""
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}
        self._use_thread = signal_thread and sys.platform == "linux"
        self._signal_thread: _SignalThread | None = None

    @property
    def count(self) -> int:
        """Return the number of requests so far."""
        return len(self._requests)

    def request(self) -> None:
        """Act as a signal does."""
        # A second signal may interrupt this very function: the number is drawn in one step.
        self._act((False, next(self._requested)))

    def _act(self, name: tuple[bool, int]) -> None:
        self._requests[name] = None
        number = [*self._requests].index(name) + 1
        try:
            callback = self._callbacks.get(number)
            if callback is not None:
                callback()
        finally:
            # Last, since it releases the GIL: a waiter then finds the callback's work done.
            self.requested.set()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        if self._signal_thread is None or not self._signal_thread.has_received():
            self.request()
        else:
            self._act((True, next(self._handled)))

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            if self._use_thread:
                self._signal_thread = _SignalThread(lambda: self._act((True, next(self._received))))
            for signum in SIGNALS:
                previous = signal.signal(signum, self._handle)
                self._previous[signum] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                signal.signal(*self._previous.popitem())
            signal_thread, self._signal_thread = self._signal_thread, None
            if signal_thread is not None:
                signal_thread.stop()


class _SignalThread:
    """Act on SIGTERM and SIGINT of this process while its main thread may be in C code.

    The interpreter's C handler writes a signal's number to the wakeup descriptor at once. The
    Python handler waits for the main thread, which alone may call these methods. A forked child
    shares the descriptor, so the kernel's sender pid identifies the writer.
    """

    _SENDER = struct.Struct("=iII")
    """`struct ucred`: pid, uid, gid."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._pid = os.getpid()
        self._wakeup_end, self._receiving_end = socket.socketpair()
        self._wakeup_end.setblocking(False)
        self._receiving_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._thread = service.Follow("stop-signals", self, lambda _: act())
        self._thread.start()
        self.has_received()

    def has_received(self) -> bool:
        """Return whether it saw a signal that is handled now.

        Restore its descriptor if there is none. Not in a forked child, nor while a handler's event
        loop has a wakeup descriptor of its own.
        """
        if os.getpid() != self._pid:
            return False
        before = signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        if before not in (self._wakeup_end.fileno(), -1):
            signal.set_wakeup_fd(before)
        return before == self._wakeup_end.fileno()

    def stop(self) -> None:
        """Stop receiving signals."""
        before = signal.set_wakeup_fd(-1)
        if before not in (self._wakeup_end.fileno(), -1):
            signal.set_wakeup_fd(before)
        if os.getpid() == self._pid:
            self._thread.stop()
        self._wakeup_end.close()

    def __iter__(self) -> Iterator[int]:
        """Yield the signals that this very process got, on the thread that follows them."""
        with self._receiving_end as end:
            while True:
                number, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(self._SENDER.size))
                if not number:
                    return
                senders = [self._SENDER.unpack(data)[0] for _, _, data in ancillary]
                if number[0] in SIGNALS and senders in ([], [self._pid]):
                    yield number[0]

    def close(self) -> None:
        """End the iteration."""
        with contextlib.suppress(OSError):
            self._receiving_end.shutdown(socket.SHUT_RDWR)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
