"""Decide whether, and after which pause, a child process that has ended is started again."""

from __future__ import annotations

from queue_workflows.runtime import entry_point

GIVE_UP_AFTER = 3
FIRST_DELAY_S = 0.2
HEALTHY_AFTER_S = 30.0
STARTED_AFTER_S = 5.0
"""A child that lived so long has started. What ended it may have been a job, not its own fault."""
DOWN_SHARE = 0.25
"""Share of its life for which a child that has started waits at most."""


class RestartRule:
    """The delay before a restart: 0.2 s, doubled by each quick exit in a row, with a maximum.

    A child that lived `HEALTHY_AFTER_S` resets it. One that lived `STARTED_AFTER_S` waits for at
    most `DOWN_SHARE` of its life: jobs that kill their worker must not take it from the others.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._next_s = FIRST_DELAY_S
        self._refused = 0

    def after_exit(self, code: int | None, seconds: float) -> float | None:
        """Return the seconds until the restart; None after `GIVE_UP_AFTER` quick usage errors."""
        if seconds >= HEALTHY_AFTER_S:
            self._next_s, self._refused = FIRST_DELAY_S, 0
        else:
            self._refused = self._refused + 1 if code == entry_point.USAGE_ERROR else 0
        if self._refused >= GIVE_UP_AFTER:
            return None
        delay_s = min(self._next_s, self._max_delay_s)
        if seconds >= STARTED_AFTER_S:
            delay_s = min(delay_s, DOWN_SHARE * seconds)
        self._next_s = 2 * delay_s
        return delay_s
