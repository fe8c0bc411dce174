"""Guards as pure rules over a monotonic clock: they say when to trip, and do nothing themselves."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from queue_workflows import config
from queue_workflows.types import Row

EXIT_BUDGET = 75
EXIT_STALL = 76
EXIT_LOST = 77
EXIT_GPU_HEALTH = 78
EXIT_CONTROL = 79

GPU_S = 8100.0
VIDEO_S = 1800.0
CPU_S = 2100.0
INPUT_S = 120.0
INGEST_S = {"fetch": 7200.0, "load": 3600.0}
"""Wall-clock budgets in seconds (the contract's figures)."""


class Trip(NamedTuple):
    """A guard's verdict: the worker must end with this code, and why."""

    code: int
    event: str
    reason: str


class Guard(Protocol):
    """One rule about one claim."""

    def beat(self, now: float) -> None:
        """The body showed life."""
        ...

    def check(self, now: float) -> Trip | None:
        """The verdict at `now`, or None."""
        ...


class Budget:
    """Trips once the job has run for its wall-clock budget."""

    def __init__(self, started: float, budget_s: float) -> None:
        self._ends = started + budget_s
        self._budget_s = budget_s

    def beat(self, now: float) -> None:  # noqa: ARG002  the clock runs whatever the body says
        return

    def check(self, now: float) -> Trip | None:
        if now < self._ends:
            return None
        return Trip(
            EXIT_BUDGET, "budget_trip", f"ran longer than its budget of {self._budget_s:g} s"
        )


class LeaseEnd:
    """Trips when the lease is about to lapse on the server because it could not be renewed."""

    MARGIN_S = 2.0

    def __init__(self, renewed: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self._ends = renewed + lease_s

    def beat(self, now: float) -> None:
        """The lease was renewed by a statement that was sent at `now`."""
        self._ends = now + self._lease_s

    def check(self, now: float) -> Trip | None:
        if now < self._ends - min(self.MARGIN_S, self._lease_s / 4):
            return None
        return Trip(EXIT_LOST, "reassigned", "the lease could not be renewed in time")


def budget_for(job: Row) -> float:
    """A job's wall-clock budget in seconds: its own `timeout_s`, else by queue, model and kind."""
    if job.get("timeout_s"):
        return float(job["timeout_s"])
    cfg = config.get_config()
    queue = job["queue"]
    if "node_module" not in job:
        return INGEST_S.get(queue, float(cfg.ingest_default_budget_s))
    if str(job["node_module"]).startswith("__input__"):
        return INPUT_S
    if queue == "gpu":
        return VIDEO_S if job.get("required_model") in cfg.video_model_ids else GPU_S
    return CPU_S
