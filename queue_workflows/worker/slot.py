"""Describe one queue that a worker process serves: its claimant and its claims in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable

from queue_workflows.engine import claims
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn
from queue_workflows.worker import claims_in_flight


class Slot:
    """One queue of a process: its claimant, its claims in flight, its number of handlers.

    `writing` is the lock that the slots of a process share, see `ClaimsInFlight.writing`.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        concurrency: int = 1,
        writing: threading.Lock | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self.who = who
        self.concurrency = concurrency
        self.in_flight = claims_in_flight.ClaimsInFlight(writing=writing, now_fn=now_fn)
