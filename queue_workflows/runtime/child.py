"""Start one child process that dies with its parent, and report how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Becomes the child by exec. The kernel sends it SIGTERM when the starting thread ends; if that
# happened before prctl, its parent has changed. Python ignores SIGPIPE and SIGXFSZ, and exec keeps
# ignored signals ignored.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot run {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(2)
"""


class Death(NamedTuple):
    """The end of a process: exit code or signal, neither if unknown; and its largest RSS in MB."""

    code: int | None
    signal: int | None
    max_rss_mb: int


class Child:
    """A process in a session of its own, without stdin; the parent's Ctrl-C does not reach it.

    On Linux it gets SIGTERM when the thread that created it ends. A small interpreter sets that up
    and then becomes the child by exec, since code between fork and exec is unsafe beside threads.
    `env` is added to this process's environment. Raises OSError if nothing could be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        command = list(argv)
        if sys.platform == "linux" and sys.executable:
            command = [sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid()), *command]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env} if env else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self.pidfd = os.pidfd_open(self.pid)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to a child that was not reaped yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def reap(self) -> Death | None:
        """Return how it ended, once; None while it runs. Leaves other children's status alone."""
        try:
            reaped, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:  # another caller has reaped it
            death = Death(None, None, 0)
        else:
            if not reaped:
                return None
            code = os.waitstatus_to_exitcode(status)
            rss_mb = usage.ru_maxrss >> (20 if sys.platform == "darwin" else 10)
            death = Death(code, None, rss_mb) if code >= 0 else Death(None, -code, rss_mb)
        self._process.returncode = death.code or 0  # or its destructor warns of a running child
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return death
