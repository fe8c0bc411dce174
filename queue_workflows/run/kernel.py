"""Do what Python has no call for: die with the parent, a timer that kills, and a title for `ps`.

Elsewhere than on Linux this does nothing; there the end of file on its socket ends a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
CLOCK_BOOTTIME: Final = 7
SIGEV_SIGNAL: Final = 0
TIMER_ABSTIME: Final = 1
NS_PER_S: Final = 1_000_000_000
_START: Final = 45
"""Index of the address of the command line in `/proc/self/stat`, after the name of the process."""
_TimerSpec = ctypes.c_long * 4
"""`struct itimerspec`: seconds and nanoseconds of the interval, then of the first firing."""


class _SigEvent(ctypes.Structure):
    """`struct sigevent`, which has 64 bytes; this one has at least as many."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 64),
    )


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        # By its name: a preloaded library that fakes the wall clock changes absolute timers, too.
        return ctypes.CDLL("libc.so.6", use_errno=True)
    except OSError:
        return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _librt() -> ctypes.CDLL | None:
    """Return the library that has the timers: the C library, since glibc 2.34."""
    libc = _libc()
    return libc if libc is None or hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")


def prepare() -> None:
    """Load the C library now, so that forked children need not."""
    _librt()


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; end now if it has ended.

    More precisely when the parent's thread that forked it ends, which is its only one.
    """
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class DeathTimer:
    """Kill this process by SIGKILL at a given time: no code of it runs, and a stopped one dies too.

    A forked child does not inherit it. Where the kernel has no such timer, `set` does nothing.
    """

    def __init__(self) -> None:
        self._libc = _librt()
        self._timer = ctypes.c_void_p()
        event = _SigEvent(signo=signal.SIGKILL, notify=SIGEV_SIGNAL)
        if self._libc is not None and self._libc.timer_create(
            CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            self._libc = None

    def set(self, until: float | None) -> None:
        """Set the time (`clock.boot_s`), at once if it has passed; None disarms."""
        if self._libc is None:
            return
        at = 0 if until is None else max(1, int(until * NS_PER_S))
        spec = _TimerSpec(0, 0, *divmod(at, NS_PER_S))
        self._libc.timer_settime(self._timer, TIMER_ABSTIME, spec, None)


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
