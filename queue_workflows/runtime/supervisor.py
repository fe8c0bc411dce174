"""Start child processes that die with the process that started them, and restart them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from queue_workflows import config, errors
from queue_workflows.runtime import exit_codes, forking, kernel, signals

_REAP_POLL_S = 0.05

# This program becomes the child by exec. The kernel sends it SIGTERM when the starting thread ends.
# If that thread ended before prctl, the parent has changed. Python ignores SIGPIPE and SIGXFSZ, and
# ignored signals stay ignored after exec.
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
    """The end of a process, with exit code or signal (None if unknown) and peak RSS in MB."""

    code: int | None
    signal: int | None
    max_rss_mb: int


class Child:
    """A process in a session of its own, without stdin; the parent's Ctrl-C does not reach it.

    On Linux it gets SIGTERM when the thread that created it ends. A small interpreter sets that up
    and then becomes the child by exec, as other code between fork and exec is unsafe with threads.
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
        """Send a signal to a child that has not been reaped yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def wait(self, timeout_s: float) -> Death | None:
        """Return how it ended, or None if it still runs after this time; see `reap`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        while (death := self.reap()) is None and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(1000 * (left_s if self.pidfd is not None else min(left_s, _REAP_POLL_S)))
        return death

    def reap(self) -> Death | None:
        """Return how it ended, or None while it runs; reap this child only."""
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
    """A fork of this process that calls `main`; it starts fast, as its modules are imported.

    `forking.is_clean` must return True, and no thread may run. For `env` see `Child`. At its end it
    calls the functions that are registered with `atexit`, like any other process.
    """

    def __init__(self, main: Callable[[], int], env: Mapping[str, str] | None = None) -> None:
        forking.flush()  # so that the child does not print buffered text again
        self._process = None
        parent = os.getpid()
        # A signal handler of this process must not run in the child, as they share its pipe.
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
        # SIG_IGN drops a Ctrl-C from before `setsid`, which was meant for the parent.
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


STOP_MARGIN_S = 4.0
"""Seconds beyond SHUTDOWN_TIMEOUT_S for a child to hand its job back and exit."""
KILL_WAIT_S = 5.0
POLL_S = 0.1
GIVE_UP_AFTER = 3
FIRST_DELAY_S = 0.2
BACKOFF_MAX_S = 30.0
"""Longest wait before a restart, and so until a fleet recovers after the cause is gone."""
HEALTHY_AFTER_S = 30.0
STARTED_AFTER_S = 5.0
"""A child that lived so long counts as started; a job may have caused its end."""
DOWN_SHARE = 0.25
"""A started child waits for at most this share of its life before its restart."""

SpawnFn: TypeAlias = Callable[..., Child]
"""Called as `Child`."""

logger = logging.getLogger(__name__)


class ChildSpec(NamedTuple):
    """A child to keep running; `env` is added to this process's environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None


class Exit(NamedTuple):
    """How a child ended: an exit code, or the signal that killed it, or neither if unknown.

    `overdue` is why the supervisor has killed it; then its code is 0. `max_rss_mb` is its peak RSS,
    which is never below the supervisor's, since the child is a copy of it until exec.
    """

    name: str
    pid: int
    code: int | None
    signal: int | None
    max_rss_mb: int
    seconds: float
    overdue: str | None = None


class RestartRule:
    """The delay before a restart, which is 0.2 s, doubled by each quick exit up to a maximum.

    A child that lived `HEALTHY_AFTER_S` resets it. One that lived `STARTED_AFTER_S` waits for at
    most `DOWN_SHARE` of its life, so that jobs that kill their worker delay others only a little.
    """

    def __init__(self) -> None:
        self._next_s = FIRST_DELAY_S
        self._refused = 0

    def after_exit(self, code: int | None, seconds: float) -> float | None:
        """Return the seconds until the restart; None after `GIVE_UP_AFTER` quick usage errors."""
        if seconds >= HEALTHY_AFTER_S:
            self._next_s, self._refused = FIRST_DELAY_S, 0
        else:
            self._refused = self._refused + 1 if code == exit_codes.REFUSED else 0
        if self._refused >= GIVE_UP_AFTER:
            return None
        delay_s = min(self._next_s, BACKOFF_MAX_S)
        if seconds >= STARTED_AFTER_S:
            delay_s = min(delay_s, DOWN_SHARE * seconds)
        self._next_s = 2 * delay_s
        return delay_s


class Supervisor:
    """Keep a fixed set of child processes running, each in a session of its own.

    Ctrl-C reaches only the supervisor. One thread must call `start`, `run` and `stop`, and live as
    long as the children, which on Linux get SIGTERM when it ends. Any thread may read `children`.
    `on_exit` is called right after a child was reaped, and blocks the supervisor.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        on_exit: Callable[[Exit], object] | None = None,
        fail_fast: bool = False,
        spawn: SpawnFn = Child,
    ) -> None:
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise errors.InvalidConfig(
                f"children to supervise need names of their own, at least one: {names}"
            )
        self._managed = [_ManagedChild(each, spawn) for each in specs]
        self._on_exit = on_exit
        self._fail_fast = fail_fast

    def children(self) -> dict[str, int]:
        """Return the pids of the children that run now, by name."""
        managed = [(each.spec.name, each.child) for each in self._managed]
        return {name: child.pid for name, child in managed if child is not None}

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Return the children that exited with code 2 too often, by name."""
        return tuple(managed.spec.name for managed in self._managed if managed.state == "gave_up")

    def start(self) -> None:
        """Start each child that is due; at first that is every child."""
        for managed in self._managed:
            if managed.state == "waiting" and time.monotonic() >= managed.due:
                managed.start()

    def run(
        self,
        stop: signals.StopRequest,
        *,
        deadline_s: float | None = None,
        outdated: Callable[[], bool] = lambda: False,
    ) -> int:
        """Supervise until asked to stop, then stop all; return 0, or 2 after giving up.

        It gives up when every child was given up, or with `fail_fast` when any was. It also ends
        when `outdated`, which is called about once a second, returns True.
        """
        try:
            while not (stop.requested.is_set() or outdated()):
                self.start()
                if len(self.gave_up) >= (1 if self._fail_fast else len(self._managed)):
                    return exit_codes.REFUSED
                due = [managed.due for managed in self._managed if managed.state == "waiting"]
                pause_s = max(0.0, min(due) - time.monotonic()) if due else signals.RECHECK_S
                self._wait(min(pause_s, signals.RECHECK_S), stop.requested)
                self._reap()
            return 0
        finally:
            self.stop(deadline_s, stop)

    def stop(
        self, deadline_s: float | None = None, again: signals.StopRequest | None = None
    ) -> bool:
        """Send SIGTERM to all, SIGKILL after the deadline; return whether all were reaped.

        The deadline is by default SHUTDOWN_TIMEOUT_S and a margin. Each further request in `again`
        sends SIGTERM again. Such a SIGKILL counts as exit code 0.
        """
        if deadline_s is None:
            deadline_s = config.SHUTDOWN_TIMEOUT_S.read() + STOP_MARGIN_S
        for managed in self._managed:
            if managed.state != "gave_up":
                managed.state = "stopped"  # it is not started again
        self._send(signal.SIGTERM)
        seen = min(1, again.count) if again else 0
        deadline = time.monotonic() + deadline_s
        while self._running() and time.monotonic() < deadline:
            self._wait(min(POLL_S, max(0.0, deadline - time.monotonic())))
            self._reap()
            if again and again.count > seen:
                seen = again.count
                self._send(signal.SIGTERM)
        for managed, _ in self._running():
            logger.warning("%s did not stop within %.1f s: killed", managed.spec.name, deadline_s)
            managed.overdue = f"did not stop within {deadline_s:.1f} s"
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        while self._running() and time.monotonic() < deadline:
            self._wait(POLL_S)
            self._reap()
        return not self._running()

    def _running(self) -> list[tuple[_ManagedChild, Child]]:
        return [(managed, managed.child) for managed in self._managed if managed.child is not None]

    def _send(self, signum: signal.Signals) -> None:
        for _, running in self._running():
            running.send(signum)

    def _wait(self, timeout_s: float, wake: signals.Flag | None = None) -> None:
        """Wait until a child exits, `wake` is set or the time is over."""
        poll = select.poll()
        if wake is not None:
            poll.register(wake, select.POLLIN)
        for _, running in self._running():
            if running.pidfd is not None:
                poll.register(running.pidfd, select.POLLIN)
            else:
                timeout_s = min(timeout_s, POLL_S)
        poll.poll(timeout_s * 1000)

    def _reap(self) -> None:
        for managed, _ in self._running():
            ended = managed.reap()
            if ended is None or self._on_exit is None:
                continue
            try:
                self._on_exit(ended)
            except Exception:
                logger.exception("handling the exit of %s failed", managed.spec.name)


class _ManagedChild:
    """A child spec with its process while it runs, or its start time while it waits."""

    def __init__(self, spec: ChildSpec, spawn: SpawnFn) -> None:
        self.spec = spec
        self.state = "waiting"
        self.due = time.monotonic()
        self.child: Child | None = None
        self.overdue: str | None = None
        """Why it is being killed."""
        self._rule = RestartRule()
        self._spawn = spawn
        self._started_at = 0.0

    def start(self) -> None:
        self._started_at = time.monotonic()
        try:
            self.child = self._spawn(self.spec.argv, self.spec.env)
        except OSError as error:
            never = isinstance(error, FileNotFoundError | PermissionError)
            code = exit_codes.REFUSED if never else None
            self._after_end(code, 0.0, f"could not be started: {error}")
            return
        self.state = "running"
        logger.info("%s: started, pid %d", self.spec.name, self.child.pid)

    def reap(self) -> Exit | None:
        """Return how its child ended, and plan the restart; None while it runs."""
        death = self.child.reap() if self.child else None
        if self.child is None or death is None:
            return None
        how = "an unknown status"
        if death.signal is not None:
            how = f"signal {death.signal}"
        elif death.code is not None:
            how = f"exit code {death.code}"
        overdue = self.overdue if death.signal == signal.SIGKILL else None
        if overdue is not None:
            death = death._replace(code=0, signal=None)
            how = f"a kill that counts as exit code 0 ({overdue})"
        seconds = time.monotonic() - self._started_at
        ended = Exit(self.spec.name, self.child.pid, *death, seconds=seconds, overdue=overdue)
        self.child = None
        what = f"pid {ended.pid} ended after {ended.seconds:.1f} s with {how}"
        self._after_end(death.code, ended.seconds, what)
        return ended

    def _after_end(self, code: int | None, seconds: float, what: str) -> None:
        if self.state == "stopped":
            logger.info("%s: %s", self.spec.name, what)
            return
        delay_s = self._rule.after_exit(code, seconds)
        if delay_s is None:
            self.state = "gave_up"
            logger.error(
                "%s: %s; given up after %d refusals to start, its own message says why: %s",
                self.spec.name, what, GIVE_UP_AFTER, " ".join(self.spec.argv),
            )  # fmt: skip
            return
        self.state = "waiting"
        self.due = time.monotonic() + delay_s
        logger.warning("%s: %s; restart in %.1f s", self.spec.name, what, delay_s)
