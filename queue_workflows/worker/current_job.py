"""Describe a running job for the thread that runs it and for the lease keeper."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.engine import job_tables, outcomes
from queue_workflows.runtime import clock, log_context
from queue_workflows.tasks import attempt_parts, interruptible
from queue_workflows.types import JsonDict, NowFn, Row
from queue_workflows.worker import guards, job_guards

current: ContextVar[Work | None] = ContextVar("queue_workflows_work", default=None)
"""The job of this handler, in a worker that runs several at once."""


class Work(interruptible.Interruptible):
    """One claimed job while it runs: its lease, guards, cancel event and last progress."""

    def __init__(
        self,
        table: job_tables.JobTable,
        job: Row,
        lease_end: guards.LeaseEnd,
        *,
        now_fn: NowFn = clock.boot_s,
        lease: job_tables.Lease | None = None,
    ) -> None:
        """Create the state of a claimed job; `lease` None: built from the row of the job."""
        super().__init__()
        self._now = now_fn
        self.table = table
        self.job = job
        self.lease = lease or job_tables.lease_of(table, job)
        self.started = now_fn()
        self.renewed = self.started
        self.lease_end = lease_end
        self.guards: list[guards.Guard] = [lease_end, *job_guards.guards_for(job, self.started)]
        self.stop_at: float | None = None
        """When the grace of a cancelled handler ends."""
        self.settling = False
        """Whether the outcome is being written; that write itself may end the claim."""
        self.waiting = False
        """Whether the handler has not started: only the lease is checked."""
        self.unsaved: str | None = None
        """Progress as JSON text that no renewal has stored yet."""
        self._cursors: dict[tuple[str, str], int] = {}
        """How far cursors of the handler are, as no renewal has stored yet."""
        self._store_unsent: attempt_parts.StoreUnsent | None = None
        self.on_unsent_parts: Callable[[], object] = lambda: None
        """Called when the handler has streamed what it does not send at once."""
        self._overdue: guards.Failure | None = None
        """The decision that the time limit has passed."""

    @property
    def ids(self) -> dict[str, str | int]:
        """Return the ids that log lines about this job carry."""
        return log_context.ids_of_job(self.job)

    def start_now(self) -> None:
        """Count the time of the guards from now, since the handler starts only now."""
        self.started = self._now()
        self.guards = [self.lease_end, *job_guards.guards_for(self.job, self.started)]
        self.waiting = False

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        self.beat()
        if (text := interruptible.progress_text(value)) is not None:
            self.unsaved = text

    def note_cursor(self, name: str, key: str, position: int) -> None:
        """Note how many items of a cursor are done, for the next renewal."""
        self._cursors[name, key] = position
        self.beat()

    def take_cursors(self) -> list[outcomes.Cursor]:
        """Return the cursors that moved since the last call."""
        found, self._cursors = self._cursors, {}
        return [(*identity, position) for identity, position in found.items()]

    def store_later(self, store_unsent: attempt_parts.StoreUnsent) -> None:
        """Let the lease keeper store soon what the handler has streamed."""
        first, self._store_unsent = self._store_unsent is None, store_unsent
        if first:
            self.on_unsent_parts()

    @property
    def has_unsent_parts(self) -> bool:
        """Return whether the handler has streamed what may not be stored."""
        return self._store_unsent is not None

    def store_parts(self, store: Callable[[JsonDict], object]) -> None:
        """Store what the handler has streamed and would send by now at a call.

        After an error of a database that is away it is tried again when this is called again; any
        other error comes again at the handler's next call.
        """
        # Forgotten before it is looked at: what the handler adds meanwhile is noted again.
        store_unsent, self._store_unsent = self._store_unsent, None
        if store_unsent is None:
            return
        try:
            some_are_left = store_unsent(store)
        except (db.OperationalError, db.InterfaceError):
            self._store_unsent = store_unsent
            raise
        if some_are_left:
            self._store_unsent = store_unsent

    def beat(self, progress: str | None = None) -> None:
        """Note that the handler is active, with its progress as JSON text if it reported any."""
        now = self._now()
        for guard in self.guards:
            if guard is not self.lease_end:
                guard.beat(now)
        if progress is not None and len(progress) <= interruptible.PROGRESS_LIMIT:
            self.unsaved = progress

    @property
    def budget_ends(self) -> float | None:
        """Return when the wall-clock budget ends, or None without a budget or running handler."""
        if self.settling or self.waiting:
            return None
        ends = [guard.ends for guard in self.guards if isinstance(guard, guards.Budget)]
        return min(ends) if ends else None

    def cancelled_by(self, stop_at: float) -> None:
        """Set the handler's cancel event; the handler has until the first given `stop_at`."""
        if self.stop_at is None:
            self.stop_at = stop_at
        self.set_cancelled()

    def verdict(self, *, stopped: bool = False) -> guards.Failure | None:
        """Return the first failure of the guards; without a handler only the lease is checked.

        `stopped`: whether its process is stopped by a signal or a debugger. Then it is idle for
        that reason, so the guards that use samples are not checked.
        """
        now = self._now()
        active = [self.lease_end] if self.settling or self.waiting else self.guards
        if stopped:
            sampled = guards.GpuHealth | guards.Stall
            active = [guard for guard in active if not isinstance(guard, sampled)]
        return next((failure for guard in active if (failure := guard.check(now))), None)

    def decided(self, failure: guards.Failure) -> None:
        """Note that the handler must end for this failure."""
        if failure.code == guards.EXIT_BUDGET:
            self._overdue = failure

    def judged(self, outcome: outcomes.Outcome, ended: float = 0.0) -> outcomes.Outcome:
        """Return the outcome to record of a handler that has ended.

        A time limit that was decided holds, unless the handler had ended before the limit passed:
        else the first of two writes would decide how the job ends. `ended`: when that was, if not
        now: the limit counts from when the job was sent, and its handler may begin later.
        """
        failure = self._overdue
        if failure is None:
            return outcome
        cancelled = outcome.kind == "cancelled" and self._cancelled
        took_s = ended - self.started if ended else outcome.seconds
        if cancelled or took_s < self._budget_s:
            return outcome
        detail = payload.encode({"guard": failure.event, "exit_code": failure.code}, "detail")
        return outcomes.Outcome(
            "timed_out",
            outcome.seconds,
            error=failure.reason,
            detail=detail,
            cursors=outcome.cursors,
        )

    @property
    def _budget_s(self) -> float:
        timed = (each for each in self.guards if isinstance(each, guards.Budget | guards.GpuHealth))
        return min((each.budget_s for each in timed), default=0.0)
