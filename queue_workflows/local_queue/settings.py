"""Read how many threads an in-process queue has, and its delays."""

from __future__ import annotations

import logging
import math
import os
from typing import NamedTuple

from queue_workflows import config, errors

_log = logging.getLogger(__name__)
CORES_SHARE = 0.9
LEAST_WORKERS = 10
FETCH_EVERY_S = 60.0
MAX_ATTEMPTS = 3
_SWITCH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class Settings(NamedTuple):
    """Times in seconds; `timeout_s` None: a job has no limit of its own."""

    workers: int
    single_job: bool
    grace_s: float
    stagger_s: float
    cooldown_s: float
    fetch_every_s: float = FETCH_EVERY_S
    timeout_s: float | None = None
    max_attempts: int = MAX_ATTEMPTS


def read(
    *,
    workers: int | None,
    single_job: bool | None,
    grace_s: float | None,
    stagger_s: float | None,
    cooldown_s: float | None,
    fetch_every_s: float,
    timeout_s: float | None,
    max_attempts: int,
) -> Settings:
    """Return the settings, with the knobs for what is None.

    Raises `InvalidConfig` that names a value out of range.
    """
    found = Settings(
        default_workers() if workers is None else workers,
        _single_job() if single_job is None else single_job,
        config.MASTER_GRACE_PERIOD_SECONDS.read() if grace_s is None else grace_s,
        config.WORKER_STAGGER_SECONDS.read() if stagger_s is None else stagger_s,
        config.WORKER_COOLDOWN_SECONDS.read() if cooldown_s is None else cooldown_s,
        fetch_every_s,
        timeout_s,
        max_attempts,
    )
    for name in ("workers", "max_attempts"):
        if getattr(found, name) < 1:
            raise errors.InvalidConfig(f"{name}={getattr(found, name)!r}: it must be 1 or more")
    for name in ("grace_s", "stagger_s", "cooldown_s"):
        if not 0 <= getattr(found, name) < math.inf:
            raise errors.InvalidConfig(f"{name}={getattr(found, name)!r}: it must be 0 or more")
    for name in ("fetch_every_s", "timeout_s"):
        value = getattr(found, name)
        if value is not None and not 0 < value < math.inf:
            raise errors.InvalidConfig(f"{name}={value!r}: it must be more than 0")
    return found


def default_workers(cores: int | None = None) -> int:
    """Return 90 % of the cores that this process may use, at least 10."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(LEAST_WORKERS, int((cores or 1) * CORES_SHARE))


def _single_job() -> bool:
    text = config.WORKER_SINGLE_JOB_MODE.read()
    found = _SWITCH.get(text.strip().lower())
    if found is None:
        _log.warning("WORKER_SINGLE_JOB_MODE=%r is neither true nor false; using true", text)
    return found is not False
