"""A clock that a test sets, for whatever takes a `now_fn`."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Clock(Generic[T]):
    """It stands still until `now` is set: a datetime, or seconds of a monotonic clock."""

    def __init__(self, now: T) -> None:
        self.now = now

    def __call__(self) -> T:
        return self.now
