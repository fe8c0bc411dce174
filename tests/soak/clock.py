"""Convert database times to the machine's monotonic clock."""

from __future__ import annotations

import statistics
import threading
import time

from queue_workflows import db
from tests.soak import background

_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8 AS t"


class Clock:
    """Turns the database's epoch seconds into monotonic seconds; both run on this machine."""

    def __init__(self) -> None:
        offsets = [self._measure() for _ in range(9)]
        self.offset = statistics.median(offsets)

    @staticmethod
    def _measure() -> float:
        with db.connection() as conn:
            before = time.monotonic()
            row = conn.execute(_NOW).fetchone()
            assert row is not None
            return row["t"] - (before + time.monotonic()) / 2

    def at(self, epoch: float) -> float:
        """Return the monotonic instant of the database's epoch seconds."""
        return epoch - self.offset


class Stalls(background.BackgroundThread):
    """Notes when the machine itself stood still, which excuses what no process could help."""

    EVERY_S = 0.05
    LONG_S = 1.0

    def __init__(self) -> None:
        super().__init__("stalls")
        self.found: list[tuple[float, float]] = []

    def go(self, stop: threading.Event) -> None:
        last = time.monotonic()
        while not stop.wait(self.EVERY_S):
            now = time.monotonic()
            if now - last > self.LONG_S:
                self.found.append((last, now))
            last = now
