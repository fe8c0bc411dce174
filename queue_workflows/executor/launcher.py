"""Run the process from which executors are forked: it loads the app once and runs no handler.

It has one thread, so that a fork is safe, and nothing in it waits for the app or the worker. It
ends with its worker, and its executors end with it.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from queue_workflows.executor import channel, kernel, memory_cgroups, process, protocol, title
from queue_workflows.runtime import clock, forking
from queue_workflows.runtime.entry_point import print_by_lines

GRACE_S: Final = 0.15
"""Seconds after the deadline at which the kernel kills a launcher that is stopped itself.

Its executors die with it. The worker sets the deadline 0.25 s before a lease ends (`kill_timers`),
so that 0.1 s are left for that.
"""
CHECK_S: Final = 0.1
"""Seconds between two checks for ended executors where there are no pidfds."""


def main(end: socket.socket, app: process.App, parent: int, *, late: bool) -> NoReturn:
    """Serve the worker `parent` on `end` in this forked process, and never return.

    `late`: each executor loads the app itself, for an app whose import starts threads or a GPU.
    """
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the worker
        kernel.die_with(parent)
        title.set_title(f"queue_workflows launcher of worker {parent}")
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, process.ignore)  # systemd sends SIGTERM to every process
        signal.set_wakeup_fd(-1)
        # What was registered so far is for the worker. multiprocessing does this too.
        atexit._clear()  # pyright: ignore[reportPrivateUsage]
        print_by_lines()
        process.loops()
        _Launcher(channel.FdChannel(end, blocking=True), app, late=late).serve()
    except protocol.ChannelLost:
        os._exit(0)
    except BaseException:  # noqa: BLE001  the main function of a process
        traceback.print_exc()
    finally:
        os._exit(1)


class _Launcher:
    def __init__(self, worker: channel.FdChannel, app: process.App, *, late: bool) -> None:
        self._worker = worker
        self._app = app
        self._late = late
        self._executors: dict[int, int] = {}
        """The pidfd of each executor by pid; -1 where there are none."""
        self._cgroups = memory_cgroups.Cgroups()
        self._cgroup_of: dict[int, memory_cgroups.Cgroup] = {}
        self._poll = select.poll()
        self._poll.register(worker.fileno(), select.POLLIN)
        self._timer = kernel.DeathTimer()
        self._until: float | None = None
        self._killed: set[int] = set()

    def serve(self) -> NoReturn:
        if not self._late:
            self._worker.send(process.loaded(self._app))
            forking.prepare()  # loading may have used the database, whose pool has threads
        gc.collect()
        gc.freeze()  # a collection in an executor must not touch, and so copy, these pages
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._timeout_ms())}
            if self._executors:
                self._reap(ready)
            if self._worker.fileno() in ready:
                for message in self._worker.receive():
                    self._act(message)
            if self._until is not None and clock.boot_s() >= self._until:
                self._kill_all()

    def _timeout_ms(self) -> float | None:
        left_s = None if self._until is None else max(0.0, self._until - clock.boot_s())
        if -1 in self._executors.values():
            left_s = CHECK_S if left_s is None else min(left_s, CHECK_S)
        return None if left_s is None else left_s * 1000 + 1

    def _act(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Hold):
            self._until = message.until
            self._timer.set(None if message.until is None else message.until + GRACE_S)
        elif isinstance(message, protocol.Fork):
            self._fork(message)
        else:
            raise protocol.ProtocolError(f"a launcher takes no {type(message).__name__} message")

    def _fork(self, message: protocol.Fork) -> None:
        fds = [self._worker.fds.popleft() for _ in range(process.FDS)]
        if (error := unsafe()) is not None:
            pid = 0
        else:
            flush()
            cgroup = self._cgroups.make()
            parent, pid = os.getpid(), self._forked(cgroup)
            if not pid:
                if cgroup is not None:
                    cgroup.join()
                inherited = [self._worker.fileno(), *self._executors.values()]
                kind = (message.concurrent, message.batched)
                process.main(fds, inherited, self._app, parent, self._late, *kind)
            if cgroup is not None:
                self._cgroup_of[pid] = cgroup
        for fd in fds:
            os.close(fd)
        reply = protocol.Forked(message.number, pid, error)
        if not pid:
            self._worker.send(reply)
            return
        pidfd = pidfd_of(pid)
        self._executors[pid] = pidfd
        if pidfd < 0:
            self._worker.send(reply)
            return
        self._poll.register(pidfd, select.POLLIN)
        self._worker.send_fds(reply, pidfd)

    def _forked(self, cgroup: memory_cgroups.Cgroup | None) -> int:
        """Fork; without a process there is no cgroup either."""
        try:
            return os.fork()
        except OSError:
            if cgroup is not None:
                self._cgroups.end(cgroup)
            raise

    def _reap(self, ready: set[int]) -> None:
        for pid, pidfd in [*self._executors.items()]:
            if pidfd >= 0 and pidfd not in ready:
                continue
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if not found:
                continue
            del self._executors[pid]
            if pidfd >= 0:
                self._poll.unregister(pidfd)
                os.close(pidfd)
            code = os.waitstatus_to_exitcode(status)
            rss_mb = usage.ru_maxrss >> (20 if sys.platform == "darwin" else 10)
            cgroup = self._cgroup_of.pop(pid, None)
            self._worker.send(
                protocol.Died(
                    pid,
                    code if code >= 0 else None,
                    -code if code < 0 else None,
                    os.WCOREDUMP(status),
                    rss_mb,
                    usage.ru_utime,
                    usage.ru_stime,
                    pid in self._killed,
                    None if cgroup is None else self._cgroups.end(cgroup),
                )
            )
            self._killed.discard(pid)

    def _kill_all(self) -> None:
        self._until = None
        self._timer.set(None)
        for pid in self._executors:
            self._killed.add(pid)
            kill_group(pid, signal.SIGKILL)


def unsafe() -> str | None:
    """Return why this process must not fork, or None if it may.

    A forked child would wait forever for a lock that another thread held, and cannot use a GPU
    that its parent has opened.
    """
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others or threading.current_thread() is not threading.main_thread():
        return f"threads run in it: {', '.join(others)}"
    if kernel.has_cuda_context():
        return "it has opened a GPU"
    return None


def flush() -> None:
    """Flush stdout and stderr, so that a forked child does not print what waits in them again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, full, or None
            continue


def pidfd_of(pid: int) -> int:
    """Return a pidfd of a child that was not reaped; -1 where the system has none."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:
        return -1
    try:
        return opener(pid)
    except OSError:
        return -1


def kill_group(pid: int, signum: int) -> None:
    """Send a signal to an executor and to the processes of its group."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signum)
        except ProcessLookupError:
            continue
