"""A queue that a worker process serves, and the identity under which it claims there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from queue_workflows.engine import claims
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn
from queue_workflows.worker import held


class Lane:
    """One queue of a process: who claims there, what is held, how many bodies run at once.

    `writing` is shared by the lanes of a process: see `held.Held.writing`. `patient`: what waits
    for its turn does so for as long as it takes.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        concurrency: int = 1,
        writing: threading.Lock | None = None,
        patient: bool = False,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self.who = who
        self.concurrency = concurrency
        self.held = held.Held(writing=writing, patient=patient, now_fn=now_fn)
