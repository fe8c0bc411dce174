"""Decide when a worker claims again after a claim that returned fewer jobs than it may."""

from __future__ import annotations

import math
import time

from queue_workflows.claim import claims
from queue_workflows.types import NowFn

PAUSE_FIRST_S = 0.01
PAUSE_MAX_S = 60.0


class ClaimTimes:
    """When a limit admits the next job, and when the next delayed one is due.

    Many workers may wait for one job, and a due job may have to wait for its lock key. So after a
    claim that was sent because a job was due, and got none, the next such claim waits 10 ms, then
    20 ms, and so on up to 60 s. A claimed job, or none due soon, resets that. The owner polls
    meanwhile.
    """

    def __init__(self, now_fn: NowFn = time.monotonic) -> None:
        self._now = now_fn
        self._limit_at = self._due_at = math.inf
        self._pause_s = 0.0
        self._was_due = False

    @property
    def wait_s(self) -> float:
        """Return the seconds until the next claim has a reason, 0.0 or more; inf: none is known."""
        return max(0.0, min(self._limit_at, self._due_at) - self._now())

    def begin(self) -> None:
        """Note that a claim is sent: the times of the last one no longer count."""
        self._was_due = self._now() >= self._due_at
        self._limit_at = self._due_at = math.inf

    def forget(self) -> None:
        """Forget the times that the last claim returned."""
        self._limit_at = self._due_at = math.inf

    def end(self, wait: claims.Wait, *, claimed: bool) -> None:
        """Note that the claim has ended, with these times, and whether it returned a job."""
        now = self._now()
        if wait.limit_s is not None:
            self._limit_at = now + wait.limit_s
        if wait.due_s is not None:
            self._due_at = now + wait.due_s
        if claimed or self._due_at == math.inf:
            self._pause_s = 0.0
        elif self._was_due:
            self._pause_s = min(PAUSE_MAX_S, max(PAUSE_FIRST_S, 2 * self._pause_s))
        self._due_at = max(self._due_at, now + self._pause_s)
