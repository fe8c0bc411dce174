"""Make an executor after a job what it was before its first one."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger(__name__)
_LIMITS: Final = tuple(
    getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE",
                 "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK")
    if hasattr(resource, name)
)  # fmt: skip
_SIGNALS: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGPIPE,
)  # fmt: skip


class RestoredState:
    """The streams, folder, umask, limits, signal handlers and timer of a process as they were."""

    def __init__(self) -> None:
        self._streams = sys.stdout, sys.stderr
        self._folder = _folder()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._limits = [resource.getrlimit(each) for each in _LIMITS]
        self._handlers = [signal.getsignal(each) for each in _SIGNALS]

    def restore(self) -> bool:
        """Undo what a job has left; return False if something cannot be undone.

        The signals that have handlers are blocked meanwhile: an alarm that the job left behind may
        come at any moment.
        """
        try:
            self._restore()
        except (OSError, ValueError) as error:
            _log.warning("this executor ends, as its job has left a state behind: %s", error)
            return False
        return True

    def _restore(self) -> None:
        sys.stdout, sys.stderr = self._streams
        for stream in self._streams:
            if stream is not None and stream.closed:
                raise ValueError("it has closed stdout or stderr")
        if _folder() != self._folder and self._folder is not None:
            os.chdir(self._folder)
        if (now := os.umask(self._umask)) != self._umask:
            _log.debug("a job has left umask %o", now)
        for limit, was in zip(_LIMITS, self._limits, strict=True):
            if resource.getrlimit(limit) != was:
                resource.setrlimit(limit, was)
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for signum, handler in zip(_SIGNALS, self._handlers, strict=True):
            if signal.getsignal(signum) is not handler and handler is not None:
                signal.signal(signum, signal.SIG_IGN)  # drops one that is pending
                signal.signal(signum, handler)


def _folder() -> Any:
    with contextlib.suppress(OSError):
        return Path.cwd()
    return None
