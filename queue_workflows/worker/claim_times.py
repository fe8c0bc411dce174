"""Decide when a worker claims again after a claim that returned fewer jobs than it may."""

from __future__ import annotations

import math

from queue_workflows.claim import claims

PAUSE_FIRST_S = 0.01
PAUSE_MAX_S = 60.0


class ClaimTimes:
    """When to claim again after a claim that returned fewer jobs than it may.

    Other workers may have taken a due job, or its lock key may be in use. So if a claim was sent
    because a job was due, but got none, the next such claim waits 10 ms, then 20 ms, and so on up
    to 60 s. The pause starts over once a job is claimed, or no delayed job is due soon. A job that
    a limit admits now is due as well.
    """

    def __init__(self) -> None:
        self._due_at = math.inf
        self._pause_s = 0.0

    def after(self, sent: float, now: float, wait: claims.Wait, *, claimed: bool) -> float:
        """Return the earlier time at which a limit admits a job or a delayed job is due, else inf.

        `sent` is when the claim was sent, `wait` has the waiting times that it returned.
        """
        was_due = sent >= self._due_at
        due_s = 0.0 if wait.limit_s == 0.0 else wait.due_s
        self._due_at = math.inf if due_s is None else now + due_s
        if claimed or self._due_at == math.inf:
            self._pause_s = 0.0
        elif was_due:
            self._pause_s = min(PAUSE_MAX_S, max(PAUSE_FIRST_S, 2 * self._pause_s))
        self._due_at = max(self._due_at, now + self._pause_s)
        return min(self._due_at, now + (wait.limit_s or math.inf))
