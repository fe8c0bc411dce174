"""An exit by a kernel timer: it runs no Python code, so that no body can hold it up."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref

CLOCK_BOOTTIME = 7
"""linux/time.h; `time.CLOCK_BOOTTIME` exists on Linux only."""
SIGEV_THREAD = 2
"""glibc's bits/sigevent.h."""
RETRY_NS = 100_000_000
"""It fires again until the process is gone: glibc drops a firing for which it gets no thread."""
NS_PER_S = 1_000_000_000

logger = logging.getLogger(__name__)


class _SigEvent(ctypes.Structure):
    """glibc's `struct sigevent`; it has 64 bytes, this one at least as many.

    `value` is its union of an int and a pointer, here as wide as the pointer: so the code is in the
    low half of the argument register, where `_exit(int)` reads, on machines of either byte order.
    """

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 48),
    )


_TimerSpec = ctypes.c_long * 4
"""`struct itimerspec`: seconds and nanoseconds of the interval, then of the first firing."""


class _Process:
    """What a forked child must not share with its parent: the lock; and whose the timers are."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collection inside it may close another fuse


_process = _Process()
_said = False


def _start_anew_in_child() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_start_anew_in_child)


class KillTimer:
    """Leaves this process with `code` when its time has come, as `os._exit` would.

    The time counts suspend; a stopped process exits when it is continued. A firing under way when
    `disarm` comes still exits. Any thread may call, a signal handler must not. A forked child has
    no timer until it arms the fuse itself. One that is garbage collected is closed. Where it is not
    `available` no method does anything.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        self._closed = False
        self._made_in: _Process | None = None
        self._timer: int | None = None
        self._at_collection: weakref.finalize[..., KillTimer] | None = None
        self._spec = _TimerSpec(0, RETRY_NS, 0, 0)

    @property
    def available(self) -> bool:
        """Whether it has a timer; False once closed, and without glibc or when no timer is left."""
        with _process.lock:
            return self._ready() is not None

    def arm(self, seconds: float) -> None:
        """Exit that many seconds from now, not when it was armed for before; at once if <= 0."""
        nanoseconds = max(1, int(seconds * NS_PER_S))
        with _process.lock:
            timer = self._ready()
            if timer is not None:
                self._set(timer, nanoseconds)

    def disarm(self) -> None:
        """Exit no more; nothing if it is not armed."""
        with _process.lock:
            if self._timer is not None and self._made_in is _process:
                self._set(self._timer, 0)

    def close(self) -> None:
        """Disarm it for good and give its timer back."""
        with _process.lock:
            self._closed = True
            timer, self._timer = self._timer, None
            if timer is not None and self._made_in is not None:
                _delete(timer, self._made_in)
            if self._at_collection is not None:
                self._at_collection.detach()

    def _ready(self) -> int | None:
        """The timer, made at the first use in this process; None when closed or not available."""
        if self._made_in is not _process:
            self._made_in, self._timer = _process, None
        if self._timer is None and not self._closed:
            self._timer = _create(self.code)
            if self._timer is not None:
                self._at_collection = weakref.finalize(self, _delete, self._timer, _process)
                self._at_collection.atexit = False  # armed, it bounds the interpreter's exit too
        return self._timer

    def _set(self, timer: int, nanoseconds: int) -> None:
        self._spec[2], self._spec[3] = divmod(nanoseconds, NS_PER_S)
        libc = _libc()
        if libc is not None and libc.timer_settime(timer, 0, self._spec, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot set the timer of exit {self.code}: {os.strerror(error)}")


@functools.cache
def _libc() -> ctypes.PyDLL | None:
    """glibc, or None.

    A PyDLL keeps the GIL: to give it up and ask for it again, a call that takes a microsecond would
    wait for a body that keeps it; and no fork can come while one is under way.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    if not hasattr(libc, "timer_create"):  # before glibc 2.34
        libc = ctypes.PyDLL("librt.so.1", use_errno=True)
    handle, spec = ctypes.c_void_p, ctypes.POINTER(ctypes.c_long)
    libc.timer_create.argtypes = [ctypes.c_int, ctypes.POINTER(_SigEvent), ctypes.POINTER(handle)]
    libc.timer_settime.argtypes = [handle, ctypes.c_int, spec, handle]
    libc.timer_delete.argtypes = [handle]
    return libc


def _create(code: int) -> int | None:
    """A timer that is not armed; None where there can be none, which is said once."""
    libc = _libc()
    if libc is None:
        return _say_unavailable("the C library is not glibc")
    leave = ctypes.cast(libc["_exit"], ctypes.c_void_p)
    event = _SigEvent(value=code, notify=SIGEV_THREAD, function=leave.value)
    timer = ctypes.c_void_p()
    if libc.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)) != 0:
        return _say_unavailable(os.strerror(ctypes.get_errno()))
    return timer.value


def _say_unavailable(reason: str) -> None:
    global _said
    if not _said:
        _said = True
        logger.warning(
            "no exit by kernel timer here (%s): a body that keeps the GIL delays the exit from a"
            " time-out or a lost lease; run the worker with --supervise",
            reason,
        )


def _delete(timer: int, made_in: _Process) -> None:
    """Give a timer back; a child's kernel may have given the number of its parent's to its own."""
    libc = _libc()
    if libc is not None and made_in is _process:
        libc.timer_delete(timer)
