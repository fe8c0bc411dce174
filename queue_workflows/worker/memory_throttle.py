"""Let a worker claim nothing while the memory that its jobs fill is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db
from queue_workflows.engine import workers
from queue_workflows.runtime import clock, service
from queue_workflows.telemetry import gpu_overview, pressure
from queue_workflows.types import JsonDict, NowFn


class MemoryThrottle:
    """Check the memory on a thread of its own, and say whether this worker may claim.

    Nothing is held back while no job runs that could free the memory, neither of this process
    (`is_busy`) nor of another worker that fills the same memory. `worker_ids` are those of this
    process; `changed` is called when waiting begins or ends. `read` replaces the measurement.
    """

    def __init__(
        self,
        worker_ids: Callable[[], Sequence[str]],
        *,
        is_busy: Callable[[], bool],
        dedicated: db.DedicatedConnection,
        changed: Callable[[], object],
        read: Callable[[], pressure.Reading] | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._worker_ids = worker_ids
        self._is_busy = is_busy
        self._dedicated = dedicated
        self._changed = changed
        self._resources = names = config.worker_memory_throttle()
        gpus = gpu_overview.Reader() if "gpu" in names else None
        self._memory = pressure.Memory(gpus=gpus)
        self._throttle = pressure.Throttle(
            read or self._memory.read, limits_fn=self._limits, ours="these workers", now_fn=now_fn
        )
        self.gives_back: Callable[[], bool] = lambda: False
        """Returns whether processes whose jobs have ended are about to give memory back."""
        self.on_full: Callable[[], object] = lambda: None
        """Called after each check that finds this worker throttled."""
        self.on_released: Callable[[], object] = lambda: None
        """Called when claiming may go on."""

    @property
    def active(self) -> bool:
        """Return whether nothing may be claimed; any thread may ask."""
        return self._throttle.active

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Check the memory while the block runs, unless WORKER_MEMORY_THROTTLE is `off`."""
        if not self._resources:
            yield
            return
        task = service.Task("memory", config.MEMORY_CHECK_INTERVAL.read, self.check)
        with service.Loop("worker-memory", [task]):
            yield

    def check(self) -> None:
        """Read the memory and decide."""
        before = self.active
        active = self._throttle.check(working=self._may_free)
        if active:
            self.on_full()
        if active != before:
            self._changed()
            if before:
                self.on_released()

    def detail(self) -> JsonDict:
        """Return the part of the worker row's `detail` about memory.

        `throttle`: why it claims nothing, or None. `memory`: ids of the memory that it fills.
        """
        return {"throttle": self._throttle.reason, "memory": pressure.ids(self._memory.within)}

    def _limits(self) -> list[pressure.Limit]:
        return [each for each in pressure.limits() if each.resource.lower() in self._resources]

    def _may_free(self, full: frozenset[str]) -> bool:
        """Return whether a job runs, here or elsewhere, whose end may free memory that is full."""
        if self._is_busy() or self.gives_back():
            return True
        try:
            with self._dedicated.using() as conn:
                stale_s = config.STALE_WORKER_AFTER_S.read()
                but = self._worker_ids()
                return workers.fill_memory(conn, pressure.ids(full), but=but, stale_s=stale_s)
        except db.Error:
            return self.active  # without a database there is nothing to claim either
