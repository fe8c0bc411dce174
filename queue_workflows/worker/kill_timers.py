"""Arm kernel timers that end a blocked worker, one for each deadline of a job."""

from __future__ import annotations

from queue_workflows.runtime import kill_timer
from queue_workflows.types import NowFn
from queue_workflows.worker import guards

EARLY_S = 0.25
"""Seconds before the lease may expire on the server at which the timer ends the worker."""
LATE_S = 3.0
"""Seconds after the budget at which the timer ends the worker; the lease keeper comes first."""
EXIT_WITHIN_S = 4.0
"""Seconds for which an exit may be delayed, by the database for example."""
EARLIER_S = 1.0
"""Seconds by which a timer that the job before has armed may be early and still be reused."""


class _Timer:
    """A kill timer and the time for which it is armed."""

    def __init__(self, code: int, now_fn: NowFn) -> None:
        self._timer = kill_timer.KillTimer(code)
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
            self._timer.disarm()
        else:
            self._timer.arm(at - self._now())


class KillTimers:
    """Timers that are armed while a job runs; `enabled` False: none, for workers inside a test.

    A handler that keeps the GIL blocks the lease keeper too. The timers still end the process at
    the end of its lease (code 77) or budget (75).
    """

    def __init__(self, *, enabled: bool, now_fn: NowFn) -> None:
        self._now = now_fn
        self._enabled = enabled
        self._lost = _Timer(guards.EXIT_LOST, now_fn)
        self._budget = _Timer(guards.EXIT_BUDGET, now_fn)
        self._exit_timer: kill_timer.KillTimer | None = None

    def begin(self, lease_ends: float, budget_ends: float | None) -> None:
        """Arm the timers for a job whose lease and budget end at these times.

        A timer that is armed for just before is left to `keep`, since jobs may be very short.
        """
        if self._enabled:
            self._lost.begin(lease_ends - EARLY_S)
            self._budget.begin(None if budget_ends is None else budget_ends + LATE_S)

    def keep(self, lease_ends: float | None, budget_ends: float | None) -> None:
        """Arm the timers for the present times; None disarms."""
        if self._enabled:
            self._lost.put(None if lease_ends is None else lease_ends - EARLY_S)
            self._budget.put(None if budget_ends is None else budget_ends + LATE_S)

    def leave(self, code: int) -> None:
        """Exit within EXIT_WITHIN_S whatever delays it, unless an exit is armed already."""
        if self._enabled and self._exit_timer is None:
            self._exit_timer = kill_timer.KillTimer(code)
            self._exit_timer.arm(EXIT_WITHIN_S)

    def stay(self) -> None:
        """Cancel the exit, because the job has ended meanwhile."""
        if self._exit_timer is not None:
            self._exit_timer.close()
            self._exit_timer = None

    def release(self) -> None:
        """Disarm all timers, since no job runs."""
        self.stay()
        self.keep(None, None)
