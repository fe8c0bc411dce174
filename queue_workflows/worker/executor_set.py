"""Manage the executors of one queue: fork, choose, recycle and replace them."""

from __future__ import annotations

import logging
import math
import selectors
import signal
import time
from collections.abc import Sequence

from queue_workflows.executor import protocol
from queue_workflows.runtime import clock
from queue_workflows.worker import (
    current_job,
    executor_shape,
    executor_traffic,
    executors,
    multiplexer,
    slot_ahead,
)

_log = logging.getLogger(__name__)
END_S = 5.0
"""Seconds for which the end of killed executors is awaited."""
LOST_S = 1.0
"""Seconds that a process gets to end after its channel was closed."""
GROWN_MB = 32.0
"""Memory in MB that an executor keeps of its jobs, from which its end helps when memory is full.

Less than that is what imports and caches take."""
FORK_AGAIN_S = 5.0
"""Longest pause in seconds before an executor that died without a job is replaced."""


class ExecutorSet:
    """The executors of one queue.

    For the thread of the multiplexer. An executor that ends, for whatever cause, is replaced by
    `replace`.
    """

    def __init__(
        self,
        mux: multiplexer.Multiplexer,
        shape: executor_shape.Shape,
        limits: executor_shape.Limits,
    ) -> None:
        self._mux = mux
        self.traffic = executor_traffic.Traffic(mux)
        self._shape = shape
        self._count = shape.executors
        self._limits = limits
        self._owner: executor_traffic.Owner
        self._handles: dict[int, executors.Handle] = {}
        """The executors by pid, until both their end and its cause are known."""
        self._shed: dict[int, float] = {}
        """When executors were ended for their memory (`time.monotonic`), by pid."""
        self._fork_at = 0.0
        self._fork_s = 0.1

    def start(self, owner: executor_traffic.Owner) -> None:
        """Fork the executors. Raises `ForkRefused` and `LauncherLost`."""
        self._owner = self.traffic.owner = owner
        self._mux.follow(self._on_died)
        for _ in range(self._count):
            self._fork(concurrent=self._shape.concurrent)

    # --- Executors that can take jobs.

    @property
    def idle(self) -> int:
        """Return how many jobs can start now; any thread may ask."""
        handles = [*self._handles.values()]
        if not (self._shape.concurrent or self._shape.mixed):
            return sum(self._is_usable(each) and not each.count for each in handles)
        if self._shape.concurrent and not any(self._is_usable(each) for each in handles):
            return 0
        return max(0, self._shape.slots - sum(each.count for each in handles))

    @property
    def queued(self) -> int:
        """Return how many jobs wait in executors behind others."""
        if self._shape.batch == 1:
            return 0
        return sum(max(0, each.count - 1) for each in self._handles.values())

    def has_room(self, each: int, *, isolated: bool) -> bool:
        """Return whether an executor can take a job if it may have so many; `isolated`: alone."""
        if isolated or self._shape.concurrent or self._shape.mixed:
            return self.idle > 0
        return any(self._room(handle, each) > 0 for handle in self._handles.values())

    def free_for_request(self) -> executors.Handle | None:
        """Return an executor without a job that can load or unload a model, or None."""
        usable = [each for each in self._handles.values() if self._is_usable(each)]
        return next((each for each in usable if not each.count), None)

    def kill_idle(self, reason: str) -> None:
        """End the executors that have no job, for this reason; any thread may call it."""
        for each in [*self._handles.values()]:
            each.kill_idle(reason)

    def busy(self) -> list[executors.Handle]:
        """Return the executors that have jobs."""
        return [each for each in self._handles.values() if each.count]

    def _is_usable(self, handle: executors.Handle) -> bool:
        return not (
            handle.full
            or handle.retired
            or handle.extra
            or handle.announcing
            or handle.changing
            or handle.was_killed
            or handle.lost is not None
            or handle.exited
        )

    def _room(self, handle: executors.Handle, each: int) -> int:
        """Return how many more jobs an executor may get."""
        if not self._is_usable(handle):
            return 0
        running = handle.first
        if running is not None and clock.boot_s() - running.started > slot_ahead.SHORT_S:
            return 0  # nothing waits behind a handler that is not short
        most = self._limits.max_jobs
        left = each if most is None else most - handle.jobs
        return min(each - handle.count, left)

    @property
    def replace_at(self) -> float:
        """Return when a missing executor is forked at the earliest (`time.monotonic`)."""
        return self._fork_at if self._missing else math.inf

    @property
    def _missing(self) -> int:
        """Return how many executors are to be forked for those that end."""
        handles = self._handles.values()
        if self._shape.gpu:
            return self._count - len(handles)  # two processes may not fit into the GPU's memory
        lasting = sum(not (each.retired or each.extra) for each in handles)
        return max(0, self._count - lasting)

    def take(self, *, isolated: bool, concurrent: bool) -> executors.Handle:
        """Return the executor with the fewest jobs; `isolated`: one for one job alone.

        `concurrent`: one that runs jobs at once, if the job is not isolated. `has_room` must have
        returned True. Raises `ForkRefused` and `LauncherLost`.
        """
        usable = [each for each in self._handles.values() if self._is_usable(each)]
        if self._shape.mixed:
            handle = self._take_or_fork(usable, isolated=isolated, concurrent=concurrent)
        elif isolated and self._shape.concurrent:
            handle = self._fork(extra=True)
        else:
            most = self._shape.batch
            # The executor that had room a moment ago may run a long handler now.
            handle = min(
                reversed(usable), key=lambda each: (self._room(each, most) < 1, each.count)
            )
            if isolated and handle.jobs:
                handle.retire()
                handle = self._fork()
        if isolated:
            handle.isolated = handle.full = True
        return handle

    def _take_or_fork(
        self, usable: Sequence[executors.Handle], *, isolated: bool, concurrent: bool
    ) -> executors.Handle:
        """Return the shared executor, or one without a job (`isolated`: that never had one)."""
        shared = concurrent and not isolated
        for each in usable:
            free = shared or not (each.jobs if isolated else each.count)
            if free and each.concurrent == shared:
                return each
        return self._fork(concurrent=shared)

    def free(self, handle: executors.Handle) -> None:
        """Give the executor further jobs, or end it if it has had enough."""
        limits = self._limits
        if handle.was_killed and not handle.count:
            handle.kill(
                signal.SIGKILL
            )  # its handler has ended at SIGTERM, and the process lives on
        if handle.was_killed or handle.lost is not None or handle.announcing or handle.retired:
            return
        if (limits.max_jobs is not None and handle.jobs >= limits.max_jobs) or (
            limits.max_rss_mb is not None and handle.rss_mb() > limits.max_rss_mb
        ):
            handle.full = True
        # One that runs many jobs at once ends after those that it has, and another one begins.
        if handle.full and (handle.concurrent or not handle.count):
            handle.retire()

    @property
    def gives_back(self) -> bool:
        """Return whether idle executors keep memory that `shed` frees; any thread may ask."""
        return bool(self._shed) or any(map(self._has_grown, [*self._handles.values()]))

    def _has_grown(self, handle: executors.Handle) -> bool:
        """Return whether an executor keeps memory of jobs that have all ended."""
        return self._is_usable(handle) and not handle.count and handle.grown_mb() >= GROWN_MB

    def shed(self) -> None:
        """End the idle executors that keep memory of their jobs, since memory is full."""
        for handle in [*filter(self._has_grown, self._handles.values())]:
            _log.info(
                "an executor that keeps %.0f MB of its jobs is replaced: memory is full",
                handle.grown_mb(),
            )
            self._shed[handle.pid] = time.monotonic()
            handle.full = True
            handle.retire()

    def replace(self, now: float, *, fork: bool) -> None:
        """Kill executors whose channel is lost; `fork`: others for those that end."""
        for handle in self._handles.values():
            if handle.lost is not None and not handle.exited and now - handle.lost_at >= LOST_S:
                handle.kill(signal.SIGKILL)
            elif now - self._shed.get(handle.pid, now) >= END_S:
                handle.kill(signal.SIGKILL)  # its exit hangs, and would keep the memory
        if not fork or now < self._fork_at:
            return
        for _ in range(self._missing):
            self._fork(concurrent=self._shape.concurrent)

    def _fork(self, *, concurrent: bool = False, extra: bool = False) -> executors.Handle:
        batched = self._shape.batch > 1
        handle = executors.Handle(
            self._mux.launcher.fork(concurrent=concurrent, batched=batched),
            concurrent=concurrent,
            batched=batched,
        )
        handle.extra = extra
        self._handles[handle.pid] = handle
        self._owner.forked(handle)
        register = self._mux.selector.register
        register(handle.forked.pidfd, selectors.EVENT_READ, lambda: self._exited(handle))
        for fd in handle.forked.out.fds:
            register(fd, selectors.EVENT_READ, lambda: self.traffic.drain(handle))
        register(handle.forked.jobs, selectors.EVENT_READ, lambda: self.traffic.receive(handle))
        return handle

    def sent(self, handle: executors.Handle) -> None:
        """Note that a job was sent; the rest of it is sent as the executor takes it."""
        if handle.concurrent:
            self.free(handle)  # it may have had enough already, and still takes jobs
        self.traffic.send_rest(handle)

    # --- Executors that end.

    def _exited(self, handle: executors.Handle) -> None:
        """Read the last messages of an executor whose process has ended."""
        handle.exited = True
        self._mux.ready.clear()
        self._mux.forget(handle.forked.pidfd)
        while handle.lost is None and self.traffic.receive(handle):
            continue
        self._mux.forget(handle.forked.jobs)
        handle.kill_children()
        while self.traffic.drain(handle):
            continue
        self.traffic.end_lines(handle)
        for fd in handle.forked.out.fds:
            self._mux.forget(fd)
        self._end_if_known(handle)

    def _on_died(self, died: protocol.Died) -> None:
        handle = self._handles.get(died.pid)
        if handle is not None:
            handle.died = died
            self._end_if_known(handle)

    def _end_if_known(self, handle: executors.Handle) -> None:
        """End the job of an executor once its end and the cause of its end are known."""
        if not handle.exited or handle.died is None:
            return
        del self._handles[handle.pid]
        self._shed.pop(handle.pid, None)
        works = handle.take_all()
        self._owner.died(handle, works)
        if not works and not (handle.retired or handle.was_killed):
            self._fork_at = time.monotonic() + self._fork_s
            self._fork_s = min(FORK_AGAIN_S, self._fork_s * 2)
            _log.warning("an idle executor %s", executors.death(handle, None, 0.0).evidence)
        handle.close()

    def end_all(self) -> list[current_job.Work]:
        """Wait until the executors have ended with the launcher; return the jobs that still ran."""
        for handle in self._handles.values():
            handle.wait_ended(END_S)
        return [work for each in self._handles.values() for work in each.take_all()]

    def close(self) -> None:
        """Close the descriptors."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
