"""Start one child process that dies with its parent, or fork it, and report how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from queue_workflows.runtime import forking, kernel

_POLL_S = 0.05

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
    `env` is added to this process's environment; it keeps the descriptors `inherit`. Raises OSError
    if nothing could be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        inherit: Sequence[int] = (),
    ) -> None:
        command = list(argv)
        if sys.platform == "linux" and sys.executable:
            command = [sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid()), *command]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command,
            env={**os.environ, **env} if env else None,
            stdin=subprocess.DEVNULL,
            pass_fds=inherit,
            start_new_session=True,
        )
        self._follow(self._process.pid)

    def _follow(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self.pidfd = os.pidfd_open(pid)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to a child that was not reaped yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def wait(self, timeout_s: float) -> Death | None:
        """Return how it ended, once; None if it still runs after this time."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        while (death := self.reap()) is None and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(1000 * (left_s if self.pidfd is not None else min(left_s, _POLL_S)))
        return death

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
        if self._process is not None:
            self._process.returncode = death.code or 0  # or its destructor warns of a running child
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return death


class Forked(Child):
    """A process that has what this one has imported, and so starts at once, and calls `main`.

    Only where `forking.is_clean` returns True, and no thread runs. `env` is as of `Child`. What is
    registered with `atexit` is called in it, too, as in every process that imports the same.
    """

    def __init__(self, main: Callable[[], int], env: Mapping[str, str] | None = None) -> None:
        forking.flush()  # else it would print again what waits here
        self._process = None
        parent = os.getpid()
        # A handler of this process would act in the child, on a pipe that both have.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if not pid:
                _be_forked(main, env or {}, parent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._follow(pid)


def _be_forked(
    main: Callable[[], int], env: Mapping[str, str], parent: int, mask: Iterable[int]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        kernel.die_with(parent, signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The first drops a Ctrl-C that came before `setsid`, and is for the parent.
        for action in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ.update(env)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  the frames below are the parent's
        traceback.print_exc()
    try:
        forking.end()
    finally:
        os._exit(code)
