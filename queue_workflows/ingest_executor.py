"""Run one ingest job: call the registered task, check its result, record the outcome."""

from __future__ import annotations

import time
from typing import Any

from queue_workflows import config, db, errors
from queue_workflows.dag import payload
from queue_workflows.engine import claimed_jobs, claims, finish, job_tables, outcomes
from queue_workflows.tasks import args, control, handlers
from queue_workflows.tasks import job as jobs
from queue_workflows.types import Row


def execute_ingest_job(job: Row) -> str:
    """Run a claimed ingest job and record how it ended, fenced by the claim in `job`.

    `"completed"`, `"failed"` (queued again while attempts are left), or `"skipped"`: the claim is
    no longer held and nothing was written.
    """
    lease = job_tables.lease_of(job_tables.INGEST_JOBS, job)
    with db.statement() as conn:
        if not claims.is_held(conn, lease):
            return "skipped"
    outcome = run_task(job)
    with db.transaction() as conn:
        return finish.record(conn, lease, outcome)


def run_task(
    job: Row, control_: control.Control | None = None, runner: handlers.Runner | None = None
) -> outcomes.Outcome:
    """Run the task of a claimed job, writing nothing; whatever it raises is an outcome.

    `control_`: receives progress and may interrupt the task; None: nobody does. `runner`: keeps the
    event loop for the next async task. A job that was cancelled meanwhile has no result. A job that
    its worker interrupted is `cancelled`, with the reason as its error.
    """
    attempt = _Attempt(job, control_ or control.NoControl())
    token, own = jobs.current.set(attempt.job), runner or handlers.Runner()
    try:
        return attempt.completed(own.run(attempt.call(), attempt.control))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: a task may exit
        return attempt.failed(error)
    finally:
        jobs.current.reset(token)
        if runner is None:
            own.close()


async def run_task_async(job: Row, control_: control.Control) -> outcomes.Outcome:
    """Do as `run_task` does, for an async task on the running event loop."""
    from queue_workflows.tasks import async_handlers

    attempt = _Attempt(job, control_)
    jobs.current.set(attempt.job)  # in the context of this asyncio.Task
    try:
        return attempt.completed(await async_handlers.run_async(attempt.call(), attempt.control))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: a task may exit
        return attempt.failed(error)


class _Attempt:
    """One claim of a job while its task runs, and the outcome."""

    __slots__ = ("_name", "_row", "_started", "control", "job")

    def __init__(self, row: Row, control_: control.Control) -> None:
        self.control = control_
        self.job = jobs.Job(row, control_)
        self._row = row
        self._name: str = row["task_name"]
        self._started = time.monotonic()

    def call(self) -> Any:
        """Call the task; return its result, or a generator or coroutine that must be run."""
        task = config.get_config().ingest_task_map.get(self._name)
        if task is None:
            raise errors.UnknownTask(
                f"this worker knows no ingest task {self._name!r}: register_ingest_task()"
            )
        row = self._row
        claimed_jobs.check_ingest(row)
        return args.caller_of(task).call(task, row["reason"], row["args"], self._name)

    def completed(self, value: Any) -> outcomes.Outcome:
        """Return the outcome of a handler that returned; raises a signal that it returned."""
        if self.control.cancel_requested:
            return self._interrupted("cancelled")
        found = outcomes.unless_signal(self.job.result_set if value is None else value)
        text = payload.encode(
            found if isinstance(found, dict) else {"result": found},
            f"result of task {self._name!r}",
        )
        return outcomes.Outcome("completed", self._seconds, text, value=found)

    def failed(self, error: BaseException) -> outcomes.Outcome:
        """Return the outcome of a handler that raised, or that was requested to end."""
        if self.control.cancel_requested:
            return self._interrupted("cancelled")
        if isinstance(error, control.Interrupted):
            return self._interrupted(error.reason)
        outcome = outcomes.of_error(error, self._seconds, f"task {self._name}")
        return outcome._replace(task=config.get_config().ingest_task_policies.get(self._name))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _interrupted(self, reason: str) -> outcomes.Outcome:
        return outcomes.Outcome("cancelled", self._seconds, error=reason)
