"""Serve an ingest queue in PostgreSQL with the threads of one process, which share its models."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.dag import payload
from queue_workflows.engine import claims, outcomes
from queue_workflows.handlers import task_call
from queue_workflows.local_queue import job_queue, plan, thread_worker
from queue_workflows.runtime import clock, identity, service
from queue_workflows.tasks import handlers
from queue_workflows.tasks import job as current
from queue_workflows.types import ExitFn

END_S = 6.0
"""Seconds that the loop may take to hand back the claims when the plan is closed."""


class IngestPlan(plan.ClaimingPlan):
    """The jobs of one ingest queue, for the `JobQueueManager` of this process.

    Any number of such processes and of ordinary workers may serve the queue. Each job is claimed,
    renewed, fenced and recorded as a worker does it; its own attempts, delays and time-outs count,
    not those of the manager. `limit`: claims at once, by default the manager's workers. `lease_s`:
    seconds. `on_exit` ends the process after an OFF by policy `hard`; None: the process stays, and
    only the jobs are handed back. Raises `UnknownQueue` and `InvalidConfig` (both ValueErrors).
    """

    def __init__(
        self,
        queue: str,
        *,
        limit: int | None = None,
        host: str | None = None,
        host_priority: int | None = None,
        lease_s: float = 600.0,
        on_exit: ExitFn | None = None,
    ) -> None:
        config.check_queue(queue)
        if queue in config.DAG_QUEUES:
            raise errors.InvalidConfig(f"queue {queue!r}: a plan serves ingest queues only")
        if not 0 < lease_s < math.inf or (limit is not None and limit < 1):
            raise errors.InvalidConfig(f"lease_s={lease_s!r}, limit={limit!r}: must be positive")
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self._who = claims.Claimant(
            identity.new_worker_id(label),
            label,
            queue,
            lease_s,
            newest=priority < 0,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self._limit = limit
        self._on_exit = on_exit
        self._worker: thread_worker.ThreadWorker | None = None
        self._loop: service.Pool | None = None

    @property
    def worker_id(self) -> str:
        """Return the identity under which this process claims."""
        return self._who.worker_id

    # --- For the manager.

    @property
    def others_fill_memory(self) -> bool:
        """Return whether, at the last heartbeat, a job of another worker filled the same memory."""
        return self._worker is not None and self._worker.others_fill_memory

    def open(self, owner: plan.Owner, /) -> None:
        """Begin to claim; raise RuntimeError the second time."""
        if self._worker is not None:
            raise RuntimeError("the plan was opened before; make a new one")
        limit = self._limit or owner.workers
        self._worker = worker = thread_worker.ThreadWorker(owner, self._who, limit, self._on_exit)
        self._loop = service.Pool("local-queue-worker", 1, lambda _: worker.serve())
        self._loop.start()

    def close(self) -> None:
        """Hand back every claim, and deregister the worker."""
        if self._worker is not None and self._loop is not None:
            self._worker.close_now()
            self._loop.stop(END_S)

    def fetch_ready(self) -> list[job_queue.Job]:
        """Let the worker claim jobs, which it gives to the manager by itself; return none."""
        if self._worker is not None:
            self._worker.look()
        return []

    # --- The threads of the workers.

    @property
    def _threads(self) -> thread_worker.Threads:
        assert self._worker is not None
        return self._worker.threads

    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; return False if its claim is over."""
        held = _held(job)
        return held is not None and self._threads.begins(held)

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether a handler of the job runs here."""
        return self._worker is not None and self._threads.runs(job_id)

    def call(self, job: job_queue.Job, execute: Callable[[job_queue.Job], Any] | None, /) -> Any:
        """Run a job; return its result, or raise `NotCompleted` with its error."""
        held = _held(job)
        assert held is not None  # `mark_running` has found it
        outcome = task_call.refused(held.row)
        if outcome is None and execute is None:
            runner = handlers.Runner()
            try:
                ask = functools.partial(self._threads.ask, held)
                outcome = task_call.call(held.row, held.control, runner, ask)
            finally:
                runner.close()
        elif outcome is None and execute is not None:
            outcome = _execute(job, held, execute)
        assert outcome is not None
        held.outcome = outcome
        if outcome.kind == "completed":
            return outcome.value
        raise plan.NotCompleted(outcome.error or outcome.kind)

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Let the worker record the result unless the claim was lost."""
        del result  # the outcome has it as checked JSON
        held = _held(job)
        if held is not None and held.outcome is not None:
            self._threads.ends(held, held.outcome)

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool:
        """Let the worker record the failure by the policy of the job; return False.

        `final` is the manager's view, and does not count. A job that has failed for good is counted
        when that is recorded.
        """
        del final
        held = _held(job)
        if held is not None:
            outcome = held.outcome
            if outcome is None:
                held.control.interrupt(error)
                seconds = clock.boot_s() - held.job.started
                outcome = outcomes.Outcome("failed", seconds, error=payload.error_text(error))
            self._threads.ends(held, outcome)
        return False

    def give_back(self, job: job_queue.Job, reason: str, /) -> None:
        """Hand a job back that did not start or did not end; it counts no attempt."""
        held = _held(job)
        if held is not None:
            held.control.interrupt(reason)
            self._threads.ends(held, thread_worker.cancelled(reason))


def _held(job: job_queue.Job) -> thread_worker.Held | None:
    return job.held if isinstance(job, thread_worker.QueuedJob) else None


def _execute(
    job: job_queue.Job, held: thread_worker.Held, execute: Callable[[job_queue.Job], Any]
) -> outcomes.Outcome:
    """Run a job by the app's function; whatever it raises is an outcome."""
    row, control, started = held.row, held.control, time.monotonic()
    try:
        with current.running(current.Job(row, control)):
            value = handlers.unless_signal(execute(job))
        found = cast("dict[str, Any]", value) if isinstance(value, dict) else {"result": value}
        text = payload.encode(found, f"result of job {held.job.id}")
        outcome = outcomes.Outcome("completed", time.monotonic() - started, text, value=value)
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        outcome = task_call.failed(row, error, time.monotonic() - started)
    if control.cancel_requested:
        return outcomes.Outcome("cancelled", time.monotonic() - started, error="cancelled")
    return outcome
