"""Prepare this process for a fork, and end a forked process as the interpreter would."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from queue_workflows import config

_NUMBER: Final = struct.Struct("d")
_closers: dict[Callable[[], object], None] = {}
_commands: list[None] = []


class SharedNumber:
    """A number that this process shares with the processes that it forks from now on."""

    def __init__(self, value: float) -> None:
        self._page = mmap.mmap(-1, _NUMBER.size)
        self.set(value)

    def set(self, value: float) -> None:
        """Set the number in every process that shares it."""
        _NUMBER.pack_into(self._page, 0, value)

    def get(self) -> float:
        """Return the number, also after the process that set it has ended."""
        return _NUMBER.unpack_from(self._page)[0]


def close_before_fork(close: Callable[[], object]) -> None:
    """Call this function on each `prepare`; it closes an object that is opened again on use."""
    _closers[close] = None


def prepare() -> None:
    """Close objects with threads or sockets, such as connection pools."""
    for close in _closers:
        close()


def note_command() -> None:
    """Note that this process runs a command of this package, not a program that calls one."""
    _commands.append(None)


def is_clean() -> bool:
    """Return whether a fork is as good as a new process, since only our modules are loaded.

    A connection of an app, for example, would be shared by both processes.
    """
    return bool(_commands) and config.get_config().app is None


def unsafe() -> str | None:
    """Return why this process must not fork, or None if it may.

    A forked child would wait forever for a lock that another thread held, and cannot use a GPU
    that its parent has opened.
    """
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others or threading.current_thread() is not threading.main_thread():
        return f"threads run in it: {', '.join(others)}"
    if _has_gpu():
        return "it has opened a GPU"
    return None


def _has_gpu() -> bool:
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if str(descriptor.readlink()).startswith(("/dev/nvidia-uvm", "/dev/kfd")):
                    return True
    return False


def flush() -> None:
    """Flush stdout and stderr, even if the app has replaced them.

    Call it before a fork, so that the child does not print the buffered text again.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end() -> None:
    """Wait for threads and call the functions of `atexit`, as the interpreter does at its end."""
    prepare()
    cast("Any", threading)._shutdown()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    flush()
