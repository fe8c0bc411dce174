"""Choose the guards of a job, which are pure rules about when the worker has to stop it.

Its length: all these rules are here, so that one place shows the reasons to stop a job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from queue_workflows import config
from queue_workflows.dag import policy
from queue_workflows.runtime import exit_codes
from queue_workflows.types import Row

if TYPE_CHECKING:
    from queue_workflows.telemetry.worker_usage import Sample

STALL_TIMEOUT_S = 120.0
"""Seconds without a beat of the handler after which a stall is suspected."""
SAMPLE_S = 30.0
"""Longest time in seconds between two GPU samples; a tenth of the window if that is shorter."""
MIN_IDLE_SAMPLES = 3
"""Smallest number of samples in a window, however short the settings make it."""
STATIC_RAM_MB = 32.0
"""RAM change in MB that still counts as no activity; loading a model changes more."""
FROZEN_S = 5.0
"""Seconds without a check after which the whole worker, and so the job, may have been frozen."""

GPU_S = 8100.0
VIDEO_S = 1800.0
CPU_S = 2100.0
INPUT_S = 120.0
INGEST_S = {"fetch": 7200.0, "load": 3600.0}
"""Wall-clock budgets in seconds of these ingest queues."""


class Failure(NamedTuple):
    """Why a guard stops a job, with the worker's exit code, the event type and a text."""

    code: int
    event: str
    reason: str


class Guard:
    """The base of the rules about a claim; by default beats and samples change nothing."""

    def beat(self, now: float) -> None:
        """Note that the handler showed activity."""

    def wants_sample(self, now: float) -> bool:  # noqa: ARG002
        """Return whether a sample is due."""
        return False

    def sample(self, now: float, found: Sample) -> None:
        """Note a sample that was started at `now`, whether it was due or not."""

    def check(self, now: float) -> Failure | None:
        """Return the failure if the job has to be stopped at `now`, else None."""
        raise NotImplementedError


class Budget(Guard):
    """Fail a job that has run for its wall-clock budget."""

    def __init__(self, started: float, budget_s: float) -> None:
        self.ends = started + budget_s
        self.budget_s = budget_s

    def check(self, now: float) -> Failure | None:
        if now < self.ends:
            return None
        return Failure(
            exit_codes.BUDGET, "budget_trip", f"ran longer than its budget of {self.budget_s:g} s"
        )


class LeaseEnd(Guard):
    """Fail a job whose lease is about to expire on the server because it could not be renewed."""

    MARGIN_S = 2.0

    def __init__(self, renewed: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self.ends = renewed + lease_s

    def beat(self, now: float) -> None:
        """Note that the lease was renewed by a statement sent at `now`."""
        self.ends = max(self.ends, now + self._lease_s)

    def check(self, now: float) -> Failure | None:
        if now < self.ends - min(self.MARGIN_S, self._lease_s / 4):
            return None
        return Failure(exit_codes.LOST, "reassigned", "the lease could not be renewed in time")


class GpuHealth(Guard):
    """Fail a job whose GPU was idle, and whose RAM stayed the same, during a window of samples.

    A beat, a busy sample, a change of RAM, or a gap between known samples starts a new window.
    Until the first beat the window is as long as a cold load may take. Gaps count against the
    wall-clock budget, so that a job is bounded even if the GPU's use is never known.
    """

    def __init__(self, started: float, budget_s: float) -> None:
        self.budget_s = budget_s
        self._idle_pct = config.GPU_IDLE_PCT.read()
        self._ram_delta_mb = config.GPU_HEALTH_RAM_DELTA_MB.read()
        self._load_s = config.GPU_HEALTH_LOAD_GRACE_S.read()
        self._beat_s = config.GPU_HEALTH_INTERVAL_S.read()
        self._beaten: float | None = None
        self._since = self._until = started
        """When the window began, and when its last idle sample was taken."""
        self._samples = 0
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
        since, _ = self._window()
        if since > self._since:
            self._begin(since)
        moved = found.ram_mb is not None and self._has_moved(found.ram_mb)
        if busy or unseen_s or moved:
            self._begin(now)
        if not busy:
            self._until = now
            self._samples += 1

    def check(self, now: float) -> Failure | None:
        since, window_s = self._window()
        idle_s = self._until - since
        if self._samples >= MIN_IDLE_SAMPLES and idle_s >= window_s:
            return Failure(
                exit_codes.GPU_HEALTH,
                "gpu_health_trip",
                f"for {idle_s:.0f} s the GPU was used {self._idle_pct:g} % or less "
                f"and RAM changed by {self._ram_delta_mb:g} MB or less",
            )
        if self._unseen_s + self._gap(now) >= self.budget_s:
            return Failure(
                exit_codes.BUDGET,
                "budget_trip",
                f"ran longer than its budget of {self.budget_s:g} s without a sample of the GPU",
            )
        return None

    def is_blind(self, now: float) -> bool:
        """Return whether the GPU's use is unknown, so that the wall-clock budget counts."""
        return self._gap(now) > 0

    def _window(self) -> tuple[float, float]:
        """Return when the window began, and its length in seconds."""
        if self._beaten is None:
            return self._since, self._load_s
        return max(self._since, self._beaten), self._beat_s

    def _begin(self, now: float) -> None:
        """Begin a new window with the RAM of the latest sample."""
        self._low_mb = self._high_mb = self._ram_mb
        self._since, self._until, self._samples = now, now, 0

    def _has_moved(self, ram_mb: float) -> bool:
        self._ram_mb = ram_mb
        self._low_mb = ram_mb if self._low_mb is None else min(self._low_mb, ram_mb)
        self._high_mb = ram_mb if self._high_mb is None else max(self._high_mb, ram_mb)
        return self._high_mb - self._low_mb > self._ram_delta_mb

    def _gap(self, now: float) -> float:
        """Return the seconds since the last known sample if that gap is too long, else 0."""
        gap = now - self._seen
        return gap if gap > max(FROZEN_S, 3 * _interval(self._window()[1])) else 0.0


class Stall(Guard):
    """Fail a job that stopped beating, once samples confirm that GPU and RAM do not change.

    The guard is inactive until the first beat, so a handler without `status_callback` never stalls.
    A sample that shows activity resets the suspicion as a beat would.
    """

    def __init__(self, started: float) -> None:
        self._timeout_s = STALL_TIMEOUT_S
        self._samples = config.STALL_CONFIRM_SAMPLES.read()
        self._poll_s = config.STALL_CONFIRM_POLL_S.read()
        self._idle_pct = config.GPU_IDLE_PCT.read()
        self._beaten: float | None = None
        self._looked = self._resumed = self._denied = started
        self._reported: float | None = None
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
            self._confirmed_for = since
        if not self._is_still(found):
            self._denied = self._tried = now
        elif now - self._tried >= self._poll_s:
            self._tried = now
            self._confirmed += 1

    def check(self, now: float) -> Failure | None:
        if now - self._looked > max(FROZEN_S, self._timeout_s / 4):
            self._resumed = now
        self._looked = now
        since = self._silent_since(now)
        if since is None or since != self._confirmed_for or self._confirmed < self._samples:
            return None
        return Failure(
            exit_codes.STALL,
            "stall_trip",
            f"no beat for {now - (self._beaten or since):.0f} s, and GPU and RAM did not change",
        )

    def suspicion(self, now: float) -> str | None:
        """Return why a stall is suspected, once per period without a beat, else None."""
        beaten = self._beaten
        if beaten is None or beaten == self._reported:
            return None
        silent_s = now - max(beaten, self._resumed)
        if silent_s < self._timeout_s:
            return None
        self._reported = beaten
        return f"no beat for {silent_s:.0f} s"

    def _silent_since(self, now: float) -> float | None:
        """Return since when a stall is suspected, or None."""
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


def _interval(window_s: float) -> float:
    """Return the seconds between samples."""
    return min(SAMPLE_S, window_s / 10)


def budget_for(job: Row) -> float:
    """Return the budget in seconds from a job's `timeout_s`, else its task, else its kind."""
    # A node's row comes as JSON, in which NaN and infinity are strings. Plain SQL may write these
    # or -1; they mean no limit of its own.
    own_s = float(job.get("timeout_s") or 0.0)
    if own_s > 0:
        return min(own_s, policy.MAX_WAIT_S)
    cfg, queue, kind = config.get_config(), job["queue"], _kind(job)
    if kind == "ingest":
        task = cfg.ingest_task_policies.get(job.get("task_name", ""), {})
        if "timeout_s" in task:
            return float(task["timeout_s"])
        return INGEST_S.get(queue, float(cfg.ingest_default_budget_s))
    return {"input": INPUT_S, "video": VIDEO_S, "gpu": GPU_S}.get(kind, CPU_S)


def guards_for(job: Row, started: float) -> list[Guard]:
    """Return the guards of a job whose handler starts, except `LeaseEnd`.

    Every job but a gpu node has a wall-clock budget. A gpu node is checked by its activity; its
    budget counts only if it has a `timeout_s`, or while the GPU's use is unknown.
    """
    budget_s, kind = budget_for(job), _kind(job)
    if kind not in ("gpu", "video"):
        return [Budget(started, budget_s)]
    found: list[Guard] = [GpuHealth(started, budget_s)]
    if float(job.get("timeout_s") or 0.0) > 0:
        found.append(Budget(started, budget_s))
    if kind != "video":
        found.append(Stall(started))
    return found


def _kind(job: Row) -> str:
    """Return `ingest`, `input` or `video`, else the queue of a node."""
    queue = job["queue"]
    if "task_name" in job or queue not in config.DAG_QUEUES:
        return "ingest"
    if str(job.get("node_module")).startswith("__input__"):
        return "input"
    is_video = job.get("required_model") in config.get_config().video_model_ids
    return "video" if queue == "gpu" and is_video else queue
