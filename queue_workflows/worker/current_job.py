"""Describe a running job for the thread that runs it and for the lease keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.engine import job_tables
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import guards, job_guards

_EVENTS = threading.Lock()
"""Held while a job's cancel event is created or set."""
current: ContextVar[Work | None] = ContextVar("queue_workflows_work", default=None)
"""The job of this handler, in a worker that runs several at once."""


class Work:
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
        self._now = now_fn
        self.table = table
        self.job = job
        self.lease = lease or job_tables.lease_of(table, job)
        self._event: threading.Event | None = None
        self._cancelled = False
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the handler is to end at its next yield or await; None: it may continue."""
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
        self.on_activity: Callable[[float], object] = lambda _: None
        """Called when the handler shows activity, in addition to the guards."""

    def start_now(self) -> None:
        """Count the time of the guards from now, since the handler starts only now."""
        self.started = self._now()
        self.guards = [self.lease_end, *job_guards.guards_for(self.job, self.started)]
        self.waiting = False

    def status(self, *values: Any, **fields: Any) -> None:
        """Report status (`status_callback`): a number 0 to 1 or a dict is progress, else a beat."""
        value: Any = fields or (values[0] if values else None)
        self.report_progress(None if isinstance(value, str) else value)

    def report_progress(self, value: Any) -> None:
        """Report a value that a task yields; a text is progress too."""
        self.beat()
        if isinstance(value, bool) or not isinstance(value, (int, float, str, dict)):
            return
        if isinstance(value, (int, float)) and not 0 <= value <= 1:
            return
        try:
            text = payload.encode(value, "progress")
        except errors.InvalidPayload:
            return
        if len(text) <= PROGRESS_LIMIT:
            self.unsaved = text

    def beat(self, progress: str | None = None) -> None:
        """Note that the handler is active, with its progress as JSON text if it reported any."""
        now = self._now()
        for guard in self.guards:
            if guard is not self.lease_end:
                guard.beat(now)
        self.on_activity(now)
        if progress is not None and len(progress) <= PROGRESS_LIMIT:
            self.unsaved = progress

    @property
    def cancel(self) -> threading.Event:
        """Return the event that is set on cancel; created on first use, as short jobs need none."""
        with _EVENTS:
            if self._event is None:
                self._event = threading.Event()
            if self._cancelled:
                self._event.set()
            return self._event

    @property
    def budget_ends(self) -> float | None:
        """Return when the wall-clock budget ends, or None without a budget or running handler."""
        if self.settling or self.waiting:
            return None
        ends = [guard.ends for guard in self.guards if isinstance(guard, guards.Budget)]
        return min(ends) if ends else None

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job was cancelled."""
        return self._cancelled

    def cancelled_by(self, stop_at: float) -> None:
        """Set the handler's cancel event; the handler has until the first given `stop_at`."""
        if self.stop_at is None:
            self.stop_at = stop_at
        with _EVENTS:
            self._cancelled = True
            if self._event is not None:
                self._event.set()
        self.interrupt("cancelled")

    def interrupt(self, reason: str) -> None:
        """End a handler that yields or awaits there; the first reason counts."""
        with _EVENTS:
            if self.interrupted is None:
                self.interrupted = reason
                if self._interrupt is not None:
                    self._interrupt()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set the function to call, on any thread, on `interrupt`; None removes it.

        It is called at once if the job was interrupted before. It must not block.
        """
        with _EVENTS:
            self._interrupt = call
            if call is not None and self.interrupted is not None:
                call()

    def verdict(self) -> guards.Failure | None:
        """Return the first failure of the guards; without a handler only the lease is checked."""
        now = self._now()
        active = [self.lease_end] if self.settling or self.waiting else self.guards
        return next((failure for guard in active if (failure := guard.check(now))), None)


PROGRESS_LIMIT = 8000
"""Characters of a progress report; a longer one counts as a beat only."""
