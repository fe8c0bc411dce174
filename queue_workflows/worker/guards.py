"""Guards as pure rules over a clock: they say when to trip, and do nothing themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from queue_workflows import config
from queue_workflows.dag import policy
from queue_workflows.types import Row

if TYPE_CHECKING:
    from queue_workflows.telemetry.gpu_health import Sample

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

SAMPLE_S = 30.0
"""Longest time between two samples of the GPU health guard; a tenth of its window if shorter."""
MIN_IDLE_SAMPLES = 3
"""In a window, however short the knobs make it."""
STATIC_RAM_MB = 32.0
"""RAM that may move while a stall is confirmed, which takes seconds: a load moves more."""
FROZEN_S = 5.0
"""A guard that was not asked for so long may have been frozen with its job: that proves nothing."""


class Trip(NamedTuple):
    """A guard's verdict: the worker must end with this code, and why."""

    code: int
    event: str
    reason: str


class Guard(Protocol):
    """One rule about one claim.

    Its methods may run in a thread each: an attribute is written by one of them alone, and what
    belongs together is one value.
    """

    def beat(self, now: float) -> None:
        """The body showed life."""
        ...

    def wants_sample(self, now: float) -> bool:
        """Whether a sample is due."""
        ...

    def sample(self, now: float, found: Sample) -> None:
        """A sample that was begun at `now`, wanted or not."""
        ...

    def check(self, now: float) -> Trip | None:
        """The verdict at `now`, or None."""
        ...


class _Clock:
    """The part of a guard that only looks at the time."""

    def beat(self, now: float) -> None:  # noqa: ARG002  the clock runs whatever the body says
        return

    def wants_sample(self, now: float) -> bool:  # noqa: ARG002
        return False

    def sample(self, now: float, found: Sample) -> None:  # noqa: ARG002
        return


class Budget(_Clock):
    """Trips once the job has run for its wall-clock budget."""

    def __init__(self, started: float, budget_s: float) -> None:
        self.ends = started + budget_s
        self._budget_s = budget_s

    def check(self, now: float) -> Trip | None:
        if now < self.ends:
            return None
        return Trip(
            EXIT_BUDGET, "budget_trip", f"ran longer than its budget of {self._budget_s:g} s"
        )


class LeaseEnd(_Clock):
    """Trips when the lease is about to lapse on the server because it could not be renewed."""

    MARGIN_S = 2.0

    def __init__(self, renewed: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self.ends = renewed + lease_s

    def beat(self, now: float) -> None:
        """The lease was renewed by a statement that was sent at `now`."""
        self.ends = now + self._lease_s

    def check(self, now: float) -> Trip | None:
        if now < self.ends - min(self.MARGIN_S, self._lease_s / 4):
            return None
        return Trip(EXIT_LOST, "reassigned", "the lease could not be renewed in time")


class _Idle(NamedTuple):
    """Samples that showed nothing but idleness, from the last life to the last of them."""

    since: float
    until: float
    samples: int


class GpuHealth:
    """Trips when the GPU stayed idle and RAM still for a whole window of known samples.

    The window starts anew with a beat, a busy sample, RAM that moved, or a gap between known
    samples. Until the first beat it is as long as a cold load may take. The time that gaps make up
    counts against the wall-clock budget instead, so that a job no probe can see is bounded too.
    """

    def __init__(self, started: float, budget_s: float) -> None:
        self._budget_s = budget_s
        self._idle_pct = config.GPU_IDLE_PCT.read()
        self._ram_delta_mb = config.GPU_HEALTH_RAM_DELTA_MB.read()
        self._load_s = config.GPU_HEALTH_LOAD_GRACE_S.read()
        self._beat_s = config.GPU_HEALTH_INTERVAL_S.read()
        self._beaten: float | None = None
        self._idle = _Idle(started, started, 0)
        self._seen = self._tried = started
        self._unseen_s = 0.0
        self._ram_mb: float | None = None
        self._low_mb: float | None = None
        self._high_mb: float | None = None

    def beat(self, now: float) -> None:
        self._beaten = now

    def wants_sample(self, now: float) -> bool:
        since, window_s = self._window()
        return now - self._tried >= _interval(window_s) or self._tried < since + window_s <= now

    def sample(self, now: float, found: Sample) -> None:
        self._tried = now
        busy = found.gpu_pct is not None and found.gpu_pct > self._idle_pct
        if not busy and None in found:
            return
        unseen_s, self._seen = self._gap(now), now
        self._unseen_s += unseen_s
        idle = self._idle
        since, _ = self._window()
        if since > idle.since:
            idle = self._begin(since)
        moved = self._has_moved(found.ram_mb)
        if busy or unseen_s or moved:
            idle = self._begin(now)
        self._idle = idle if busy else _Idle(idle.since, now, idle.samples + 1)

    def check(self, now: float) -> Trip | None:
        idle = self._idle
        since, window_s = self._window()
        if idle.samples >= MIN_IDLE_SAMPLES and idle.until - since >= window_s:
            return Trip(
                EXIT_GPU_HEALTH,
                "gpu_health_trip",
                f"for {idle.until - since:.0f} s the GPU was used {self._idle_pct:g} % or less "
                f"and RAM moved {self._ram_delta_mb:g} MB or less",
            )
        if self._unseen_s + self._gap(now) >= self._budget_s:
            return Trip(
                EXIT_BUDGET,
                "budget_trip",
                f"ran longer than its budget of {self._budget_s:g} s without a sample of the GPU",
            )
        return None

    def is_blind(self, now: float) -> bool:
        """Whether there is no probe to go by, so that the wall-clock budget runs."""
        return self._gap(now) > 0

    def _window(self) -> tuple[float, float]:
        """When the window began, and its length in seconds."""
        beaten, since = self._beaten, self._idle.since
        if beaten is None:
            return since, self._load_s
        return max(since, beaten), self._beat_s

    def _begin(self, now: float) -> _Idle:
        """A new window, with the RAM of the latest sample."""
        self._low_mb = self._high_mb = self._ram_mb
        return _Idle(now, now, 0)

    def _has_moved(self, ram_mb: float | None) -> bool:
        if ram_mb is None:
            return False
        self._ram_mb = ram_mb
        self._low_mb = ram_mb if self._low_mb is None else min(self._low_mb, ram_mb)
        self._high_mb = ram_mb if self._high_mb is None else max(self._high_mb, ram_mb)
        return self._high_mb - self._low_mb > self._ram_delta_mb

    def _gap(self, now: float) -> float:
        """Seconds since the last known sample, when they are too many to bridge; else 0."""
        gap = now - self._seen
        return gap if gap > max(FROZEN_S, 3 * _interval(self._window()[1])) else 0.0


class Stall:
    """Trips when a body that used to beat is silent, and samples confirm that nothing moves.

    Asleep until the first beat, so a body that takes no `status_callback` is never policed. A
    sample that does not confirm calls the suspicion off for as long as a beat would.
    """

    def __init__(self, started: float) -> None:
        self._timeout_s = config.STALL_TIMEOUT_S.read()
        self._samples = config.STALL_CONFIRM_SAMPLES.read()
        self._poll_s = config.STALL_CONFIRM_POLL_S.read()
        self._idle_pct = config.GPU_IDLE_PCT.read()
        self._beaten: float | None = None
        self._looked = self._resumed = self._denied = started
        self._told: float | None = None
        self._confirmed_for: float | None = None
        self._confirmed = 0
        self._tried = float("-inf")
        self._ram_mb = 0.0

    def beat(self, now: float) -> None:
        self._beaten = now

    def wants_sample(self, now: float) -> bool:
        return self._silent_since(now) is not None and now - self._tried >= self._poll_s

    def sample(self, now: float, found: Sample) -> None:
        since = self._silent_since(now)
        if since is None:
            return
        if since != self._confirmed_for:
            self._confirmed, self._ram_mb = 0, found.ram_mb or 0.0
            self._tried = float("-inf")
            self._confirmed_for = since  # last, for a check beside this
        if not self._is_still(found):
            self._denied = self._tried = now
        elif now - self._tried >= self._poll_s:
            self._tried = now
            self._confirmed += 1

    def check(self, now: float) -> Trip | None:
        if now - self._looked > max(FROZEN_S, self._timeout_s / 4):
            self._resumed = now
        self._looked = now
        since = self._silent_since(now)
        if since is None or since != self._confirmed_for or self._confirmed < self._samples:
            return None
        return Trip(
            EXIT_STALL,
            "stall_trip",
            f"no beat for {now - (self._beaten or since):.0f} s, and the GPU and RAM stood still",
        )

    def suspicion(self, now: float) -> str | None:
        """Why a stall is suspected, said once for each silence; None otherwise."""
        beaten = self._beaten
        if beaten is None or beaten == self._told:
            return None
        silent_s = now - max(beaten, self._resumed)
        if silent_s < self._timeout_s:
            return None
        self._told = beaten
        return f"no beat for {silent_s:.0f} s"

    def _silent_since(self, now: float) -> float | None:
        """Since when, if a stall is suspected."""
        beaten = self._beaten
        if beaten is None:
            return None
        since = max(beaten, self._resumed, self._denied)
        return since if now - since >= self._timeout_s else None

    def _is_still(self, found: Sample) -> bool:
        return (
            found.gpu_pct is not None
            and found.ram_mb is not None
            and found.gpu_pct <= self._idle_pct
            and abs(found.ram_mb - self._ram_mb) <= STATIC_RAM_MB
        )


def snapshot(guards: Iterable[Guard]) -> list[tuple[str, dict[str, Any]]]:
    """Those that go by samples, as JSON values of which `revive` makes them, in another process."""
    return [(type(g).__name__, {**vars(g)}) for g in guards if isinstance(g, GpuHealth | Stall)]


def revive(states: Iterable[tuple[str, dict[str, Any]]]) -> list[Guard]:
    """The guards of a snapshot, to be carried on from where they were."""
    found: list[Guard] = []
    for name, state in states:
        kind = {"GpuHealth": GpuHealth, "Stall": Stall}[name]
        guard = kind.__new__(kind)
        vars(guard).update(state)
        if isinstance(guard, GpuHealth):
            vars(guard)["_idle"] = _Idle(*state["_idle"])
        found.append(guard)
    return found


def _interval(window_s: float) -> float:
    """Seconds between samples."""
    return min(SAMPLE_S, window_s / 10)


def budget_for(job: Row) -> float:
    """A job's wall-clock budget in seconds: its own `timeout_s`, else its task's, else by kind."""
    if (own_s := _own_s(job)) is not None:
        return own_s
    cfg = config.get_config()
    queue = job["queue"]
    if _is_ingest(job):
        task = cfg.ingest_task_policies.get(job.get("task_name", ""), {})
        if "timeout_s" in task:
            return float(task["timeout_s"])
        return INGEST_S.get(queue, float(cfg.ingest_default_budget_s))
    if _is_input(job):
        return INPUT_S
    if queue == "gpu":
        return VIDEO_S if _is_video(job) else GPU_S
    return CPU_S


def _own_s(job: Row) -> float | None:
    """The `timeout_s` of its row; None for none, and for what is none: SQL may say NaN, or -1."""
    # A node's row comes as JSON, where NaN and infinity are texts.
    said = float(job.get("timeout_s") or 0.0)
    return min(said, policy.MAX_WAIT_S) if said > 0 else None


def guards_for(job: Row, started: float) -> list[Guard]:
    """The guards of a job claimed now, but for its lease's.

    The clock polices all but gpu nodes: those are judged by what they do, and by the clock only if
    they have a `timeout_s` of their own, or for as long as no probe sees what they do.
    """
    budget_s = budget_for(job)
    if _is_ingest(job) or job["queue"] != "gpu" or _is_input(job):
        return [Budget(started, budget_s)]
    guards: list[Guard] = [GpuHealth(started, budget_s)]
    if _own_s(job) is not None:
        guards.append(Budget(started, budget_s))
    if not _is_video(job):
        guards.append(Stall(started))
    return guards


def _is_ingest(job: Row) -> bool:
    return "task_name" in job or job["queue"] not in config.DAG_QUEUES


def _is_input(job: Row) -> bool:
    return str(job.get("node_module")).startswith("__input__")


def _is_video(job: Row) -> bool:
    return job.get("required_model") in config.get_config().video_model_ids
