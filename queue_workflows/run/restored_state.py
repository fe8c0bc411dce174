"""Make an executor after a job what it was before its first one.

Modules that a job has imported stay, and what they hold: caches, connections, threads, logging and
warning filters. What else the standard library can change about a process is put back.
"""

from __future__ import annotations

import asyncio.events
import decimal
import gc
import importlib
import locale
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from queue_workflows.run import wire

_log = logging.getLogger(__name__)
_LIMITS: Final = tuple(
    getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE",
                 "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK")
    if hasattr(resource, name)
)  # fmt: skip
_SIGNALS: Final = sorted(
    int(each)
    for each in signal.valid_signals()
    if each < getattr(signal, "SIGRTMIN", 32) and each not in (signal.SIGKILL, signal.SIGSTOP)
)
_SIGNAL_MODULE: Final[Any] = importlib.import_module("_signal")
_getsignal: Final[Callable[[int], Any]] = _SIGNAL_MODULE.getsignal
"""The function behind `signal.getsignal`, which makes an enum member of each number."""
_getitimer: Final[Callable[[int], tuple[float, float]]] = _SIGNAL_MODULE.getitimer
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_STOPPED: Final = [(0.0, 0.0)] * len(_TIMERS)
_EVENTS: Final[Any] = asyncio.events


class RestoredState:
    """Standard streams, folder, umask, limits, signals, timers, environment and import path.

    Also the locale, priority, CPUs, garbage collection, recursion limit, the default time limit of
    sockets, the event loop of the thread, and hooks for traces and errors.
    """

    def __init__(self, other_output: Sequence[int] = ()) -> None:
        """`other_output`: what stdout and stderr are for jobs with even keys."""
        self._streams = sys.stdin, sys.stdout, sys.stderr
        own = [wire.high(os.dup(number)) for number in range(3)]
        self._files = [[own[0], *(map(wire.high, other_output))] if other_output else own, own]
        """Descriptors of the same files as 0, 1 and 2, for jobs with even and with odd keys."""
        self._odd = 1
        self._folder = wire.high(os.open(".", getattr(os, "O_PATH", os.O_RDONLY)))
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._limits = [*map(resource.getrlimit, _LIMITS)]
        self._handlers = [*map(_getsignal, _SIGNALS)]
        self._environ: Any = os.environ
        self._variables: dict[Any, Any] = dict(self._environ._data)
        self._path = [*sys.path]
        self._locale = locale.setlocale(locale.LC_ALL)
        self._process = _process()
        self._event_loop = _event_loop()
        self._decimals = decimal.getcontext().copy()
        self._hooks = _hooks()

    def print_for(self, key: int) -> None:
        """Let stdout and stderr be those of a job with this key."""
        if self._odd != key & 1:
            self._restore_files(key)

    def _restore_files(self, key: int) -> None:
        self._odd = key & 1
        for number, fd in enumerate(self._files[self._odd]):
            os.dup2(fd, number)

    def restore(self, next_key: int = 1) -> str:
        """Undo what a job has left; return what cannot be undone, or an empty text.

        Its stdout and stderr become those of the next job.

        The signals that have handlers are blocked meanwhile: an alarm that the job left behind may
        come at any moment.
        """
        try:
            self._restore(next_key)
        except Exception as error:  # noqa: BLE001  what a job has left may be anything
            _log.warning("this executor ends, as its job has left a state behind: %s", error)
            return str(error) or type(error).__name__
        return ""

    def _restore(self, next_key: int) -> None:
        for stream in self._streams:
            if stream is not None and stream.closed:
                raise ValueError("it has closed stdin, stdout or stderr")
        sys.stdin, sys.stdout, sys.stderr = self._streams
        self._restore_files(next_key)
        os.fchdir(self._folder)
        os.umask(self._umask)
        self._restore_kernel()
        self._restore_python()

    def _restore_kernel(self) -> None:
        if [*map(resource.getrlimit, _LIMITS)] != self._limits:
            for limit, was in zip(_LIMITS, self._limits, strict=True):
                resource.setrlimit(limit, was)
        if [*map(_getitimer, _TIMERS)] != _STOPPED:
            for timer in _TIMERS:
                signal.setitimer(timer, 0.0)
        if [*map(_getsignal, _SIGNALS)] != self._handlers:
            for signum, handler in zip(_SIGNALS, self._handlers, strict=True):
                if handler is not None and _getsignal(signum) is not handler:
                    signal.signal(signum, signal.SIG_IGN)  # drops one that is pending
                    signal.signal(signum, handler)
        signal.set_wakeup_fd(-1)
        if _process() != self._process:
            self._restore_process()

    def _restore_python(self) -> None:
        os.environ = self._environ  # noqa: B003  the object that it was
        if self._environ._data != self._variables:
            self._restore_environment()
        if sys.path != self._path:
            sys.path[:] = self._path
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        # Copies of a context share the object, which jobs change.
        decimal.setcontext(self._decimals.copy())
        if _event_loop() != self._event_loop:
            self._restore_event_loop()
        if _hooks() != self._hooks:
            trace, profile, sys.excepthook, sys.unraisablehook, threading.excepthook = self._hooks
            sys.settrace(trace)
            sys.setprofile(profile)

    def _restore_environment(self) -> None:
        for name in self._environ._data.keys() - self._variables.keys():
            del self._environ[self._environ.decodekey(name)]
        for name, value in self._variables.items():
            if self._environ._data.get(name) != value:
                self._environ[self._environ.decodekey(name)] = self._environ.decodevalue(value)
        time.tzset()  # TZ may be one of them

    def _restore_process(self) -> None:
        was = self._process
        if (os.geteuid(), os.getegid()) != (was.uid, was.gid):
            raise ValueError("it runs as another user or group")
        os.setpriority(os.PRIO_PROCESS, 0, was.priority)
        if was.cpus is not None:
            os.sched_setaffinity(0, was.cpus)
        (gc.enable if was.collects else gc.disable)()
        sys.setrecursionlimit(was.recursion)
        socket.setdefaulttimeout(was.timeout)

    def _restore_event_loop(self) -> None:
        policy, loop, was_set = self._event_loop
        _EVENTS._event_loop_policy = policy
        if (local := getattr(policy, "_local", None)) is not None:
            local._loop, local._set_called = loop, was_set


class _Process(NamedTuple):
    """What is read of a process at once."""

    uid: int
    gid: int
    priority: int
    cpus: set[int] | None
    collects: bool
    recursion: int
    timeout: float | None


def _process() -> _Process:
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return _Process(
        os.geteuid(),
        os.getegid(),
        os.getpriority(os.PRIO_PROCESS, 0),
        affinity and affinity(0),
        gc.isenabled(),
        sys.getrecursionlimit(),
        socket.getdefaulttimeout(),
    )


def _hooks() -> tuple[Any, ...]:
    raised = sys.excepthook, sys.unraisablehook, threading.excepthook
    return sys.gettrace(), sys.getprofile(), *raised


def _event_loop() -> tuple[Any, Any, bool]:
    """Return asyncio's policy, the event loop that it has for this thread, and whether it was set.

    To ask asyncio itself for the loop would make one.
    """
    policy = getattr(_EVENTS, "_event_loop_policy", None)
    local = getattr(policy, "_local", None)
    return policy, getattr(local, "_loop", None), getattr(local, "_set_called", False)
