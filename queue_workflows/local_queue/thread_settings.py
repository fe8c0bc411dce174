"""Read the settings of an in-process queue: its threads, delays, time limit and attempts."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from queue_workflows import config, errors

_log = logging.getLogger(__name__)
CORES_SHARE = 0.9
LEAST_WORKERS = 10
FETCH_EVERY_S = 60.0
MAX_ATTEMPTS = 3
_KNOBS = {
    "grace_s": config.MASTER_GRACE_PERIOD_SECONDS,
    "stagger_s": config.WORKER_STAGGER_SECONDS,
    "cooldown_s": config.WORKER_COOLDOWN_SECONDS,
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


def _is_time(given: Any) -> bool:
    return type(given) in (int, float) and 0 <= given < math.inf


_RANGES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("workers", "max_attempts"),
        lambda given: type(given) is int and given >= 1,
        "a whole number from 1",
    ),
    (("grace_s", "stagger_s", "cooldown_s"), _is_time, "a number of seconds from 0"),
    (
        ("fetch_every_s", "timeout_s"),
        lambda given: _is_time(given) and given > 0,
        "a number of seconds above 0",
    ),
    (("single_job",), lambda given: isinstance(given, bool), "True or False"),
]


def read(workers: int | None, single_job: bool | None, *given: Any) -> Settings:
    """Return the settings, with the knobs for what is None; `given` are the fields that follow.

    Raises `InvalidConfig` that names a value out of range.
    """
    if workers is None:
        workers = default_workers()
    if single_job is None:
        single_job = _single_job()
    found = Settings(workers, single_job, *given)
    read = {name: knob.read() for name, knob in _KNOBS.items() if getattr(found, name) is None}
    found = found._replace(**read)
    for names, takes, meant in _RANGES:
        for name in names:
            if not takes(value := getattr(found, name)) and (name, value) != ("timeout_s", None):
                knob = _KNOBS.get(name)
                variable = f" (argument, or variable {knob.name})" if knob else ""
                raise errors.InvalidConfig(f"{name}={value!r}{variable}: it must be {meant}")
    return found


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
    cleaned = text.strip().lower()
    if cleaned not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        _log.warning("WORKER_SINGLE_JOB_MODE=%r is neither true nor false; using true", text)
    return cleaned not in ("false", "0", "no", "off")
