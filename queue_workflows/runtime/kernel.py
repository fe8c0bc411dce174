"""Ask the kernel for what Python has no call for, such as timers that end this process.

Elsewhere than on Linux this does nothing; there the end of file on its socket ends a process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
PR_SET_PDEATHSIG: Final = 1
CLOCK_BOOTTIME: Final = 7
"""From linux/time.h; `time.CLOCK_BOOTTIME` exists on Linux only."""
SIGEV_SIGNAL: Final = 0
SIGEV_THREAD: Final = 2
"""From glibc's bits/sigevent.h."""
TIMER_ABSTIME: Final = 1
RETRY_NS: Final = 100_000_000
"""Fire again until the process has ended: glibc drops a firing if it gets no thread."""
NS_PER_S: Final = 1_000_000_000
_START: Final = 45
"""Index of the address of the command line in `/proc/self/stat`, after the name of the process."""
_TimerSpec = ctypes.c_long * 4
"""`struct itimerspec`: seconds and nanoseconds of the interval, then of the first firing."""


class _SigEvent(ctypes.Structure):
    """`struct sigevent` of glibc; it has 64 bytes, this one at least as many.

    `value` is its union of an int and a pointer, here as wide as the pointer. So the exit code is
    in the low half of the argument register, where `_exit(int)` reads it, for either byte order.
    """

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 48),
    )


@functools.cache
def _libc() -> ctypes.PyDLL | None:
    """Return the C library, or None elsewhere than on Linux.

    A PyDLL keeps the GIL. Otherwise a call of a microsecond would wait for a handler that keeps the
    GIL. It also prevents a fork during the call.
    """
    if sys.platform != "linux":
        return None
    try:
        # By its name: a preloaded library that fakes the wall clock changes absolute timers, too.
        libc = ctypes.PyDLL("libc.so.6", use_errno=True)
    except OSError:
        libc = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):  # before glibc 2.34
        libc = ctypes.PyDLL("librt.so.1", use_errno=True)
    handle, spec = ctypes.c_void_p, ctypes.POINTER(ctypes.c_long)
    libc.timer_create.argtypes = [ctypes.c_int, ctypes.POINTER(_SigEvent), ctypes.POINTER(handle)]
    libc.timer_settime.argtypes = [handle, ctypes.c_int, spec, handle]
    libc.timer_delete.argtypes = [handle]
    return libc


def _created(libc: ctypes.PyDLL, event: _SigEvent) -> int | None:
    """Return a new timer that is not armed, or None; then the error is in `ctypes.get_errno`."""
    timer = ctypes.c_void_p()
    refused = libc.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer))
    return None if refused else timer.value or 0


def prepare() -> None:
    """Load the C library now, so that forked children need not."""
    _libc()


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Let the kernel send this signal when the parent ends; end now if it has ended.

    More precisely when the parent's thread that forked it ends, which is its only one.
    """
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class DeathTimer:
    """Kill this process by SIGKILL at a given time: no code of it runs, and a stopped one dies too.

    A forked child does not inherit it. Where the kernel has no such timer, `set` does nothing.
    """

    def __init__(self) -> None:
        event = _SigEvent(signo=signal.SIGKILL, notify=SIGEV_SIGNAL)
        self._libc = _libc()
        self._timer = None if self._libc is None else _created(self._libc, event)

    def set(self, until: float | None) -> None:
        """Set the time (`clock.boot_s`), at once if it has passed; None disarms."""
        if self._libc is not None and self._timer is not None:
            at = 0 if until is None else max(1, int(until * NS_PER_S))
            spec = _TimerSpec(0, 0, *divmod(at, NS_PER_S))
            self._libc.timer_settime(self._timer, TIMER_ABSTIME, spec, None)


class _Process:
    """State that a forked child must not share with its parent: the lock and the owner pid."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # garbage collection inside it may close another timer


_process = _Process()
_warned = False


def _reset_in_child() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_reset_in_child)


class KillTimer:
    """Exit this process with `code` at a given time, as `os._exit` would, without any Python code.

    The time includes suspend. A stopped process exits when it is continued. A timer that fires
    during `disarm` still exits. Any thread may call, a signal handler must not. A forked child has
    no timer until it arms one itself. Garbage collection closes it. If it is not `available`, its
    methods do nothing.
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
        """Return whether there is a timer; False once closed, and without glibc or free timers."""
        with _process.lock:
            return self._ready() is not None

    def arm(self, seconds: float) -> None:
        """Exit after that many seconds, at once if <= 0; replaces an earlier time."""
        nanoseconds = max(1, int(seconds * NS_PER_S))
        with _process.lock:
            timer = self._ready()
            if timer is not None:
                self._set(timer, nanoseconds)

    def disarm(self) -> None:
        """Cancel the exit; do nothing if it is not armed."""
        with _process.lock:
            if self._timer is not None and self._made_in is _process:
                self._set(self._timer, 0)

    def close(self) -> None:
        """Disarm it for good and free the timer."""
        with _process.lock:
            self._closed = True
            timer, self._timer = self._timer, None
            if timer is not None and self._made_in is not None:
                _delete(timer, self._made_in)
            if self._at_collection is not None:
                self._at_collection.detach()

    def _ready(self) -> int | None:
        """Return the timer, created on first use in this process; None if closed or unavailable."""
        if self._made_in is not _process:
            self._made_in, self._timer = _process, None
        if self._timer is None and not self._closed:
            self._timer = _exiting(self.code)
            if self._timer is not None:
                self._at_collection = weakref.finalize(self, _delete, self._timer, _process)
                self._at_collection.atexit = (
                    False  # an armed timer also limits the interpreter's exit
                )
        return self._timer

    def _set(self, timer: int, nanoseconds: int) -> None:
        self._spec[2], self._spec[3] = divmod(nanoseconds, NS_PER_S)
        libc = _libc()
        if libc is not None and libc.timer_settime(timer, 0, self._spec, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot set the timer of exit {self.code}: {os.strerror(error)}")


def _exiting(code: int) -> int | None:
    """Return a new timer that exits; None if there can be none, which is logged once."""
    libc = _libc()
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        return _warn_unavailable("the C library is not glibc")
    leave = ctypes.cast(libc["_exit"], ctypes.c_void_p)
    timer = _created(libc, _SigEvent(value=code, notify=SIGEV_THREAD, function=leave.value))
    return _warn_unavailable(os.strerror(ctypes.get_errno())) if timer is None else timer


def _warn_unavailable(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "no kernel timer here (%s): a handler that keeps the GIL delays the exit after a"
            " timeout or a lost lease; run the worker with --supervise",
            reason,
        )


def _delete(timer: int, made_in: _Process) -> None:
    """Free a timer, unless it is the parent's: a child may have a timer of the same number."""
    libc = _libc()
    if libc is not None and made_in is _process:
        libc.timer_delete(timer)


def set_title(text: str) -> None:
    """Overwrite the command line of this process, which `ps` shows, with as much as fits.

    The kernel reads it from the memory of the process. Does nothing elsewhere than on Linux.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_START : _START + 2])
    except (OSError, ValueError):
        return
    if 0 < start < end:
        # A zero as the last byte keeps the kernel from reading on into the environment.
        room = end - start - 1
        shown = text.encode()[:room]
        ctypes.memmove(start, shown + bytes(room + 1 - len(shown)), room + 1)
