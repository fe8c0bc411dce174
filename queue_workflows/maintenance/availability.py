"""Measure for how long this process has had the database without a break."""

from __future__ import annotations

from queue_workflows import config
from queue_workflows.types import NowFn


class Availability:
    """Distinguish heartbeats that an outage made stale from those of dead workers.

    A heartbeat that became stale during an outage, or while this machine was suspended, proves
    nothing. Call `note` after each statement that succeeded, every LEASE_RECLAIM_INTERVAL_S.
    """

    BREAK_S = 15.0
    BREAK_MIN_S = 1.0
    """A break lasts half of SILENT_WORKER_AFTER_S, within these bounds."""
    LATE_S = 1.0
    """Seconds that a busy machine may add between two statements."""

    def __init__(self, now_fn: NowFn) -> None:
        self._now = now_fn
        self._since = self._seen = self._unmissed = now_fn()
        """`_unmissed`: since when no statement was late, which is stricter than no break."""

    def note(self) -> None:
        """Record that the database answered now."""
        if self._has_broken():
            self._since = self._now()
        if self._is_late():
            self._unmissed = self._now()
        self._seen = self._now()

    def unmissed_s(self) -> float:
        """Return for how many seconds no statement has been late."""
        return 0.0 if self._is_late() else self._now() - self._unmissed

    def lasts(self, seconds: float) -> bool:
        """Return whether there was no break for that long; False until `note` ended a break."""
        return self._now() - self._since >= seconds and not self._has_broken()

    def _is_late(self) -> bool:
        """Return whether a statement has failed or waited for its reply since the last `note`."""
        return self._now() - self._seen > self.LATE_S + 2 * config.LEASE_RECLAIM_INTERVAL_S.read()

    def _has_broken(self) -> bool:
        half_s = config.SILENT_WORKER_AFTER_S.read() / 2
        break_s = max(self.BREAK_MIN_S, min(self.BREAK_S, half_s))
        return self._now() - self._seen > max(break_s, 3 * config.LEASE_RECLAIM_INTERVAL_S.read())
