"""Running one ingest job: call the registered task, check its result, record the outcome."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from queue_workflows import config, db, errors
from queue_workflows.store import outcomes, payload, tables
from queue_workflows.types import Row


def execute_ingest_job(job: Row) -> str:
    """Run a claimed ingest job and record how it ended, fenced by the claim in `job`.

    `"completed"`, `"failed"` (queued again while attempts are left), or `"skipped"`: the claim is
    no longer held and nothing was written.
    """
    outcome = run_task(job)
    with db.transaction() as conn:
        return outcomes.record(conn, tables.lease_of(tables.INGEST_JOBS, job), outcome)


def run_task(job: Row) -> outcomes.Outcome:
    """Run the task of a claimed job, writing nothing; whatever it raises is an outcome."""
    started = time.monotonic()
    try:
        value = _call(_task_of(job), job["reason"], job["args"])
        return _completed(job, value, started)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around host code: a task may exit
        return outcomes.of_error(error, time.monotonic() - started, f"task {job['task_name']}")


def is_async(job: Row) -> bool:
    """Whether the job's task is an async function, for which a pool has an event loop."""
    return inspect.iscoroutinefunction(config.get_config().ingest_task_map.get(job["task_name"]))


async def run_async(job: Row) -> outcomes.Outcome:
    """As `run_task`, of an async task, on the loop that runs; a `CancelledError` passes."""
    started = time.monotonic()
    try:
        value = await _call(_task_of(job), job["reason"], job["args"])
        return _completed(job, value, started)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around host code: a task may exit
        return outcomes.of_error(error, time.monotonic() - started, f"task {job['task_name']}")


def _task_of(job: Row) -> Callable[..., Any]:
    task = config.get_config().ingest_task_map.get(job["task_name"])
    if task is None:
        raise errors.UnknownTask(
            f"this worker knows no ingest task {job['task_name']!r}: register_ingest_task()"
        )
    return task


def _completed(job: Row, value: Any, started: float) -> outcomes.Outcome:
    """The outcome of a value that a task returned; raises what it is a signal of, or no JSON."""
    value = outcomes.unless_signal(value)
    text = payload.encode(
        value if isinstance(value, dict) else {"result": value},
        f"result of task {job['task_name']!r}",
    )
    return outcomes.Outcome("completed", time.monotonic() - started, text, value=value)


def _call(task: Callable[..., Any], reason: str, args: dict[str, Any]) -> Any:
    shape = _shape(task)
    if shape == "reason":
        return task(reason)
    if shape == "args":
        return task(args)
    return task(reason, args) if shape == "both" else task()


def _shape(task: Callable[..., Any]) -> str:
    """`reason`, `args`, `both` or `none`: what the task takes, by its positional parameters."""
    try:
        return _cached(task)
    except TypeError:
        return _looked_at(task)  # it cannot be hashed


def _looked_at(task: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(task).parameters.values()
    except (TypeError, ValueError):
        return "reason"  # a builtin that does not tell
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return "both"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not names:
        return "none"
    if len(names) > 1:
        return "both"
    return "args" if names == ["args"] else "reason"


_cached = functools.lru_cache(maxsize=512)(_looked_at)
