"""The kernel timers that end a worker whose interpreter cannot: one for each deadline of a job."""

from __future__ import annotations

from queue_workflows.runtime import kill_timer
from queue_workflows.types import NowFn
from queue_workflows.worker import guards

EARLY_S = 0.25
"""How long before its lease may lapse on the server a worker is gone."""
LATE_S = 3.0
"""How long after its budget a job is left to the watch, which can record the trip."""
EXIT_WITHIN_S = 4.0
"""How long an exit that was decided may be held up, by the database for example."""
EARLIER_S = 1.0
"""How much before its instant a job may find a timer armed, by the job before it."""


class _Timer:
    """A fuse, and for when it is armed."""

    def __init__(self, code: int, now_fn: NowFn) -> None:
        self._fuse = kill_timer.KillTimer(code)
        self._now = now_fn
        self._at: float | None = None

    def begin(self, at: float | None) -> None:
        if at is None or self._at is None or not self._at <= at <= self._at + EARLIER_S:
            self.put(at)

    def put(self, at: float | None) -> None:
        if at == self._at:
            return
        self._at = at
        if at is None:
            self._fuse.disarm()
        else:
            self._fuse.arm(at - self._now())


class KillTimers:
    """Armed while a job runs; `enabled` False: none at all, for workers that tests run in-process.

    A body that keeps the GIL stops the watch as well; its lease and its budget end the process all
    the same, with codes 77 and 75.
    """

    def __init__(self, *, enabled: bool, now_fn: NowFn) -> None:
        self._now = now_fn
        self._enabled = enabled
        self._lost = _Timer(guards.EXIT_LOST, now_fn)
        self._budget = _Timer(guards.EXIT_BUDGET, now_fn)
        self._leaving: kill_timer.KillTimer | None = None

    def begin(self, lease_ends: float, budget_ends: float | None) -> None:
        """A job runs until one of these instants of the clock at the latest.

        What is armed for just before one is left to `keep`, since jobs may be very short.
        """
        if self._enabled:
            self._lost.begin(lease_ends - EARLY_S)
            self._budget.begin(None if budget_ends is None else budget_ends + LATE_S)

    def keep(self, lease_ends: float | None, budget_ends: float | None) -> None:
        """The instants as they are now; None: there is none."""
        if self._enabled:
            self._lost.put(None if lease_ends is None else lease_ends - EARLY_S)
            self._budget.put(None if budget_ends is None else budget_ends + LATE_S)

    def leave(self, code: int) -> None:
        """An exit was decided: it comes within EXIT_WITHIN_S whatever holds it up.

        Nothing when one was decided before.
        """
        if self._enabled and self._leaving is None:
            self._leaving = kill_timer.KillTimer(code)
            self._leaving.arm(EXIT_WITHIN_S)

    def stay(self) -> None:
        """The exit is off: the job has ended meanwhile."""
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None

    def release(self) -> None:
        """No job runs, and nobody watches."""
        self.stay()
        self.keep(None, None)
