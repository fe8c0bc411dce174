"""Wait for a condition with a deadline; tests wait in no other way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(predicate: Callable[[], T], *, timeout_s: float = 30.0, every_s: float = 0.01) -> T:
    """Return the predicate's first true value; raise AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            name = getattr(predicate, "__qualname__", repr(predicate))
            raise AssertionError(f"not true within {timeout_s} s: {name}")
        pause.wait(every_s)
