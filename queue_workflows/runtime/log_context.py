"""Hold the ids of the current job, run or request, which log formatters add to each line."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextvars import ContextVar, Token
from typing import Any, Final, NamedTuple, TypeAlias

NAMES: Final = ("request_id", "run_id", "job_id", "node_id", "task", "attempt", "queue", "worker")
"""The ids in the order in which log lines have them."""
Ids: TypeAlias = "dict[str, str | int]"


class _OfJob(NamedTuple):
    """A claimed job and the ids bound before; its own ids are only read for log lines."""

    row: Mapping[str, Any]
    outer: Ids | _OfJob


Bound: TypeAlias = "Token[Ids | _OfJob]"
_bound: ContextVar[Ids | _OfJob] = ContextVar("queue_workflows_log_ids", default={})  # noqa: B039
_of_process: Ids = {}


def set_for_process(**ids: str | int | None) -> None:
    """Set the ids of every line of this process; None removes one."""
    for name, value in ids.items():
        if value is None:
            _of_process.pop(name, None)
        else:
            _of_process[name] = value


def reset_for_tests() -> None:
    """Remove the ids of the process."""
    _of_process.clear()


@contextlib.contextmanager
def bound(ids: Mapping[str, str | int] | None = None, **more: str | int) -> Generator[None]:
    """Add ids to the lines that this thread or async task logs inside the block."""
    token = _bound.set({**of_code(), **(ids or {}), **more})
    try:
        yield
    finally:
        _bound.reset(token)


def bind_job(row: Mapping[str, Any]) -> Bound:
    """Add the ids of a claimed job from here on; return the token for `unbind`."""
    return _bound.set(_OfJob(row, _bound.get()))


def unbind(token: Bound) -> None:
    """Undo `bind_job`."""
    _bound.reset(token)


def of_code() -> Ids:
    """Return the ids that are bound in the present context."""
    return _ids_of(_bound.get())


def _ids_of(found: Ids | _OfJob) -> Ids:
    if isinstance(found, _OfJob):
        return {**_ids_of(found.outer), **ids_of_job(found.row)}
    return dict(found)


def current() -> Ids:
    """Return the ids of the process and the bound ids, in the order of `NAMES`."""
    found = {**_of_process, **of_code()}
    known = {name: found.pop(name) for name in NAMES if name in found}
    return known | found


def ids_of_job(job: Mapping[str, Any]) -> Ids:
    """Return the ids of a claimed job of either family, from its row."""
    members = {
        "job_id": job.get("id"),
        "run_id": job.get("run_id"),
        "node_id": job.get("node_id"),
        "task": job.get("task_name"),
        "queue": job.get("queue"),
        "attempt": job.get("claim_no"),
    }
    return {name: value for name, value in members.items() if isinstance(value, (str, int))}
