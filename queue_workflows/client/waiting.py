"""Divide a wait for a run or job into requests that the service answers in time."""

from __future__ import annotations

import time

from queue_workflows import errors
from queue_workflows.client import calls


def left_s(deadline: float | None) -> float:
    """Return for how long the service is to wait, in seconds."""
    if deadline is None:
        return calls.WAIT_S
    return round(min(calls.WAIT_S, max(0.0, deadline - time.monotonic())), 3)


def check(deadline: float | None, what: str) -> None:
    """Raise `WaitTimeout` if the deadline has passed; `what` says which wait is over."""
    if deadline is not None and time.monotonic() >= deadline:
        raise errors.WaitTimeout(f"{what} after the time to wait")
