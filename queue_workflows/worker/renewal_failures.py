"""Decide whether the database or the worker itself prevented a lease renewal."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn

IN_FLIGHT_S = 1.0
"""Seconds after which the database is blamed for a statement that has no reply."""
STARVED_S = 2.0
"""Seconds without a run of the lease keeper after which this process counts as stalled.

A quarter of the lease applies instead if that is longer.
"""
READ_ONLY = "25"
TOO_LARGE = "54"
"""SQLSTATE classes: 25, a read-only server; 54, a value that no retry makes small enough."""


def may_pass(error: Exception) -> bool:
    """Return whether the same write may succeed later, after a lost connection for example.

    False for an error that is not the database's, such as one of an app's adapter of values.
    """
    state = getattr(error, "sqlstate", None) or ""
    passing = isinstance(error, (db.OperationalError, db.InterfaceError))
    return (passing and not state.startswith(TOO_LARGE)) or state.startswith(READ_ONLY)


class Renewals:
    """Decide whether the database or the process itself prevented a lease renewal.

    The lease keeper calls `renewed` or `refused` after each renewal on its dedicated connection. It
    calls `watched` each time its thread runs. A handler that keeps the GIL delays this thread and
    the renewals. The database is never blamed for such a stall.
    """

    def __init__(
        self, lease_s: float, dedicated: db.DedicatedConnection, now_fn: NowFn = clock.boot_s
    ) -> None:
        self._now = now_fn
        self._dedicated = dedicated
        self._patience_s = max(STARVED_S, lease_s / 4)
        self._refused = False
        self._watched = now_fn()
        self._stall: tuple[float, float] | None = None
        """When the last stall that is not forgotten began and ended."""

    def renewed(self, sent: float) -> None:
        """Note a renewal that was sent at this time and succeeded; forget what was before.

        A stall since then is remembered: a process that was stopped while it waited for the reply
        may have lost its claims in the meantime.
        """
        self._refused = False
        self.watched()
        if self._stall is not None:
            began, ended = self._stall
            if ended - max(began, sent) <= self._patience_s:
                self._stall = None

    def refused(self, error: db.Error) -> None:
        """Note a failed renewal; blame the database if the same write may succeed later."""
        self._refused = may_pass(error)

    def watched(self) -> None:
        """Note that the lease keeper's thread runs; remember a stall since its last run."""
        now = self._now()
        if now - self._watched > self._patience_s:
            self._stall = self._watched, now
        self._watched = now

    @property
    def starved(self) -> bool:
        """Return whether this process has stalled since the last renewal."""
        return self._stall is not None or self._now() - self._watched > self._patience_s

    def blame_database(self) -> bool:
        """Return whether this process ran without a stall, and the database failed or was silent.

        Any statement on the same connection counts, since it can delay the renewal.
        """
        failure = self._dedicated.failure
        failed = self._refused or (failure is not None and may_pass(failure))
        return not self.starved and (failed or self._dedicated.waiting_s >= IN_FLIGHT_S)
