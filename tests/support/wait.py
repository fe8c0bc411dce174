"""Wait for a condition with a deadline; tests wait in no other way.

Deadlines are written for an idle machine. `slowness` times a fixed piece of work, before each test
and while it waits, and deadlines grow by that factor. So a busy machine makes no test fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_now = time.monotonic
"""Some tests put another clock into `time`."""
_WORK = range(300_000)
_IDLE_S = 0.015
"""How long the work takes on an idle core of a machine of 2023, rounded up."""
_MOST = 6.0
_EVERY_S = 2.0
_BETWEEN_S = 5.0
"""Between tests less often than while one waits: it would take a hundredth of the time of all."""
_KEPT_S = 60.0
_seen: deque[tuple[float, float]] = deque()
"""When the machine was measured in the last minute, and the factors."""


def slowness() -> float:
    """Return how much longer a fixed piece of work takes now than on an idle machine, 1 to 8."""
    begun = time.perf_counter()
    sum(number * number for number in _WORK)
    factor = min(_MOST, max(1.0, (time.perf_counter() - begun) / _IDLE_S))
    now = _now()
    _seen.append((now, factor))
    while _seen[0][0] < now - _KEPT_S:
        _seen.popleft()
    return factor


def measure() -> None:
    """Measure the machine, unless that was done in the last five seconds."""
    if not _seen or _now() - _seen[-1][0] >= _BETWEEN_S:
        slowness()


def _worst() -> float:
    """Return the greatest factor of the last minute."""
    return max((factor for _, factor in tuple(_seen)), default=1.0)


_at_start = slowness()


class Deadline:
    """A time limit of `timeout_s` seconds on an idle machine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._begun = self._measured = _now()
        self.factor = max(_at_start, _worst())

    def is_over(self) -> bool:
        """Return whether the time is over; measure the machine every two seconds and at the end."""
        now = _now()
        over = now - self._begun >= self._timeout_s * self.factor
        if over or now - self._measured >= _EVERY_S:
            self._measured = now
            self.factor = max(self.factor, slowness())
            over = now - self._begun >= self._timeout_s * self.factor
        return over


def patience(timeout_s: float) -> float:
    """Return a time limit for what takes one number of seconds, grown as `Deadline` grows."""
    return timeout_s * max(_at_start, slowness(), _worst())


def until(predicate: Callable[[], T], *, timeout_s: float = 30.0, every_s: float = 0.01) -> T:
    """Return the predicate's first true value; raise AssertionError after `timeout_s`."""
    deadline = Deadline(timeout_s)
    pause = threading.Event()
    while True:
        value = predicate()
        if value:
            return value
        if deadline.is_over():
            name = getattr(predicate, "__qualname__", repr(predicate))
            slow = f", times {deadline.factor:.1f} on this machine"
            raise AssertionError(f"not true within {timeout_s} s{slow}: {name}")
        pause.wait(every_s)
