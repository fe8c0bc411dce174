"""Start one child process that dies with its parent, or fork it, and report how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

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
    `env` is added to this process's environment. `output`: a descriptor for its stdout and stderr;
    None: those of this process. Raises OSError if nothing could be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        command = list(argv)
        if sys.platform == "linux" and sys.executable:
            command = [sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid()), *command]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command,
            env={**os.environ, **env} if env else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
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

    Only for the main thread of a process that has no other one. The arguments are those of `Child`.
    What was registered with `atexit` is not called in it: the files that it would remove are ours.
    """

    def __init__(
        self,
        main: Callable[[], int],
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else it would print again what waits here
        parent = os.getpid()
        self._process = None
        pid = os.fork()
        if not pid:
            _run_forked(main, env or {}, output, parent)
        self._follow(pid)


def _run_forked(
    main: Callable[[], int], env: Mapping[str, str], output: int | None, parent: int
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.environ.update(env)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  nothing of the parent's frames may run here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
