"""SIGTERM and SIGINT as a flag that the main thread can wait for."""

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
    inside the handler at the first and second request: they must take no lock. With `ear` (Linux)
    signals are also heard while the main thread is in C code that gives up the GIL: a thread of its
    own waits for them, and a callback may then run twice, as neither waits for the other.
    """

    def __init__(
        self,
        *,
        on_first: Callable[[], object] | None = None,
        on_second: Callable[[], object] | None = None,
        ear: bool = False,
    ) -> None:
        self.requested = Flag()
        self._callbacks = {1: on_first, 2: on_second}
        self._lone = itertools.count(1)
        self._handled = itertools.count(1)
        self._heard = itertools.count(1)
        self._requests: dict[tuple[bool, int], None] = {}
        """Those of signals that the ear hears too, each once, and all others."""
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}
        self._with_ear = ear and sys.platform == "linux"
        self._ear: _Ear | None = None

    @property
    def count(self) -> int:
        """How many requests have come."""
        return len(self._requests)

    def request(self) -> None:
        """Do what a signal does."""
        # A second signal may interrupt this very function: the number is drawn in one step.
        self._act((False, next(self._lone)))

    def _act(self, name: tuple[bool, int]) -> None:
        self._requests[name] = None
        number = [*self._requests].index(name) + 1
        try:
            callback = self._callbacks.get(number)
            if callback is not None:
                callback()
        finally:
            # Last, as it gives up the GIL: who goes on meanwhile finds the callback's work done.
            self.requested.set()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        if self._ear is None or not self._ear.has_heard():
            self.request()
        else:
            self._act((True, next(self._handled)))

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            if self._with_ear:
                self._ear = _Ear(lambda: self._act((True, next(self._heard))))
            for signum in SIGNALS:
                previous = signal.signal(signum, self._handle)
                self._previous[signum] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                signal.signal(*self._previous.popitem())
            ear, self._ear = self._ear, None
            if ear is not None:
                ear.close()


class _Ear:
    """Acts on each SIGTERM and SIGINT of this process while its main thread may be in C code.

    The interpreter's handler in C writes a signal's number to the wakeup descriptor at once; the
    one in Python waits for the main thread, to which all methods belong. A forked child shares the
    descriptor: the kernel says who wrote.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._pid = os.getpid()
        self._mouth, drum = socket.socketpair()
        self._mouth.setblocking(False)
        self._thread = service.Follow("stop-signals", _Drum(drum), lambda _: act())
        self._thread.start()
        self.has_heard()

    def has_heard(self) -> bool:
        """Whether it heard a signal that is handled now; its descriptor is put back if nobody's is.

        Not in a forked child, nor while an event loop of the body has a descriptor of its own.
        """
        if os.getpid() != self._pid:
            return False
        before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        if before not in (self._mouth.fileno(), -1):
            signal.set_wakeup_fd(before)
        return before == self._mouth.fileno()

    def close(self) -> None:
        """Hear no more."""
        before = signal.set_wakeup_fd(-1)
        if before not in (self._mouth.fileno(), -1):
            signal.set_wakeup_fd(before)
        if os.getpid() == self._pid:
            self._thread.stop()
        self._mouth.close()


class _Drum:
    """The signals that were written to the other end by this very process, for one thread."""

    _SENDER = struct.Struct("=iII")
    """`struct ucred`: pid, uid, gid."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def __iter__(self) -> Iterator[int]:
        own = os.getpid()
        with self._end as end:
            while True:
                number, told, _, _ = end.recvmsg(1, socket.CMSG_SPACE(self._SENDER.size))
                if not number:
                    return
                senders = [self._SENDER.unpack(data)[0] for _, _, data in told]
                if number[0] in SIGNALS and senders in ([], [own]):
                    yield number[0]

    def close(self) -> None:
        """End the iteration."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
