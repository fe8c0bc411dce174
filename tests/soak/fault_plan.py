"""Draw the plan of faults and load from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

KILL_EXECUTOR = "kill executor"
KILL_LAUNCHER = "kill launcher"
STOP_EXECUTOR = "stop executor"
OF_EXECUTORS = (KILL_EXECUTOR, KILL_LAUNCHER, STOP_EXECUTOR)
"""Faults that hit not the worker but a process below it, whose pid the fault then has."""
WEIGHTS = {
    "kill": 5, "stop": 5, "term": 2, "terminate": 3, "freeze": 4, "cut": 3, "off": 2, "restart": 1,
    KILL_EXECUTOR: 3, KILL_LAUNCHER: 1, STOP_EXECUTOR: 2,
}  # fmt: skip
FOCUS = 0.7
AT_WORK = 0.7
"""Share of the faults that hit a process at work, if there is one."""


class Plan(NamedTuple):
    """One planned fault: `share` picks the victim, `size` its length between least and most."""

    after_s: float
    kind: str
    share: float
    size: float
    focused: bool = False
    """It waits for a victim with a handler, and a lease, that it outlasts."""


def plan(seed: int, gap_s: float, focus: str | None = None) -> Callable[[], Plan]:
    """Yield the endless plan of a seed; most of it of the kind `focus`, if there is one.

    Those of the focus hit a process at work, and last.
    """
    rng = random.Random(seed)

    def following() -> Plan:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        share, size = rng.random(), rng.random()
        after_s = rng.uniform(0.5, 1.5) * gap_s
        if focus is not None and rng.random() < FOCUS:
            return Plan(after_s, focus, share * AT_WORK, 0.5 + size / 2, focused=True)
        return Plan(after_s, kind, share, size)

    return following
