"""Read the settings of an in-process queue: its threads, delays, time limit and attempts."""

from __future__ import annotations

import inspect
import logging
import math
import os
from typing import Any, NamedTuple, cast

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
    """Times in seconds; `timeout_s` None: jobs may take as long as they like."""

    workers: int
    single_job: bool
    grace_s: float
    stagger_s: float
    cooldown_s: float
    fetch_every_s: float = FETCH_EVERY_S
    timeout_s: float | None = None
    max_attempts: int = MAX_ATTEMPTS


def read(
    workers: int | None,
    single_job: bool | None,
    grace_s: float | None,
    stagger_s: float | None,
    cooldown_s: float | None,
    *more: Any,
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
        *more,
    )
    for name in ("workers", "max_attempts"):
        if type(getattr(found, name)) is not int or getattr(found, name) < 1:
            raise _refused(found, name, "a whole number from 1")
    for name in ("grace_s", "stagger_s", "cooldown_s"):
        if not 0 <= _number(found, name) < math.inf:
            raise _refused(found, name, "a number of seconds from 0")
    for name in ("fetch_every_s", "timeout_s"):
        if name == "timeout_s" and found.timeout_s is None:
            continue
        if not 0 < _number(found, name) < math.inf:
            raise _refused(found, name, "a number of seconds above 0")
    if not isinstance(cast("object", found.single_job), bool):
        raise _refused(found, "single_job", "True or False")
    return found


def _number(found: Settings, name: str) -> float:
    """Return a setting; NaN, which is within no range, if it is not a number."""
    value = getattr(found, name)
    return value if type(value) in (int, float) else math.nan


def _refused(found: Settings, name: str, what: str) -> errors.InvalidConfig:
    knob = {
        "grace_s": config.MASTER_GRACE_PERIOD_SECONDS,
        "stagger_s": config.WORKER_STAGGER_SECONDS,
        "cooldown_s": config.WORKER_COOLDOWN_SECONDS,
    }.get(name)
    variable = f" (argument, or variable {knob.name})" if knob else ""
    return errors.InvalidConfig(f"{name}={getattr(found, name)!r}{variable}: it must be {what}")


def check_function(execute: Any) -> None:
    """Raise `InvalidConfig` for a function whose result would have to be run."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in (execute, type(execute).__call__)):
        raise errors.InvalidConfig(
            f"execute={execute!r}: async functions and generators run as tasks only: give them to "
            "register_ingest_task(), and leave `execute` out"
        )


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
