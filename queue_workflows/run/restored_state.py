"""Restore the state of an executor's process after each job.

Modules that a job has imported stay, with their caches, connections, threads, logging and warning
filters. All other process state that the standard library can change is restored.
"""

from __future__ import annotations

import asyncio.events
import contextlib
import decimal
import fcntl
import functools
import gc
import locale
import logging
import os
import resource
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from queue_workflows.run import wire

_log = logging.getLogger(__name__)
_LIMITS: Final = ("AS", "CPU", "CORE", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
_SIGNALS: Final = [each for each in wire.CATCHABLE if each < getattr(signal, "SIGRTMIN", 32)]
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_EVENTS: Final[Any] = asyncio.events
_EMPTY: Final = bytes(4)
"""The answer of FIONREAD for an empty pipe."""
_State: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"


def _state(read: Callable[..., Any], write: Callable[..., object], *of: Any) -> _State:
    return functools.partial(read, *of), functools.partial(write, *of)


def _states() -> Iterator[_State]:
    """Yield pairs of functions that read and restore a part of the state."""
    for name in _LIMITS:
        if (limit := getattr(resource, f"RLIMIT_{name}", None)) is not None:
            yield _state(resource.getrlimit, resource.setrlimit, limit)
    for timer in _TIMERS:
        yield _state(wire.signals.getitimer, _stop_timer, timer)
    for signum in _SIGNALS:
        yield _state(wire.signals.getsignal, _set_handler, signum)
    yield os.geteuid, _refuse_user
    yield os.getegid, _refuse_user
    yield _state(os.getpriority, os.setpriority, os.PRIO_PROCESS, 0)
    if hasattr(os, "sched_getaffinity"):
        yield _state(os.sched_getaffinity, os.sched_setaffinity, 0)
    yield _state(locale.setlocale, locale.setlocale, locale.LC_ALL)
    yield gc.isenabled, lambda was: gc.enable() if was else gc.disable()
    yield gc.get_threshold, lambda was: gc.set_threshold(*was)
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield sys.getswitchinterval, sys.setswitchinterval
    if hasattr(sys, "get_int_max_str_digits"):  # since Python 3.10.7
        yield sys.get_int_max_str_digits, sys.set_int_max_str_digits
    yield threading.stack_size, threading.stack_size
    yield socket.getdefaulttimeout, socket.setdefaulttimeout
    yield sys.gettrace, sys.settrace
    yield sys.getprofile, sys.setprofile
    yield _event_loop, _set_event_loop
    for owner, name in (
        (sys, "stdin"), (sys, "stdout"), (sys, "stderr"), (sys, "excepthook"),
        (sys, "unraisablehook"), (threading, "excepthook"),
    ):  # fmt: skip
        yield _state(getattr, setattr, owner, name)


class RestoredState:
    """The state of this process when this object was made.

    It has the standard streams, folder, umask, limits, signals, timers, environment, import path,
    locale, priority, CPUs, garbage collection, limits of recursion and digits, switch interval and
    stack size of threads, default timeout of sockets, the event loop of the thread, and hooks for
    traces and errors.
    """

    def __init__(self) -> None:
        self._files = [wire.high(os.dup(number)) for number in range(3)]
        """Copies of the descriptors 0, 1 and 2."""
        self._pipes = self._files[1:]
        self._folder = wire.high(os.open(".", getattr(os, "O_PATH", os.O_RDONLY)))
        self._umask = os.umask(0)
        os.umask(self._umask)
        states = [*_states()]
        self._reads, self._writes = [each[0] for each in states], [each[1] for each in states]
        self._were = [read() for read in self._reads]
        self._environ: Any = os.environ
        self._variables: dict[Any, Any] = dict(self._environ._data)
        self._path = [*sys.path]
        self._decimals = decimal.getcontext().copy()

    def has_unread_output(self) -> bool:
        """Return whether the pipes of stdout and stderr hold output that is not read yet."""
        with contextlib.suppress(OSError):  # the job has closed them
            return any(fcntl.ioctl(fd, termios.FIONREAD, _EMPTY) != _EMPTY for fd in self._pipes)
        return False

    def restore(self) -> str:
        """Restore the state after a job; return why that is impossible, or an empty text.

        Signals with handlers are blocked meanwhile, since an alarm of the job may still fire.
        """
        try:
            for number, fd in enumerate(self._files):
                os.dup2(fd, number)
            os.fchdir(self._folder)
            os.umask(self._umask)
            signal.set_wakeup_fd(-1)
            if [read() for read in self._reads] != self._were:
                for read, write, was in zip(self._reads, self._writes, self._were, strict=True):
                    if read() != was:
                        write(was)
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                if stream is not None and stream.closed:
                    raise ValueError("it has closed stdin, stdout or stderr")
            os.environ = self._environ  # noqa: B003  the original object
            if self._environ._data != self._variables:
                self._restore_environment()
            if sys.path != self._path:
                sys.path[:] = self._path
            # Copies of a context share this object, so a job may have changed it.
            decimal.setcontext(self._decimals.copy())
        except Exception as error:  # noqa: BLE001  a job may have left any objects
            _log.warning("the state before a job cannot be restored, its executor ends: %s", error)
            return str(error) or type(error).__name__
        return ""

    def _restore_environment(self) -> None:
        for name in self._environ._data.keys() - self._variables.keys():
            del self._environ[self._environ.decodekey(name)]
        for name, value in self._variables.items():
            if self._environ._data.get(name) != value:
                self._environ[self._environ.decodekey(name)] = self._environ.decodevalue(value)
        time.tzset()  # TZ may have changed


def _set_handler(signum: int, handler: Any) -> None:
    if handler is not None:
        signal.signal(signum, signal.SIG_IGN)  # drops a pending signal
        signal.signal(signum, handler)


def _stop_timer(timer: int, _: object) -> None:
    signal.setitimer(timer, 0.0)


def _refuse_user(_: int) -> None:
    raise ValueError("it runs as another user or group")


def _event_loop() -> tuple[Any, Any, bool]:
    """Return asyncio's policy, its event loop for this thread, and whether that was set.

    asyncio itself would create a loop if asked for it.
    """
    policy = getattr(_EVENTS, "_event_loop_policy", None)
    local = getattr(policy, "_local", None)
    return policy, getattr(local, "_loop", None), getattr(local, "_set_called", False)


def _set_event_loop(was: tuple[Any, Any, bool]) -> None:
    policy, loop, was_set = was
    _EVENTS._event_loop_policy = policy
    if (local := getattr(policy, "_local", None)) is not None:
        local._loop, local._set_called = loop, was_set
