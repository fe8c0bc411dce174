"""Control the launcher and its executors from the worker."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Final, TypeVar

from queue_workflows import errors
from queue_workflows.executor import (
    channel,
    kernel,
    launcher,
    loaded_app,
    memory_cgroups,
    process,
    protocol,
    streams,
)

M = TypeVar("M", protocol.Loaded, protocol.Forked)
FORK_S: Final = 30.0
"""Seconds for a fork: a few milliseconds of work, on a machine that may be loaded."""


class LauncherLost(errors.QueueWorkflowsError, RuntimeError):
    """The launcher has ended, and its executors with it; the text has the cause."""


class ForkRefused(errors.QueueWorkflowsError, RuntimeError):
    """The launcher must not fork, since loading the app started threads or opened a GPU."""


def why_not() -> str | None:
    """Return why this process must not fork a launcher, or None if it may."""
    return launcher.unsafe()


class Executor:
    """One executor: its channels, its output, and its process, which is the launcher's child."""

    def __init__(
        self, pid: int, pidfd: int, jobs: socket.socket, control: socket.socket, pipes: list[int]
    ) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """Readable once the process has ended; -1 where the system has no pidfds."""
        self.jobs = channel.Channel(jobs, blocking=False)
        self.control = channel.Channel(control, blocking=False)
        self.out = streams.Output(*pipes)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the executor and the processes of its group; not after its `Died`."""
        launcher.kill_group(self.pid, signum)

    def close(self) -> None:
        """Close the descriptors; a living executor ends by that."""
        self.jobs.close()
        self.control.close()
        self.out.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Launcher:
    """The launcher of this worker, for one thread; `hold_until` may be called by any."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self._channel = channel.FdChannel(end, blocking=True)
        self._poll = select.poll()
        self._poll.register(end.fileno(), select.POLLIN)
        self._messages: list[protocol.Message] = []
        self._number = 0

    @classmethod
    def start(cls, app: process.App, *, late: bool = False) -> Launcher:
        """Fork the launcher, which loads the app; `why_not` must have returned None.

        `late`: the executors load it, each for itself. Raises OSError if there is no process.
        """
        kernel.prepare()
        launcher.flush()
        ours, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            ours.close()
            launcher.main(theirs, app, parent, late=late)
        theirs.close()
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something."""
        return self._channel.fileno()

    def wait_loaded(self, timeout_s: float | None = None) -> loaded_app.Registered:
        """Return what the app registered. Raises its error, `LauncherLost`, or TimeoutError."""
        loaded = self._wait(protocol.Loaded, timeout_s)
        return registered(loaded)

    def fork(self, *, concurrent: bool = False, batched: bool = False) -> Executor:
        """Fork an executor, for one job at a time, for many async ones, or for several in a row.

        Raises `ForkRefused` and `LauncherLost`.
        """
        self._number += 1
        pairs = [socket.socketpair(), socket.socketpair()]
        pipes = [os.pipe(), os.pipe()]
        theirs = [pair[1].fileno() for pair in pairs] + [pipe[1] for pipe in pipes]
        try:
            self._channel.send_fds(protocol.Fork(self._number, concurrent, batched), *theirs)
            reply = self._wait(protocol.Forked, FORK_S)
            if reply.error is not None:
                raise ForkRefused(f"the launcher cannot fork: {reply.error}")
        except BaseException as error:
            for pair in pairs:
                pair[0].close()
            for pipe in pipes:
                os.close(pipe[0])
            if isinstance(error, protocol.ChannelLost):
                raise self._lost() from None
            raise
        finally:
            for pair in pairs:
                pair[1].close()
            for pipe in pipes:
                os.close(pipe[1])
        pidfd = self._channel.fds.popleft() if self._channel.fds else -1
        return Executor(reply.pid, pidfd, pairs[0][0], pairs[1][0], [pipe[0] for pipe in pipes])

    def hold_until(self, until: float | None) -> None:
        """Let the launcher kill all executors at this time (`clock.boot_s`), unless called again.

        It kills them too if this process, or the launcher, is stopped. None: no deadline.
        """
        try:
            self._channel.send(protocol.Hold(until))
        except protocol.ChannelLost:
            raise self._lost() from None

    @property
    def pending(self) -> bool:
        """Return whether `fork` has read deaths, for which this launcher is not readable again."""
        return any(isinstance(each, protocol.Died) for each in self._messages)

    def receive(self) -> list[protocol.Died]:
        """Return the deaths that were reported since; raise `LauncherLost` if it has ended."""
        while self._poll.poll(0):
            self._receive()
        died = [each for each in self._messages if isinstance(each, protocol.Died)]
        self._messages = [each for each in self._messages if not isinstance(each, protocol.Died)]
        return died

    def _receive(self) -> None:
        try:
            self._messages += self._channel.receive()
        except protocol.ChannelLost:
            raise self._lost() from None

    def _wait(self, kind: type[M], timeout_s: float | None) -> M:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for message in self._messages:
                if isinstance(message, kind):
                    self._messages.remove(message)
                    return message
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"the launcher has sent no {kind.__name__} in {timeout_s} s")
            self._poll.poll(None if left_s is None else left_s * 1000 + 1)
            if self._poll.poll(0):
                self._receive()

    def _lost(self) -> LauncherLost:
        """Return the error of a launcher that has closed its channel: it ends at once."""
        launcher.kill_group(self.pid, signal.SIGKILL)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return LauncherLost("the launcher of the executors has ended")
        code = os.waitstatus_to_exitcode(status)
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return LauncherLost(f"the launcher of the executors has ended {how}")

    def close(self) -> None:
        """End the launcher and all executors, and wait for the launcher.

        Called again, it removes the cgroups of executors that have ended since. The process group
        may have another owner by then.
        """
        if self._channel.fileno() >= 0:
            self._channel.close()
            launcher.kill_group(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        memory_cgroups.remove_old(memory_cgroups.parent_of_executors())


def registered(loaded: protocol.Loaded) -> loaded_app.Registered:
    """Return what the app registered; raise the error that it raised instead."""
    if loaded.registered is None:
        raise loaded_app.rebuilt_error(loaded.error or {})
    return loaded_app.Registered(**loaded.registered)
