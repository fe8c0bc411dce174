"""Decide how many jobs a worker with slots claims beyond its free executors."""

from __future__ import annotations

from typing import Final

SHORT_S: Final = 0.02
"""Seconds that the handlers of a queue take at most if jobs are claimed ahead: a claim and a commit
take 1 to 10 ms, so a longer handler gains nothing."""
TINY_S: Final = 0.001
"""Seconds that handlers stay under if more than one job for each slot is claimed ahead."""
TINY: Final = 32
"""How many tiny jobs may wait in a worker: half of them run while a statement records as many. In a
statement about 16 jobs each costs the database half of what it costs in one about 4."""
TINY_EACH: Final = 16
"""How many of them may wait for each slot, if that is more: four slots record 32 in a statement."""
COLLECT_S: Final = 0.005
"""Longest time in seconds for which the result of a tiny job waits for those of others, from the
end of the statement before on."""
WAIT_S: Final = 0.5
"""Seconds for which a job that was claimed ahead waits for an executor; then it is handed back."""
LONGEST_PAUSE: Final = 8
"""How many claims in a row, at most, must find all they look for until jobs are claimed ahead again
after the queue was empty. So in a chain, where one node can be claimed, one claim in nine looks for
more."""
ROUNDS: Final = 2
"""How often each slot has run a short handler before jobs are claimed ahead."""


class Ahead:
    """How many jobs may wait for an executor: one for each slot, if all recent handlers were short.

    A job that waits starts as soon as an executor is free, while the statement that records the
    results before it still runs. So the results of all slots share that statement. If all recent
    handlers were tiny, `TINY` jobs may wait, or more with many slots, and their results share a
    statement too.
    With a `batch` so many jobs may wait for each slot, and as many are sent to its executor at
    once.
    """

    def __init__(self, slots: int, batch: int = 1, *, collects: bool = True) -> None:
        """`collects`: whether a result may wait for those of others."""
        self._collects = collects
        self._slots = slots
        self._batch = batch
        self._short = self._tiny = 0
        """How many handlers ended since the last one that was not short, or not tiny."""
        self._full = self._pause = 0
        """How many claims in a row found all they looked for, and how many must."""

    def ended(self, seconds: float) -> None:
        """Note how long a handler has run."""
        self._short = self._short + 1 if seconds <= SHORT_S else 0
        self._tiny = self._tiny + 1 if seconds < TINY_S else 0

    def reset(self) -> None:
        """Claim no job ahead until handlers have proved to be short again."""
        self._short = self._tiny = 0

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

    def room(self, waiting: int) -> int:
        """Return how many jobs to claim ahead if so many wait already."""
        if self._short < self._enough or self._full < self._pause:
            return 0
        tiny = self._tiny_jobs if self.are_tiny else 0
        return max(0, max(tiny, self._slots * self._batch) - waiting)

    @property
    def each(self) -> int:
        """Return how many jobs an executor may have at once."""
        return self._batch if self._short >= self._enough else 1

    def suffice(self, waiting: int) -> bool:
        """Return whether so many tiny jobs wait that no statement need claim more now."""
        return self.are_tiny and waiting > self._tiny_jobs // 2

    @property
    def are_tiny(self) -> bool:
        """Return whether all recent handlers were tiny."""
        return self._collects and self._tiny >= self._enough

    @property
    def _tiny_jobs(self) -> int:
        return max(TINY, self._slots * TINY_EACH)

    @property
    def _enough(self) -> int:
        return ROUNDS * self._slots
