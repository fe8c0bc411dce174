"""Call the handler of one claimed job, and return whatever it does as an outcome."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.claim import outcomes
from queue_workflows.model_cache import loading
from queue_workflows.runtime import log_context, trace_context
from queue_workflows.tasks import control, handlers
from queue_workflows.tasks import job as jobs
from queue_workflows.types import Row, Unreadable


class Attempt(abc.ABC):
    """One claim of a job while its handler runs.

    It is a block in which `current_job()`, log lines and spans are those of the job, and in which
    its handler may be called. That is no generator, since the generators of three context
    managers cost more than a short handler.
    """

    __slots__ = ("_detach", "_ids", "_result", "_token", "control", "job", "row", "started")

    def __init__(
        self,
        row: Row,
        job: jobs.Job,
        control_: control.Control,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        """`result` returns what is stored for a value that the handler has returned."""
        self._result = result
        self.row = row
        self.job = job
        self.control = control_
        self.started = time.monotonic()

    def run(self, runner: handlers.Runner) -> outcomes.Outcome:
        """Run the handler and return its outcome. Raises KeyboardInterrupt only."""
        try:
            with self:
                try:
                    value = runner.run(self.begin(), self.control)
                except BaseException:
                    with contextlib.suppress(Exception):  # the handler's own error counts
                        self.job.store_rest()
                    raise
                self.job.store_rest()
                value = self._checked(value)
            if self.control.cancel_requested:
                raise control.Interrupted("cancelled")
            return self.completed(value, time.monotonic() - self.started)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
            return self._raised(error)

    async def run_async(self) -> outcomes.Outcome:
        """Do as `run` does, for an async handler on the running event loop."""
        try:
            with self:
                try:
                    value = await handlers.run_async(self.begin(), self.control)
                except BaseException:
                    with contextlib.suppress(Exception):  # the handler's own error counts
                        await self.job.store_rest_async()
                    raise
                await self.job.store_rest_async()
                value = self._checked(value)
            if self.control.cancel_requested:
                raise control.Interrupted("cancelled")
            return self.completed(value, time.monotonic() - self.started)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
            return self._raised(error)

    def __enter__(self) -> None:
        self._token = jobs.current.set(self.job)
        self._ids = log_context.bind_job(self.row)
        self._detach: Callable[[], object] | None = trace_context.attach(self.row)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            # One that is in a variable of its own function keeps them all until a collection.
            loading.clear_frames(error)
        if self._detach is not None:
            self._detach()
        log_context.unbind(self._ids)
        jobs.current.reset(self._token)

    def _checked(self, value: Any) -> Any:
        value = handlers.unless_signal(self.job.result_set if value is None else value)
        return value if self._result is None else self._result(value)

    def _raised(self, error: BaseException) -> outcomes.Outcome:
        reason = error.reason if isinstance(error, control.Interrupted) else ""
        if self.control.cancel_requested:
            reason = "cancelled"
        seconds = time.monotonic() - self.started
        if reason:
            found = outcomes.Outcome("cancelled", seconds, error=reason)
        else:
            found = self.failed(error, seconds)
        return found._replace(cursors=self.job.cursors)

    @abc.abstractmethod
    def begin(self) -> Any:
        """Call the handler; return its result, or a generator or coroutine that must be run."""

    @abc.abstractmethod
    def completed(self, value: Any, seconds: float) -> outcomes.Outcome:
        """Return the outcome of a handler with this result. Raises `InvalidPayload`."""

    @abc.abstractmethod
    def failed(self, error: BaseException, seconds: float) -> outcomes.Outcome:
        """Return the outcome of a handler that raised."""


_KINDS: Final = {
    "NoneType": "null", "bool": "a boolean", "int": "a number", "float": "a number",
    "str": "a text", "list": "an array",
}  # fmt: skip


def refused(column: str, value: Any, wanted: str = "an object") -> errors.UnreadableRow:
    """Return the error of a claimed job with which no handler can run, as a column has this."""
    if isinstance(value, Unreadable):
        return errors.UnreadableRow(f"{column} cannot be loaded: {value.reason}")
    name = type(value).__name__
    return errors.UnreadableRow(f"{column} is {_KINDS.get(name, f'a {name}')}, not {wanted}")
