"""Keep claims that were lost for want of the database from counting as crashes of their jobs.

While this process lives it subtracts such a crash itself. When it has ended, its note on disk lets
the next worker do it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from queue_workflows import db
from queue_workflows.engine import job_tables, recovery
from queue_workflows.types import NowFn
from queue_workflows.worker import notes, process_jobs, renewal_failures


class CrashExcuses:
    """The lost claims of a process that it excuses, and the notes that it leaves about them."""

    def __init__(
        self,
        jobs: process_jobs.ProcessJobs,
        renewals: renewal_failures.Renewals,
        now_fn: NowFn,
    ) -> None:
        self._jobs = jobs
        self._renewals = renewals
        self._now = now_fn
        self._exit_note = notes.ExitNote()
        self._lapsed_note = notes.ExitNote()
        self._lapsed: frozenset[job_tables.Lease] = frozenset()
        """The claims of `_lapsed_note`."""
        self._was_clear = True
        self._unwritten = deque[job_tables.Lease](maxlen=notes.MAX_LEASES)
        """Claims that were lost before their outcomes were written, without a stall here."""
        self._charged = set[job_tables.Lease]()
        """Claims that were lost while this process stalled; there are few in its life."""
        self.may_hold_unknown_claims: Callable[[], bool] = lambda: False
        """Returns whether the server may have executed a claim whose reply was lost."""
        self.unanswered: Callable[[], dict[str, float]] = dict
        """Returns the time of the first claim without a reply, by worker id."""

    @property
    def are_due(self) -> bool:
        """Return whether crashes have to be subtracted."""
        return bool(self._unwritten)

    def add(self, lease: job_tables.Lease) -> bool:
        """Excuse this claim soon, whose outcome was not written; return False if this is no excuse.

        There is none if the process itself stalled, for example because a handler kept the GIL.
        """
        if self._renewals.starved or lease in self._charged:
            return False
        self._unwritten.append(lease)
        return True

    def excuse(self, conn: db.Connection, lost: Sequence[job_tables.Lease]) -> None:
        """Subtract the crash that losing these claims may have counted, since this process lives.

        It does so for those of `add` too, and for none of `lost` if the process itself stalled.
        """
        if self._renewals.starved:
            self._charged.update(lost)
        else:
            for lease in lost[: notes.MAX_LEASES]:
                recovery.excuse(conn, lease, ended=False)
        while self._unwritten:
            recovery.excuse(conn, self._unwritten[0], ended=False)
            self._unwritten.popleft()

    def fence(self) -> None:
        """Report to the next worker if this exit is the database's fault."""
        if self._renewals.blame_database():
            self.leave_note()

    def leave_note(self) -> None:
        """Report to the next worker that the claims left behind count nothing."""
        leases = dict.fromkeys([*(work.lease for work in self._jobs.running), *self._jobs.claims()])
        self._exit_note.write(self._jobs.worker_ids(), leases, self.unanswered())

    def withdraw_note(self) -> None:
        """Take back what `leave_note` has reported."""
        self._exit_note.withdraw()

    def start(self) -> None:
        """Delete the note of an earlier stop: the claimers themselves release what it is about."""
        self._exit_note.withdraw()

    def stop(self) -> None:
        """Leave notes for the claims that could not be handed back to the database."""
        if left := self._jobs.claims():
            # No worker ids: this worker may run again under its id, and then holds new claims.
            notes.write_note((), left)
        unwritten = [work.lease for work in self._jobs.running]
        if unwritten or self.may_hold_unknown_claims():
            # Locked until this process ends, or this worker runs again.
            self._exit_note.write(self._jobs.worker_ids(), unwritten, self.unanswered())

    def note_lapsed(self) -> None:
        """Leave a note for claims that lapsed for want of the database, while no handler ran.

        A crash may be counted for each, which `excuse` subtracts when the database is back. If the
        next handler kills this process before that, the note is reported. It stays until two checks
        in a row find nothing lapsed: an outcome may be on its way in between.
        """
        now = self._now()
        running = {work.lease for work in self._jobs.running if not work.settling}
        found = {
            lease
            for lease, end in self._jobs.claims().items()
            if lease not in running and now >= end.ends
        }.union(self._unwritten)
        if found - self._lapsed and self._renewals.blame_database():
            self._lapsed |= found
            self._lapsed_note.write((), self._lapsed)
        elif not found and self._lapsed and self._was_clear:
            self._lapsed = frozenset()
            self._lapsed_note.withdraw()
        self._was_clear = not found
