"""Decide when a worker claims again after a claim that returned fewer jobs than it may."""

from __future__ import annotations

import math

from queue_workflows.claim import claims

PAUSE_FIRST_S = 0.01
PAUSE_MAX_S = 60.0


class ClaimTimes:
    """When to claim again after a claim that returned fewer jobs than it may.

    Many workers may wait for one job, and a due job may have to wait for its lock key. So after a
    claim that was sent because a job was due, and got none, the next such claim waits 10 ms, then
    20 ms, and so on up to 60 s. A claimed job, or none due soon, resets that.
    """

    def __init__(self) -> None:
        self._due_at = math.inf
        self._pause_s = 0.0

    def after(self, sent: float, now: float, wait: claims.Wait, *, claimed: bool) -> float:
        """Return when a limit admits the next job, or the next delayed one is due, or inf.

        `sent`: when the claim was sent; `wait`: the times that it returned.
        """
        was_due = sent >= self._due_at
        self._due_at = math.inf if wait.due_s is None else now + wait.due_s
        if claimed or self._due_at == math.inf:
            self._pause_s = 0.0
        elif was_due:
            self._pause_s = min(PAUSE_MAX_S, max(PAUSE_FIRST_S, 2 * self._pause_s))
        self._due_at = max(self._due_at, now + self._pause_s)
        return min(self._due_at, math.inf if wait.limit_s is None else now + wait.limit_s)
