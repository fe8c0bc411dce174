"""What the worker does right now, shared by the thread that runs it and the one that watches."""

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
from queue_workflows.worker import guards

_EVENTS = threading.Lock()
"""Held while a job's event is made or set."""
here: ContextVar[Work | None] = ContextVar("queue_workflows_work", default=None)
"""The job whose body this is, in a worker that runs several at once."""


class Work:
    """One claimed job while it runs: its lease, its guards, its cancel event, its last progress."""

    def __init__(
        self,
        table: job_tables.JobTable,
        job: Row,
        lease_end: guards.LeaseEnd,
        *,
        now_fn: NowFn = clock.boot_s,
        lease: job_tables.Lease | None = None,
    ) -> None:
        """`lease`: that of `job`, if it is known already."""
        self._now = now_fn
        self.table = table
        self.job = job
        self.lease = lease or job_tables.lease_of(table, job)
        self._event: threading.Event | None = None
        self._cancelled = False
        self._interrupt: Callable[[], object] | None = None
        self.interrupted: str | None = None
        """Why the body is to end at its next yield or await; None: it goes on."""
        self.started = now_fn()
        self.renewed = self.started
        self.lease_end = lease_end
        self.guards: list[guards.Guard] = [lease_end, *guards.guards_for(job, self.started)]
        self.stop_at: float | None = None
        """When a cancelled body has had its grace."""
        self.settling = False
        """The outcome is being written: a claim that is gone may be gone by that very write."""
        self.unsaved: str | None = None
        """Progress as JSON text that no renewal has stored yet."""
        self.heard: Callable[[float], object] = lambda _: None
        """Told when the body shows life, besides the guards."""

    def status(self, *values: Any, **fields: Any) -> None:
        """The body's `status_callback`: a number 0 to 1 or a dict is progress, all else a beat."""
        value: Any = fields or (values[0] if values else None)
        self.said(None if isinstance(value, str) else value)

    def said(self, value: Any) -> None:
        """What a task yields: progress is a text, too."""
        now = self._now()
        for guard in self.guards:
            if guard is not self.lease_end:
                guard.beat(now)
        self.heard(now)
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

    @property
    def cancel(self) -> threading.Event:
        """Set once the job was cancelled; made for the first who asks, which short jobs do not."""
        with _EVENTS:
            if self._event is None:
                self._event = threading.Event()
            if self._cancelled:
                self._event.set()
            return self._event

    @property
    def budget_ends(self) -> float | None:
        """When the wall-clock budget is over, if there is one and the body runs."""
        if self.settling:
            return None
        ends = [guard.ends for guard in self.guards if isinstance(guard, guards.Budget)]
        return min(ends) if ends else None

    @property
    def cancel_requested(self) -> bool:
        """Whether the job was cancelled."""
        return self._cancelled

    def cancelled_by(self, stop_at: float) -> None:
        """The job was cancelled: tell the body, which has until the first `stop_at` given."""
        if self.stop_at is None:
            self.stop_at = stop_at
        with _EVENTS:
            self._cancelled = True
            if self._event is not None:
                self._event.set()
        self.interrupt("cancelled")

    def interrupt(self, reason: str) -> None:
        """A body that yields or awaits ends there; the first reason counts."""
        with _EVENTS:
            if self.interrupted is None:
                self.interrupted = reason
                if self._interrupt is not None:
                    self._interrupt()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Call this, in whatever thread, on `interrupt`; at once if it came before; None: no more.

        It must not wait for anything.
        """
        with _EVENTS:
            self._interrupt = call
            if call is not None and self.interrupted is not None:
                call()

    def verdict(self) -> guards.Trip | None:
        """The first guard that trips now; of a body that has ended only its lease is judged."""
        now = self._now()
        judged = [self.lease_end] if self.settling else self.guards
        return next((trip for guard in judged if (trip := guard.check(now))), None)


PROGRESS_LIMIT = 8000
"""Characters of a progress report; a longer one counts as a beat."""
