"""Decide how many claimed jobs may wait in a worker for a free executor."""

from __future__ import annotations

import math
from typing import Final

SHORT_S: Final = 0.02
"""Seconds that handlers take at most if jobs are claimed ahead: a claim and a commit take 1 to
10 ms, so a longer handler gains nothing."""
EACH: Final = 32
"""How many jobs may wait for each slot, if no `batch` says otherwise."""
WAIT_S: Final = 0.5
"""Seconds for which a job that was claimed ahead waits for an executor; then it is handed back."""
TINY_S: Final = 0.005
"""Seconds that handlers take on the average if a job may wait in an executor behind the one that
runs: a longer one hides what it takes to send the next job."""
LONGEST_PAUSE: Final = 8
"""How many claims in a row, at most, must find all they look for until jobs are claimed ahead again
after the queue was empty. So in a chain, where one node can be claimed, one claim in nine looks for
more."""
ROUNDS: Final = 2
"""How often each slot has run a short handler before jobs are claimed ahead."""
_FOLLOW: Final = 0.1
"""Weight of the last time in the moving averages."""


class Window:
    """How many jobs to claim beyond the free executors: as many as end during one statement.

    A job that waits starts as soon as an executor is free, while the statement that records the
    results before it still runs.
    """

    def __init__(self, slots: int, most: int) -> None:
        """`most`: how many jobs may wait for each slot; 0: none."""
        self._slots = slots
        self._most = most
        self._short = 0
        """How many handlers ended since the last one that was not short."""
        self._handler_s: float | None = None
        self._statement_s = 0.002
        self._full = self._pause = 0
        """How many claims in a row found all they looked for, and how many must."""

    def ended(self, seconds: float) -> None:
        """Note how long a handler has run."""
        self._short = self._short + 1 if seconds <= SHORT_S else 0
        before = seconds if self._handler_s is None else self._handler_s
        self._handler_s = before + _FOLLOW * (seconds - before)

    def stated(self, seconds: float) -> None:
        """Note how long a statement took that recorded jobs."""
        self._statement_s += _FOLLOW * (seconds - self._statement_s)

    def reset(self) -> None:
        """Claim no job ahead until handlers have proved to be short again."""
        self._short = 0

    def claimed(self, found: int, wanted: int, *, ahead: bool) -> None:
        """Note a claim. To look for more jobs than there are takes longer than to claim one.

        `ahead`: whether some of those wanted were to wait.
        """
        if found < wanted:
            self._full = 0
            if ahead:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause + 1)
        else:
            self._full += 1
            if ahead:
                self._pause = 0

    @property
    def is_tiny(self) -> bool:
        """Return whether handlers take less than it takes to send a job to an executor."""
        own = self._handler_s
        return own is not None and own < TINY_S and self._short >= ROUNDS * self._slots

    @property
    def ahead(self) -> int:
        """Return how many claimed jobs may wait."""
        handler_s = self._handler_s
        if handler_s is None or self._short < ROUNDS * self._slots or self._full < self._pause:
            return 0
        during = math.ceil(self._slots * self._statement_s / max(handler_s, 1e-6))
        return min(during, self._slots * self._most)
