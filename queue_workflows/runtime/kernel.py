"""Call kernel functions that Python lacks, such as timers that end this process.

On systems other than Linux they do nothing; there a process ends at end of file on its socket.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import sys
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
"""Interval of further firings, since glibc drops a firing if it cannot start a thread."""
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

    A PyDLL keeps the GIL. Otherwise each short call might wait for a handler to give up the GIL. It
    also prevents a fork during the call.
    """
    if sys.platform != "linux":
        return None
    try:
        # Load libc by its name: a preloaded library that fakes the clock would change timers, too.
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


def _created(code: int | None) -> int | None:
    """Return a new timer that is not armed, or None if the kernel cannot make one."""
    libc = _libc()
    if code is None:
        event = _SigEvent(signo=signal.SIGKILL, notify=SIGEV_SIGNAL)
    elif libc is not None and hasattr(libc, "gnu_get_libc_version"):
        leave = ctypes.cast(libc["_exit"], ctypes.c_void_p)
        event = _SigEvent(value=code, notify=SIGEV_THREAD, function=leave.value)
    else:
        return _warn_unavailable("the C library is not glibc")
    timer = ctypes.c_void_p()
    if libc is None or libc.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)):
        return None if code is None else _warn_unavailable(os.strerror(ctypes.get_errno()))
    return timer.value or 0


@functools.cache
def _warn_unavailable(reason: str) -> None:
    _log.warning(
        "no kernel timer here (%s): a handler that keeps the GIL delays the exit after a timeout or"
        " a lost lease; run the worker with --supervise",
        reason,
    )


def prepare() -> None:
    """Load the C library now, so that forked children need not."""
    _libc()


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Let the kernel send this signal when the parent ends; end now if it has ended.

    The kernel sends it when the thread that forked this process ends, which is the only one there.
    """
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class DeathTimer:
    """End this process at a given time by SIGKILL or with `code`, without any Python code.

    The time includes suspend. SIGKILL also ends a stopped process. With `code`, the process exits
    as by `os._exit`, a stopped one once it is continued. A forked child does not inherit the timer.
    If the kernel has no such timer, `set` does nothing; with `code` it logs that once.
    """

    def __init__(self, code: int | None = None) -> None:
        self._code = code
        self._timer: int | None = None

    def set(self, until: float | None) -> None:
        """Set the time (`clock.boot_s`), at once if it has passed; None disarms."""
        if self._timer is None and until is not None:
            self._timer = _created(self._code)
        libc = _libc()
        if self._timer is not None and libc is not None:
            at = 0 if until is None else max(1, int(until * NS_PER_S))
            spec = _TimerSpec(0, RETRY_NS, *divmod(at, NS_PER_S))
            libc.timer_settime(self._timer, TIMER_ABSTIME, spec, None)

    def close(self) -> None:
        """Disarm it and free the timer."""
        libc, timer, self._timer = _libc(), self._timer, None
        if libc is not None and timer is not None:
            libc.timer_delete(timer)


def set_title(text: str) -> None:
    """Overwrite the command line of this process, which `ps` shows, with as much as fits.

    The kernel reads it from the memory of the process. It does nothing on other systems than Linux.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_START : _START + 2])
    except (OSError, ValueError):
        return
    if 0 < start < end:
        # With a zero as the last byte, the kernel does not read on into the environment.
        room = end - start - 1
        shown = text.encode()[:room]
        ctypes.memmove(start, shown + bytes(room + 1 - len(shown)), room + 1)
