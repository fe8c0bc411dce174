"""Call the registered task of a job in the thread of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from queue_workflows import config, errors
from queue_workflows.local_queue import job_queue
from queue_workflows.tasks import args, handlers
from queue_workflows.tasks import job as current
from queue_workflows.types import Row

QUEUE = "local"
"""What `current_job().queue` returns."""


class Control:
    """The manager's side of a running job: a `tasks.control.Control`."""

    cancel_requested = False

    def __init__(self) -> None:
        self.interrupted: str | None = None
        self._lock = threading.Lock()
        self._call: Callable[[], object] | None = None

    def report_progress(self, value: Any) -> None:
        """Do nothing: no code reads the progress."""

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set the function to call on an interrupt."""
        with self._lock:
            self._call = call
            due = call is not None and self.interrupted is not None
        if due and call is not None:
            call()

    def interrupt(self, reason: str) -> None:
        """Let a task end at its next yield or await."""
        with self._lock:
            self.interrupted, call = reason, self._call
        if call is not None:
            call()


def run(job: job_queue.Job, control: Control, *, attempt: int, worker: str) -> Any:
    """Return the result of the job's task. Raises what it raises, and `UnknownTask`."""
    task = config.get_config().ingest_task_map.get(job.task)
    if task is None:
        raise errors.UnknownTask(
            f"this process knows no task {job.task!r}: register_ingest_task(), or pass `execute`"
        )
    given = dict(job.args)
    row: Row = {
        "id": job.id, "task_name": job.task, "queue": QUEUE, "reason": "", "args": given,
        "attempts": attempt - 1, "claim_no": attempt, "worker_id": worker,
    }  # fmt: skip
    running = current.Job(row, control)
    runner = handlers.Runner()
    try:
        with current.running(running):
            begun = args.caller_of(task).call(task, running.reason, given, job.task)
            value = runner.run(begun, control)
    finally:
        runner.close()
    value = handlers.unless_signal(value)
    return running.result_set if value is None else value
