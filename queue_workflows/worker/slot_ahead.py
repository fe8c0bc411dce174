"""Decide how many jobs a worker with slots claims beyond its free executors."""

from __future__ import annotations

from typing import Final

SHORT_S: Final = 0.02
"""Seconds that the handlers of a queue take at most if jobs are claimed ahead: a claim and a commit
take 1 to 10 ms, so a longer handler gains nothing."""
WAIT_S: Final = 0.5
"""Seconds for which a job that was claimed ahead waits for an executor; then it is handed back."""
ROUNDS: Final = 2
"""How often each slot has run a short handler before jobs are claimed ahead."""


class Ahead:
    """How many jobs may wait for an executor: one for each slot, if all recent handlers were short.

    A job that waits starts as soon as an executor is free, while the statement that records the
    results before it still runs. So the results of all slots share that statement. With a `batch`
    so many jobs may wait for each slot, and as many are sent to its executor at once.
    """

    def __init__(self, slots: int, batch: int = 1) -> None:
        self._slots = slots
        self._batch = batch
        self._short = 0
        """How many handlers ended since the last one that was not short."""

    def ended(self, seconds: float) -> None:
        """Note how long a handler has run."""
        self._short = self._short + 1 if seconds <= SHORT_S else 0

    def reset(self) -> None:
        """Claim no job ahead until handlers have proved to be short again."""
        self._short = 0

    def room(self, waiting: int) -> int:
        """Return how many jobs to claim ahead if so many wait already."""
        return max(0, self._slots * self._batch - waiting) if self._are_short else 0

    @property
    def each(self) -> int:
        """Return how many jobs an executor may have at once."""
        return self._batch if self._are_short else 1

    @property
    def _are_short(self) -> bool:
        return self._short >= ROUNDS * self._slots
