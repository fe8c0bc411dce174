"""Call the task of one claimed ingest job and return the outcome, also if it raises."""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import config, errors
from queue_workflows.claim import outcomes
from queue_workflows.dag import payload
from queue_workflows.run import attempt
from queue_workflows.tasks import control, handlers, registry
from queue_workflows.tasks import job as jobs
from queue_workflows.types import Row, Unreadable


def call(
    job: Row, control_: control.Control, runner: handlers.Runner, ask: control.Ask = control.refuse
) -> outcomes.Outcome:
    """Run the task of a claimed job whose row was checked; return its outcome.

    A job that was cancelled meanwhile leaves no result. One that its worker interrupted is
    `cancelled`, with the reason as its error. Raises KeyboardInterrupt only. `ask` sends what the
    task asks about its steps.
    """
    return _Attempt(job, jobs.Job(job, control_, ask), control_).run(runner)


async def call_async(
    job: Row, control_: control.Control, ask: control.Ask = control.refuse
) -> outcomes.Outcome:
    """Do as `call` does, for an async task on the running event loop."""
    return await _Attempt(job, jobs.Job(job, control_, ask), control_).run_async()


def refused(job: Row) -> outcomes.Outcome | None:
    """Return the failure of a job whose row no task can get, or None if its task can run."""
    error, headers = None, job.get("headers")
    if isinstance(job["args"], Unreadable):
        error = attempt.refused("args", job["args"])
    elif headers is not None and not isinstance(headers, dict):
        error = attempt.refused("headers", headers)
    return None if error is None else failed(job, error, 0.0)


def failed(job: Row, error: BaseException, seconds: float) -> outcomes.Outcome:
    """Return the outcome of a job whose task raised `error`, with the policy of the task."""
    name = job["task_name"]
    outcome = outcomes.of_error(error, seconds, f"task {name}")
    return outcome._replace(task=config.get_config().ingest_task_policies.get(name))


class _Attempt(attempt.Attempt):
    __slots__ = ()

    def begin(self) -> Any:
        # A handler on a root logger that has none would end Python's own output of warnings to
        # stderr, and make a later `logging.basicConfig()` of the app do nothing.
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
