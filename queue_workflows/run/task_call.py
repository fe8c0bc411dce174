"""Call the handler of one claimed job, and return its result or error as an outcome."""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import config, errors
from queue_workflows.claim import outcomes
from queue_workflows.dag import payload
from queue_workflows.model_cache import loading
from queue_workflows.runtime import attempt_spans, log_context
from queue_workflows.tasks import control, handlers, registry
from queue_workflows.tasks import job as jobs
from queue_workflows.types import Row, Unreadable


class Attempt(abc.ABC):
    """One claim of a job while its handler runs.

    The handler may be called within its `with` block, in which `current_job()`, log lines and spans
    belong to the job. It is a class because three generator-based context managers would cost more
    than a short handler.
    """

    __slots__ = ("_detach", "_ids", "_result", "_token", "control", "job", "row", "started")

    def __init__(
        self,
        row: Row,
        job: jobs.Job,
        control_: control.Control,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        """`result` converts the handler's return value to the value that is stored."""
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
        self._detach: Callable[[], object] | None = attempt_spans.attach(self.row)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            # An error stored in a variable of its own function keeps all frames until a collection.
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
        """Call the handler; return its result, or the generator or coroutine to run."""

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


def unreadable(column: str, value: Any, wanted: str = "an object") -> errors.UnreadableRow:
    """Return the error of a claimed job whose `column` has a value with which it cannot run."""
    if isinstance(value, Unreadable):
        return errors.UnreadableRow(f"{column} cannot be loaded: {value.reason}")
    name = type(value).__name__
    return errors.UnreadableRow(f"{column} is {_KINDS.get(name, f'a {name}')}, not {wanted}")


# --- Ingest jobs.


def call(
    job: Row, control_: control.Control, runner: handlers.Runner, ask: control.Ask = control.refuse
) -> outcomes.Outcome:
    """Run the task of a claimed job whose row was checked; return its outcome.

    If the job was cancelled meanwhile, its result is dropped. If the worker interrupted it, the
    outcome is `cancelled` with the reason as its error. Raises KeyboardInterrupt only. `ask` sends
    the task's questions about steps.
    """
    return _TaskAttempt(job, jobs.Job(job, control_, ask), control_).run(runner)


async def call_async(
    job: Row, control_: control.Control, ask: control.Ask = control.refuse
) -> outcomes.Outcome:
    """Do as `call` does, for an async task on the running event loop."""
    return await _TaskAttempt(job, jobs.Job(job, control_, ask), control_).run_async()


def refused(job: Row) -> outcomes.Outcome | None:
    """Return the failure of a job whose row is unreadable, or None if its task can run."""
    error, headers = None, job.get("headers")
    if isinstance(job["args"], Unreadable):
        error = unreadable("args", job["args"])
    elif headers is not None and not isinstance(headers, dict):
        error = unreadable("headers", headers)
    return None if error is None else failed(job, error, 0.0)


def failed(job: Row, error: BaseException, seconds: float) -> outcomes.Outcome:
    """Return the outcome of a job whose task raised `error`, with the policy of the task."""
    name = job["task_name"]
    outcome = outcomes.of_error(error, seconds, f"task {name}")
    return outcome._replace(task=config.get_config().ingest_task_policies.get(name))


class _TaskAttempt(Attempt):
    __slots__ = ()

    def begin(self) -> Any:
        # If the root logger has no handler, adding one would stop Python's own output of warnings
        # to stderr, and make a later `logging.basicConfig()` of the app do nothing.
        handlers_, name = logging.root.handlers, self.row["task_name"]
        if handlers_ and _collector not in handlers_:
            logging.root.addHandler(_collector)
        task = config.get_config().ingest_task_map.get(name)
        if task is None:
            raise errors.UnknownTask(
                f"this worker knows no ingest task {name!r}: register_ingest_task()"
            )
        return registry.caller_of(task).call(task, self.job.reason, self.row["args"], name)

    def completed(self, value: Any, seconds: float) -> outcomes.Outcome:
        text = payload.encode(
            value if isinstance(value, dict) else {"result": value},
            f"result of task {self.row['task_name']!r}",
        )
        logged = self.job.logged_error
        return outcomes.Outcome("completed", seconds, text, error=logged, value=value)

    def failed(self, error: BaseException, seconds: float) -> outcomes.Outcome:
        return failed(self.row, error, seconds)


class _Collector(logging.Handler):
    """Note the first error that the handler of each job logs, for the history of the job."""

    def emit(self, record: logging.LogRecord) -> None:
        job = jobs.current.get(None)
        if job is None or job.logged_error:
            return
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  the boundary around app code: arguments of an app
            text = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        job.logged_error = payload.error_text(text)


_collector = _Collector(logging.ERROR)
