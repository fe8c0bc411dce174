"""Say how full the memory of this machine is, and who fills it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from psycopg.types.json import Jsonb

from queue_workflows.telemetry import pressure
from tests.support import factories


def throttle(
    ram: Callable[[], float | None] = lambda: None,
    *,
    now_fn: Callable[[], float] = time.monotonic,
) -> pressure.Throttle:
    """Return a throttle for a machine with so much RAM in use, in %; None: it is unknown."""
    return pressure.Throttle(lambda: pressure.Reading(ram=ram()), now_fn=now_fn)


def ram_in_use() -> float:
    """Return how much of the RAM of this process's machine or cgroup is in use, in %."""
    return pressure.Memory().read().ram or 100.0


def other_worker(conn: Any) -> None:
    """Insert a worker `other`, of this machine, that has a job."""
    memory = pressure.Memory()
    memory.read()
    factories.insert(
        conn, "workers", worker_id="other", host_label="box", queue="load", pid=7, state="busy",
        job_ids=["j"], detail=Jsonb({"memory": pressure.ids(memory.within)}),
    )  # fmt: skip
