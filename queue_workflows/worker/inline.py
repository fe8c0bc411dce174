"""Run the handlers of a worker in the calling thread of its own process, one at a time.

The worker's loop then runs on another thread. The two talk over a pair of sockets, as worker and
executor do. To stop a handler, the process has to exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

from queue_workflows.model_cache import ModelCache
from queue_workflows.run import executors, job_loop, job_output, wire
from queue_workflows.runtime import clock, exit_codes, kernel
from queue_workflows.types import ExitFn
from queue_workflows.worker import guards, leases

LATE_S: Final = 3.0
"""Seconds after its time limit at which the kernel ends a handler that keeps the GIL."""


class InlineExecutors(executors.Executors):
    """The one executor of a worker, which is the thread that calls `serve`.

    `on_exit` leaves the process; tests replace it, which also disables the kernel timers.
    """

    def __init__(self, *given: Any, on_exit: ExitFn, **more: Any) -> None:
        super().__init__(*given, slots=1, lone=True, **more)
        self.cut_at: float | None = None
        """When a job was given up whose handler still runs and blocks other jobs; else None."""
        self._timed = on_exit is os._exit
        self._lease_timer = kernel.DeathTimer(exit_codes.LOST)
        self._budget_timer = kernel.DeathTimer(exit_codes.BUDGET)
        ours, theirs = socket.socketpair()
        asks, hears = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nothing = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
        self._theirs = [theirs, hears]
        self.place = executors.Executor(1, (ours, asks), nothing, shared=False)
        self.place.pid, self.place.ready = os.getpid(), True
        self._by_number[self.place.number] = self.place
        self._loop.read(self.place.channel.fileno(), lambda: self._receive(self.place))

    @property
    def room(self) -> int:
        """Return how many jobs can start now."""
        return int(self.place.usable and not self.place.jobs)

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        """Give the thread a job."""
        del isolated, shared
        if self._timed:
            # Set now, since the next renewal may fail.
            self.hold(job.lease_end.ends - leases.EARLY_S, starts=True)
            limits = [each.ends for each in job.guards if isinstance(each, guards.Budget)]
            self._budget_timer.set(min(limits) + LATE_S if limits else None)
        super().start(job)

    def hold(self, until: float, *, starts: bool = False) -> bool:
        """Let the kernel end the process when its leases end (`clock.boot_s`); return True.

        It has no effect while no job runs, unless one is about to start (`starts`).
        """
        if self._timed and (self.place.jobs or starts):
            self._lease_timer.set(until)
        return True

    def kill(self, place: executors.Executor, signum: int, why: str) -> None:
        """Report the handler as dead, since the process exits once that is recorded."""
        if signum == signal.SIGKILL and place.packet is None:
            place.killed_for, self.cut_at = why, clock.boot_s()
            self._end(place, {"died": place.pid} | executors.UNKNOWN, why)

    def tick(self, now: float) -> float:
        """Do nothing, since the thread is never replaced."""
        del now
        return float("inf")

    def _freed(self, place: executors.Executor) -> None:
        if not place.jobs:  # a next job that has begun has its own timers
            self._budget_timer.set(None)
            self._lease_timer.set(None)
        super()._freed(place)

    def let_go(self, place: executors.Executor) -> None:
        """Let `serve` return."""
        super().let_go(place)
        self._by_number.pop(place.number, None)

    def serve(self, model_cache: ModelCache | None, begins: Callable[[], object]) -> None:
        """Run handlers in this thread until the worker lets it go; `begins` is called for each."""
        ends, self._theirs = self._theirs, []
        if not ends:
            return  # the loop has ended already
        # This thread closes them. If another did, a wait for such a descriptor would not end.
        with ends[0], ends[1]:
            jobs = job_loop.JobLoop(
                wire.Channel(ends[0]), ends[1], model_cache, alone=False, begins=lambda _: begins()
            )
            assert jobs.output is not None
            captured = job_output.captured(jobs.output)
            with contextlib.closing(jobs), captured, contextlib.suppress(ConnectionError):
                jobs.serve()

    def close(self) -> None:
        """Close all descriptors."""
        super().close()
        theirs, self._theirs = self._theirs, []
        for each in (self.place, *theirs, self._budget_timer, self._lease_timer):
            each.close()
