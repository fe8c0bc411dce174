"""Run the launcher, which loads the app once and forks executors, and start these.

The launcher runs no handler. It has a single thread, so that a fork is safe, and never waits for
the app or the worker. It ends with its worker, and its executors end with it. Worker and launcher
exchange packets, each a JSON object.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from queue_workflows import errors
from queue_workflows.model_cache import adapted
from queue_workflows.run import job_loop, job_output, loaded_app, memory_cgroups, stop_policy, wire
from queue_workflows.runtime import clock, forking, kernel
from queue_workflows.runtime.entry_point import print_by_lines

GRACE_S: Final = 0.15
"""Seconds after the deadline at which the kernel kills a launcher that does not react.

The deadline is 0.25 s before a lease ends, so 0.1 s are left for the executors to die with it.
"""
CHECK_S: Final = 0.1
"""Seconds between two checks for ended executors where the system has no pidfds."""
LONGEST_MS: Final = 2**31 - 1
"""The longest wait that `poll` accepts; a lease may be longer."""
REAP_S: Final = 0.5
"""Seconds that a launcher gets to end after its channel was closed."""
PACKET: Final = 1 << 20
"""The most bytes of a packet. The system may allow fewer, but at least PIECE."""
PIECE: Final = 1 << 16
"""The most bytes of each packet about the app's registrations."""
FDS: Final = 4
"""Number of an executor's descriptors, for jobs, interrupts, stdout and stderr."""


class LauncherLost(errors.QueueWorkflowsError, RuntimeError):
    """The launcher has ended, and its executors with it; the text has the cause."""

    def __init__(self, how: str, *, signum: int = 0, by_deadline: bool = False) -> None:
        """`signum` is the signal that killed it, or 0 if none did or it is unknown.

        `by_deadline` is whether the deadline that `Launcher.hold` sets had passed.
        """
        super().__init__(f"the launcher of the executors has ended: {how}")
        self.signum = signum
        self.by_deadline = by_deadline


class ForkRefused(errors.QueueWorkflowsError, RuntimeError):
    """This process must not fork a launcher, since it has threads or has opened a GPU."""


class _Deadline:
    """The kernel's deadline for a launcher, in memory that the worker reads after its end.

    The worker's last message may not have been received, so only the launcher knows the deadline.
    """

    def __init__(self) -> None:
        self.armed = forking.SharedNumber(math.inf)
        """When the kernel kills the launcher; infinity means never."""
        self._timer: kernel.DeathTimer | None = None

    def arm(self, until: float | None) -> None:
        """Let the kernel kill this process, the launcher, `GRACE_S` after this time."""
        self._timer = self._timer or kernel.DeathTimer()
        at = None if until is None else until + GRACE_S
        self.armed.set(math.inf if at is None else at)
        self._timer.set(at)


class Launcher:
    """The worker's side of its launcher, which sends and receives packets."""

    def __init__(self, app: loaded_app.App, *, late: bool) -> None:
        """Fork it; if `late`, each executor loads the app. Raises `ForkRefused` or OSError."""
        if (reason := forking.unsafe()) is not None:
            raise ForkRefused(reason)
        kernel.prepare()
        forking.flush()
        self._number = 0
        self._is_reaped = False
        self._deadline = _Deadline()
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._end, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
        parent, self.pid = os.getpid(), os.fork()
        if not self.pid:
            self._end.close()
            main(theirs, app, parent, self._deadline, late=late)
        theirs.close()

    @classmethod
    def load(cls, app: loaded_app.App) -> tuple[Launcher, loaded_app.Registered]:
        """Fork the launcher and let it load the app; return it and the app's registrations.

        If loading starts threads or opens a GPU, the launcher cannot fork any more. Then another
        one is forked, whose executors each load the app. Raises `ForkRefused`, `LauncherLost`,
        OSError, and the errors of loading the app.
        """
        made = cls(app, late=False)
        try:
            size, text = made._receive()["loaded"], b""
            while len(text) < size:
                text += made._packet()
            found = json.loads(text)
            registered = loaded_app.taken(found["app"])
        except BaseException:
            made.close()
            raise
        if found["late"] is not None:
            made.close()
            made = cls(app, late=True)
        made._end.setblocking(False)
        return made, registered

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has packets."""
        return self._end.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """Return the packets that have arrived. Raises `LauncherLost`."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._receive())
        return found

    def _receive(self) -> dict[str, Any]:
        return json.loads(self._packet())

    def _packet(self) -> bytes:
        try:
            data = self._end.recv(PACKET)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._lost(str(error)) from None
        if not data:
            raise self._lost("")
        return data

    def fork(self, fds: list[int], *, shared: bool) -> int:
        """Request an executor with these descriptors; return the number of the `forked` reply.

        A `shared` executor runs many async handlers at once. Raises OSError if the request cannot
        be sent now.
        """
        self._number += 1
        self._say({"fork": self._number, "shared": shared}, fds)
        return self._number

    def run_policy(self, name: str, about: dict[str, Any]) -> socket.socket:
        """Run a stop policy of the app in a child of the launcher; return the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):  # then the worker reads the end of file
            self._say({"policy": name, "about": about}, [theirs.fileno()])
        theirs.close()
        ours.setblocking(False)
        return ours

    def hold(self, until: float | None) -> bool:
        """Set when it kills all executors (`clock.boot_s`); return whether it was told."""
        return self._tell({"hold": until})

    def kill(self, pid: int, signum: int) -> bool:
        """Let it send a signal to an executor and its process group; return whether it was told."""
        return self._tell({"kill": pid, "signal": signum})

    def _tell(self, packet: dict[str, Any]) -> bool:
        with contextlib.suppress(OSError):
            self._say(packet)
            return True
        return False

    def _say(self, packet: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a packet. Raises OSError if the launcher has ended, which `receive` notices, too.

        It also raises while the launcher has too many packets to read, as after a request for
        hundreds of executors, and while too many descriptors of this account are on their way.
        """
        socket.send_fds(self._end, [json.dumps(packet).encode()], fds)

    def _lost(self, why: str) -> LauncherLost:
        """Reap the launcher and return the error; wait a little, as its channel closes first."""
        found, status, until = 0, 0, clock.boot_s() + REAP_S
        try:
            while not found and clock.boot_s() < until:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                select.select([], [], [], 0 if found else REAP_S / 100)
            self._is_reaped = found != 0
        except ChildProcessError:
            self._is_reaped = True  # by somebody else
        if not found:
            return LauncherLost(why or "it has closed its channel")
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return LauncherLost(f"ended with exit code {code}")
        late = clock.boot_s() >= self._deadline.armed.get()
        return LauncherLost(f"killed by {signal_name(-code)}", signum=-code, by_deadline=late)

    def close(self) -> None:
        """End it and its executors, and wait for its end."""
        if self._end.fileno() == -1:
            return
        self._end.close()
        if self._is_reaped:
            return  # another process may have its pid by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def main(
    end: socket.socket, app: loaded_app.App, parent: int, deadline: _Deadline, *, late: bool
) -> NoReturn:
    """Serve the worker `parent` on `end` in this forked process, and never return."""
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the worker
        kernel.die_with(parent)
        kernel.set_title(f"queue_workflows launcher of worker {parent}")
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, _ignore)  # systemd sends SIGTERM to every process
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.set_wakeup_fd(-1)
        # Exit functions registered so far are the worker's. multiprocessing does this too.
        atexit._clear()  # pyright: ignore[reportPrivateUsage]
        print_by_lines()
        importlib.import_module("queue_workflows.run.async_jobs")  # workers do not need it
        _Launcher(end, app, deadline, late=late).serve()
    except ConnectionError:
        os._exit(0)
    except BaseException:  # noqa: BLE001  the main function of a process
        traceback.print_exc()
    finally:
        os._exit(1)


class _Child:
    """An executor that the launcher has forked and not yet reaped."""

    def __init__(self, cgroup: memory_cgroups.Cgroup | None) -> None:
        self.cgroup = cgroup
        self.pidfd = -1
        """-1 if the system has no pidfds."""
        self.begun = forking.SharedNumber(0)
        """The key of the last job that it has begun.

        So a crash is charged to the job that ran, and not to jobs that waited. A message for each
        job would cost a system call.
        """
        self.by_deadline = False
        """Whether it was killed because the worker was silent past its deadline."""


class _Launcher:
    def __init__(
        self, worker: socket.socket, app: loaded_app.App, deadline: _Deadline, *, late: bool
    ) -> None:
        self._worker = worker
        self._app = app
        self._late = late
        self._executors: dict[int, _Child] = {}
        self._cgroups = memory_cgroups.Cgroups()
        self._poll = select.poll()
        self._poll.register(worker.fileno(), select.POLLIN)
        self._deadline = deadline
        self._until: float | None = None
        self._on_child: Any = signal.SIG_DFL
        """The app's handling of SIGCHLD, which executors restore."""

    def serve(self) -> NoReturn:
        if not self._late:
            loaded = loaded_app.load(self._app)
            forking.prepare()  # loading may have used the database, whose pool has threads
            self._tell_loaded({"app": loaded, "late": forking.unsafe()})
        # A handler of the app could reap executors, and SIG_IGN lets the kernel do it.
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.collect()
        gc.freeze()  # so a collection in an executor does not write to, and copy, these pages
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._timeout_ms())}
            self._reap(ready)
            if self._worker.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(self._worker, PACKET, FDS)
                if not data:
                    os._exit(0)
                self._act(json.loads(data), fds)
                for fd in fds:
                    os.close(fd)
            if self._until is not None and clock.boot_s() >= self._until:
                self._act({"hold": None}, ())
                for pid, child in self._executors.items():
                    child.by_deadline = True
                    signal_group(pid, signal.SIGKILL)

    def _say(self, packet: dict[str, Any]) -> None:
        self._worker.send(json.dumps(packet).encode())

    def _tell_loaded(self, found: dict[str, Any]) -> None:
        """Send the app's registrations to the worker, in several packets if they are large."""
        text = json.dumps(found).encode()
        self._say({"loaded": len(text)})
        for at in range(0, len(text), PIECE):
            self._worker.send(text[at : at + PIECE])

    def _timeout_ms(self) -> float | None:
        left_s = None if self._until is None else max(0.0, self._until - clock.boot_s())
        if any(each.pidfd < 0 for each in self._executors.values()):
            left_s = CHECK_S if left_s is None else min(left_s, CHECK_S)
        return None if left_s is None else min(left_s * 1000 + 1, LONGEST_MS)

    def _act(self, packet: dict[str, Any], fds: Sequence[int]) -> None:
        if "hold" in packet:
            self._until = packet["hold"]
            self._deadline.arm(self._until)
        elif "kill" in packet:
            if packet["kill"] in self._executors:
                signal_group(packet["kill"], packet["signal"])
        elif "policy" in packet:
            self._run_policy(packet["policy"], packet["about"], fds)
        else:
            self._fork(packet["fork"], fds, shared=packet["shared"])

    def _fork(self, number: int, fds: Sequence[int], *, shared: bool) -> None:
        forking.flush()
        cgroup, parent = self._cgroups.make(), os.getpid()
        try:
            if len(fds) < FDS:  # this process has too many open files
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            child = _Child(cgroup)
            pid = os.fork()
        except OSError as refused:  # too many processes or files, or too little memory
            if cgroup is not None:
                cgroup.remove()  # `end` would take a kill from the death that it caused
            self._say({"forked": number, "pid": -1, "error": str(refused)})
            return
        if not pid:
            if self._on_child is not None:
                signal.signal(signal.SIGCHLD, self._on_child)
            if cgroup is not None:
                cgroup.join()
            for each in self._executors.values():
                if each.pidfd >= 0:
                    os.close(each.pidfd)
            self._worker.close()
            _execute(fds, self._app, parent, child.begun, late=self._late, shared=shared)
        self._executors[pid] = child
        with contextlib.suppress(AttributeError, OSError):
            child.pidfd = os.pidfd_open(pid)
            self._poll.register(child.pidfd, select.POLLIN)
        self._say({"forked": number, "pid": pid, "error": None})

    def _run_policy(self, name: str, about: dict[str, Any], fds: Sequence[int]) -> None:
        """Fork a process that calls a stop policy and talks to the worker over a socket.

        If the fork or the socket fails, the worker reads the end of file.
        """
        forking.flush()
        parent = os.getpid()
        with contextlib.suppress(OSError):
            if fds and not os.fork():
                end = socket.socket(fileno=fds[0])
                stop_policy.main(end, about, self._app.stop_policies()[name], parent)

    def _reap(self, ready: set[int]) -> None:
        """Reap the children that have ended.

        They are executors, stop policies, and children that the app has started while loading.
        """
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                child = self._executors.pop(found.si_pid, None)
                if child is not None and found.si_status:
                    # Kill the programs of its handlers. Until it is reaped, the group is its own.
                    signal_group(found.si_pid, signal.SIGKILL)
                _, status, usage = os.wait4(found.si_pid, 0)
                if child is not None:
                    self._died(found.si_pid, child, status, usage)
        for pid, child in [*self._executors.items()]:
            if child.pidfd in ready:
                # A tracer, such as a debugger, has to take the status first.
                signal_group(pid, signal.SIGKILL)
                del self._executors[pid]
                self._died(pid, child, None, None)

    def _died(self, pid: int, child: _Child, status: int | None, usage: Any) -> None:
        """Tell the worker that an executor has ended; `status` is None if it is unknown."""
        if child.pidfd >= 0:
            self._poll.unregister(child.pidfd)
            os.close(child.pidfd)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        rss_mb = 0 if usage is None else usage.ru_maxrss >> (20 if sys.platform == "darwin" else 10)
        packet = {
            "died": pid,
            "code": code if code is None or code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "core": status is not None and os.WCOREDUMP(status),
            "max_rss_mb": rss_mb,
            "by_deadline": child.by_deadline,
            "begun": child.begun.get(),
            "oom_kills": self._cgroups.end(child.cgroup),
        }
        self._say(packet)


def signal_name(signum: int) -> str:
    """Return the name of a signal, or its number if it has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return str(signum)


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to an executor and to the processes of its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signum)


# --- Executors.


def _ignore(_signum: int, _frame: object) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that a handler executes do not inherit this."""


def _execute(
    fds: Sequence[int],
    app: loaded_app.App,
    parent: int,
    begun: forking.SharedNumber,
    *,
    late: bool,
    shared: bool,
) -> NoReturn:
    """Run handlers in this forked process, an executor, and never return.

    `fds` are the descriptors that the worker sent. `begun` gets the key of each job that begins. If
    `late`, load the app first. If `shared`, run many async handlers at once.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        kernel.set_title(f"queue_workflows executor of launcher {parent}")
        end, interrupts = _prepared(fds)
        jobs: job_loop.Jobs
        try:
            if late and (error := loaded_app.load(app)["error"]) is not None:
                raise errors.AppFailed(error["text"])
            if shared:
                from queue_workflows.run import async_jobs

                jobs = async_jobs.AsyncJobs(end, begun.set)
            else:
                cache = adapted(app.model_cache())
                jobs = job_loop.JobLoop(end, interrupts, cache, begins=begun.set)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            end.send(wire.READY, 0, wire.encoded({"text": text}))
            raise
        end.send(wire.READY, 0, wire.encoded({"text": ""}))
        jobs.serve()
        forking.end()
        code = 0
    except ConnectionError:
        code = wire.LOST
    except BaseException:  # noqa: BLE001  the main function of a process
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _prepared(fds: Sequence[int]) -> tuple[wire.Channel, socket.socket]:
    """Prepare this process to run handlers; return its ends of the two sockets."""
    ends = [socket.socket(fileno=wire.high(fd)) for fd in fds[:2]]
    job_output.redirect(*fds[2:])
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # all forks would draw alike; `random` seeds itself
    _watch_forks(ends)
    return wire.Channel(ends[0]), ends[1]


def _watch_forks(ends: Sequence[socket.socket]) -> None:
    """Let a child that a handler forks close these sockets and die by the first SIGTERM."""
    masks: list[set[int]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        for end in ends:
            end.close()
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
