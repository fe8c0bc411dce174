"""Clocks: one that a test sets, for whatever takes a `now_fn`, and that of the processes."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

T = TypeVar("T")


class Clock(Generic[T]):
    """It stands still until `now` is set: a datetime, or seconds of a monotonic clock."""

    def __init__(self, now: T) -> None:
        self.now = now

    def __call__(self) -> T:
        return self.now


def boot_s() -> float:
    """Return the seconds since the machine started, the same in every process; sleep counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
