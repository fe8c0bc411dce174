"""Pauses between claims at their longest."""

from __future__ import annotations

import pytest

from queue_workflows.claim import claims
from queue_workflows.worker import claim_times
from tests.support.clocks import Clock


def test_the_pause_doubles_up_to_a_minute() -> None:
    clock = Clock(100.0)
    times = claim_times.ClaimTimes()
    waits: list[float] = []
    for _ in range(17):
        at = times.after(clock.now, clock.now, claims.Wait(due_s=0.0), claimed=False)
        waits.append(at - clock.now)
        clock.now = at
    assert waits[1:] == pytest.approx([*(0.01 * 2**n for n in range(13)), 60.0, 60.0, 60.0])
