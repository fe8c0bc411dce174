"""The job whose task runs here: what it was given, and what its body may say."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import Any

from queue_workflows import errors
from queue_workflows.tasks import control
from queue_workflows.types import Row


class Job:
    """The ingest job that runs, for its task's body: `queue_workflows.current_job()`."""

    __slots__ = ("_control", "_row", "left")

    def __init__(self, row: Row, control_: control.Control) -> None:
        self._row = row
        self._control = control_
        self.left: Any = None
        """What `set_result` was given."""

    @property
    def id(self) -> str:
        """Its id: the same for every attempt, so that it can key what must happen once."""
        return self._row["id"]

    @property
    def task_name(self) -> str:
        """The name under which the task is registered."""
        return self._row["task_name"]

    @property
    def queue(self) -> str:
        """The queue from which it was claimed."""
        return self._row["queue"]

    @property
    def reason(self) -> str:
        """Why it was queued."""
        return self._row["reason"]

    @property
    def args(self) -> dict[str, Any]:
        """Its args as they are stored."""
        return self._row["args"]

    @property
    def attempt(self) -> int:
        """1 for the first; crashes, snoozes and hand-backs count none."""
        return self._row["attempts"] + 1

    @property
    def headers(self) -> Mapping[str, str]:
        """What the enqueuer sent along with it; {} for nothing."""
        return self._row.get("headers") or {}

    @property
    def lock_key(self) -> str | None:
        """Of the jobs of one lock key one runs at a time."""
        return self._row.get("lock_key")

    @property
    def partition_key(self) -> str | None:
        """The partition that it belongs to."""
        return self._row.get("partition_key")

    @property
    def cancel_requested(self) -> bool:
        """Whether it was cancelled: a plain function that asks may end before it is stopped."""
        return self._control.cancel_requested

    def report(self, value: Any = None) -> None:
        """What a `yield` of this value would say: a sign of life, and progress."""
        self._control.said(value)

    def set_result(self, value: Any) -> None:
        """The result, for a body that returns none, as an async generator cannot."""
        self.left = value

    def __repr__(self) -> str:
        return f"<job {self.id} of task {self.task_name!r}, attempt {self.attempt}>"


current: contextvars.ContextVar[Job] = contextvars.ContextVar("job")


def current_job() -> Job:
    """The job whose task this is called by, in its own thread, tasks and `asyncio.to_thread`.

    Raises `NoCurrentJob` (a LookupError) elsewhere.
    """
    try:
        return current.get()
    except LookupError:
        raise errors.NoCurrentJob(
            "no job runs here: current_job() is for the body of an ingest task, and for threads "
            "that were started with its context (contextvars.copy_context)"
        ) from None
