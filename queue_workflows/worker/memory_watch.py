"""Stop a worker from claiming while the memory that its jobs fill is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.runtime import service
from queue_workflows.telemetry import gpu_overview, pressure
from queue_workflows.types import JsonDict
from queue_workflows.worker import desk


class MemoryWatch:
    """Read the use of memory on a thread of its own, and decide whether the desk may claim.

    It may always claim if no job runs whose end would free memory, in this worker or in another
    that uses the same memory. `post` lets the worker's loop call `tick`, `later` runs a script on
    the second connection, `changed` is called when throttling begins or ends.
    """

    def __init__(
        self,
        desk_: desk.Desk,
        *,
        post: Callable[[Callable[[], object]], object],
        later: Callable[..., object],
        changed: Callable[[], object],
    ) -> None:
        self._desk = desk_
        self._post, self._later, self._changed = post, later, changed
        self._resources = names = config.worker_memory_throttle()
        gpus = gpu_overview.Reader() if "gpu" in names else None
        self._memory = pressure.Memory(gpus=gpus)
        self._reading: pressure.Reading | None = None
        self._throttle = pressure.Throttle(
            lambda: self._reading or pressure.Reading(),
            limits_fn=self._limits,
            ours="these workers",
            now_fn=desk_.now,
        )
        self._asks = False
        task = service.Task("memory", config.MEMORY_CHECK_INTERVAL.read, self._read)
        self._thread = service.Loop("worker-memory", [task])

    def __enter__(self) -> None:
        if self._resources:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    def _read(self) -> None:
        self._reading = self._memory.read()
        self._post(self.tick)

    def _limits(self) -> list[pressure.Limit]:
        return [each for each in pressure.limits() if each.resource.lower() in self._resources]

    def tick(self) -> None:
        """Decide from the latest reading."""
        if self._reading is None or self._asks:
            return
        working = any(own.jobs or own.runner.gives_back for own in self._desk.queues)
        full = pressure.nearly_full(self._reading)
        if full and not working:
            self._asks = True
            script = self._fills(pressure.ids(full))
            what = "whether jobs of other workers fill the memory cannot be read"
            self._later(script, what, self._found, self._not_found)
        else:
            self._decide(working=working)

    def _fills(self, ids: list[str]) -> db.Script[Any]:
        return statements.workers.fill_memory.script(
            memory=ids,
            but=[own.who.worker_id for own in self._desk.queues],
            stale_s=config.STALE_WORKER_AFTER_S.read(),
        )

    def _found(self, row: Any) -> None:
        self._asks = False
        self._decide(working=row is not None)

    def _not_found(self) -> None:
        """Keep the last decision until the next reading."""
        self._asks, self._reading = False, None

    def _decide(self, *, working: bool) -> None:
        before = self._desk.throttled
        self._desk.throttled = active = self._throttle.check(working=working)
        self._reading = None
        for own in self._desk.queues if active else ():
            own.runner.shed()
        if active != before:
            self._changed()
            if before:
                self._desk.look()

    def detail(self) -> JsonDict:
        """Return the part of the worker row's `detail` about memory.

        `throttle` is why it does not claim, or None. `memory` has the ids of the memory it uses.
        """
        return {"throttle": self._throttle.reason, "memory": pressure.ids(self._memory.within)}
