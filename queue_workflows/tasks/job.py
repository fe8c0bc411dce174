"""Return the current job to its handler, with its arguments and its ways to report."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.tasks import attempt_requests, control
from queue_workflows.types import Row

_LOCK: Final = threading.Lock()
"""Held briefly, since two threads of a handler may begin its steps or its stream at once; shared by
all jobs, since a lock per job would cost more than a short job."""


class Job:
    """The running job, as `queue_workflows.current_job()` returns it.

    In a node it is a `NodeJob`.
    """

    __slots__ = ("_ask", "_control", "_parts", "_row", "_steps", "logged_error", "result_set")

    def __init__(
        self, row: Row, control_: control.Control, ask: control.Ask = control.refuse
    ) -> None:
        """`ask` sends the handler's requests about its steps."""
        self._row = row
        self._control = control_
        self._ask = ask
        self._steps: attempt_requests.AttemptSteps | None = None
        self._parts: attempt_requests.StreamParts | None = None
        self.result_set: Any = None
        """The value passed to `set_result`."""
        self.logged_error = ""
        """The first error that the handler logged."""

    @property
    def id(self) -> str:
        """Return the job's id: the same for every attempt, so it can key what must happen once."""
        return self._row["id"]

    @property
    def run_id(self) -> str | None:
        """Return the id of the node's run; None in an ingest task."""
        return None

    @property
    def node_id(self) -> str | None:
        """Return the id of the node in its run; None in an ingest task."""
        return None

    @property
    def steps(self) -> attempt_requests.AttemptSteps:
        """Return the state of this attempt that `queue_workflows.steps` needs."""
        with _LOCK:
            if self._steps is None:
                self._steps = attempt_requests.AttemptSteps(self._ask, self._control)
            return self._steps

    @property
    def parts(self) -> attempt_requests.StreamParts:
        """Return the state of this attempt that `queue_workflows.streams` needs."""
        with _LOCK:
            if self._parts is None:
                self._parts = attempt_requests.StreamParts(self._ask, self._control)
            return self._parts

    def store_rest(self) -> None:
        """Wait until all that the handler has streamed is stored; raises what refused it."""
        rest = None if self._parts is None else self._parts.rest()
        if rest is not None:
            control.value_of(rest.result())

    async def store_rest_async(self) -> None:
        """Do as `store_rest` does, without blocking the event loop."""
        rest = None if self._parts is None else self._parts.rest()
        if rest is not None:
            control.value_of(await asyncio.wrap_future(rest))

    @property
    def cursors(self) -> tuple[tuple[str, str, int], ...]:
        """Return name, key and position of each cursor that has not ended."""
        noted = {} if self._steps is None else dict(self._steps.cursors)
        return tuple((*identity, position) for identity, position in noted.items())

    @property
    def claim(self) -> int:
        """Return the number of this claim: 1 for the first, one more each time a worker takes it.

        It grows after crashes and hand-backs too, which `attempt` does not count.
        """
        return self._row["claim_no"]

    @property
    def idempotency_key(self) -> str:
        """Return a text that is the same for every attempt, also after a retry by a person.

        Pass it to services that carry out one request per key. It is the job's id, not the key
        that `jobs.enqueue` was given.
        """
        return self._row["id"]

    @property
    def worker(self) -> str:
        """Return the id of the worker that holds the claim, as in the `workers` table."""
        return self._row["worker_id"]

    @property
    def task_name(self) -> str:
        """Return the name under which the task is registered."""
        return self._row["task_name"]

    @property
    def queue(self) -> str:
        """Return the queue from which the job was claimed."""
        return self._row["queue"]

    @property
    def reason(self) -> str:
        """Return why the job was queued."""
        return self._row["reason"] or "tick"

    @property
    def args(self) -> Any:
        """Return the args as stored: a dict, or any JSON that a plain SQL INSERT stored."""
        return self._row["args"]

    @property
    def attempt(self) -> int:
        """Return the number of this attempt, from 1.

        Crashes, snoozes and hand-backs do not count.
        """
        return self._row["attempts"] + 1

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers that the enqueuer sent along with the job, or {}."""
        return self._row.get("headers") or {}

    @property
    def lock_key(self) -> str | None:
        """Return the lock key; jobs with the same key run one at a time."""
        return self._row.get("lock_key")

    @property
    def partition_key(self) -> str | None:
        """Return the partition of the job."""
        return self._row.get("partition_key")

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job was cancelled, for functions that neither yield nor await."""
        return self._control.cancel_requested

    def report(self, value: Any = None) -> None:
        """Report a value as `yield` would: activity, and progress."""
        self._control.report_progress(value)

    def set_result(self, value: Any) -> None:
        """Set the result, for a handler that cannot return one, such as an async generator."""
        self.result_set = value

    def __repr__(self) -> str:
        return f"<job {self.id} of task {self.task_name!r}, attempt {self.attempt}>"


class NodeJob(Job):
    """The node job that runs, for the node's function: `queue_workflows.current_job()`."""

    __slots__ = ("_inputs", "_report", "takes_result")

    def __init__(
        self,
        row: Row,
        inputs: Mapping[str, Any],
        control_: control.Control,
        status_callback: Callable[..., object],
        ask: control.Ask = control.refuse,
    ) -> None:
        super().__init__(row, control_, ask)
        self._inputs = inputs
        self._report = status_callback
        self.takes_result = False
        """Whether the node's function is an async generator, which can return no result."""

    @property
    def run_id(self) -> str:
        """Return the id of the node's run."""
        return self._row["run_id"]

    @property
    def node_id(self) -> str:
        """Return the id of the node in its run, as `<step>/<node>`."""
        return self._row["node_id"]

    @property
    def task_name(self) -> str:
        """Return the name of the node's module or registered function."""
        return self._row["node_module"]

    @property
    def reason(self) -> str:
        """Return an empty text: only ingest jobs have a reason."""
        return ""

    @property
    def args(self) -> dict[str, Any]:
        """Return the node's inputs with their refs resolved, as JSON has them."""
        return dict(self._inputs)

    def report(self, value: Any = None) -> None:
        """Report a value as `status_callback` would: activity, and progress."""
        self._report(value)

    def set_result(self, value: Any) -> None:
        """Set the result of an async generator. Raises `InvalidConfig` in any other function."""
        if self.takes_result:
            self.result_set = value
            return
        raise errors.InvalidConfig(
            "set_result() is for ingest tasks and async generators: a node returns its result"
        )

    def __repr__(self) -> str:
        return f"<job {self.id} of node {self.node_id!r}, attempt {self.attempt}>"


current: contextvars.ContextVar[Job] = contextvars.ContextVar("job")


@contextlib.contextmanager
def running(job: Job) -> Generator[None]:
    """Make this job what `current_job()` returns, in this thread, until the block ends."""
    token = current.set(job)
    try:
        yield
    finally:
        current.reset(token)


def current_job() -> Job:
    """Return the job whose task or node calls this, in its thread, tasks and `asyncio.to_thread`.

    Raises `NoCurrentJob` (a LookupError) elsewhere.
    """
    try:
        return current.get()
    except LookupError:
        raise errors.NoCurrentJob(
            "no job runs here: current_job() is for the function of a node or an ingest task, and "
            "for threads that were started with its context (contextvars.copy_context)"
        ) from None
