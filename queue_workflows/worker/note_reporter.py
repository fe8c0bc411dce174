"""Report the notes of ended workers, so that no job is charged for an exit without its fault."""

from __future__ import annotations

import fcntl
import logging
import math
import os
from pathlib import Path

from queue_workflows import db
from queue_workflows.engine import handback, held_claims, job_tables, recovery, row_isolation
from queue_workflows.runtime import clock, identity, service
from queue_workflows.worker import notes

_log = logging.getLogger(__name__)
REPORT_FOR_S = 10.0
"""Seconds for which a note is reported again.

Meanwhile the server may still execute the last statements of the dead worker.
"""
AGAIN_S = 2.0
"""Seconds until the notes of dead workers are reported again, while one is left."""
SEARCH_S = 30.0
"""Seconds between two searches of a worker for the notes of others on this machine."""
STOP_S = 2.0


class Reporter:
    """Report the notes of ended workers of this machine, on a dedicated connection."""

    def __init__(self, dedicated: db.DedicatedConnection) -> None:
        self._dedicated = dedicated
        self._reported: dict[Path, float] = {}
        self._are_left = False

    def pause_s(self) -> float:
        """Return how long a worker that searches for notes waits before it reports again."""
        return AGAIN_S if self._are_left else SEARCH_S

    def report(self) -> bool:
        """Hand the claims of the notes back without a crash; subtract a crash already counted.

        Each note is reported for REPORT_FOR_S seconds and then deleted. Returns False while a note
        is left. Then it must be reported again, its process may still run, or another worker is
        reporting it. Raises the errors of the database.
        """
        self._are_left = True
        left = [path for path in notes.paths() if not self._report(path)]
        self._reported = {path: at for path, at in self._reported.items() if path in left}
        self._are_left = bool(left)
        return not left

    def _report(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                # The process that wrote the note holds this lock while it may still stay. And two
                # workers that report a note at once could both subtract the same crash: neither
                # sees the other's uncommitted `death` event.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return False
                note = notes.read(file, path)
                if note is not None and not note.writer_has_ended():
                    return False
                if note is not None:
                    complete = self._excuse(note)
                    first = self._reported.setdefault(path, clock.boot_s())
                    if not complete or clock.boot_s() - first < REPORT_FOR_S:
                        return False
                path.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            _log.debug("the note %s cannot be reported yet: %s", path, error)
            return False
        return True

    def _excuse(self, note: notes.Note) -> bool:
        """Report each claim by itself; return False if one has to be reported again."""
        complete = True
        with self._dedicated.using() as conn:
            for lease in note.leases:
                try:
                    excused = recovery.excuse(conn, lease)
                except db.Error as error:
                    # A row that somebody else locks must not keep the other claims charged.
                    if conn.closed or not row_isolation.is_held_up(error):
                        raise
                    _log.warning(
                        "job %r is reported later: %s",
                        lease.job_id,
                        error,
                        extra={"job_id": lease.job_id},
                    )
                    excused, complete = False, False
                if excused:
                    _log.info(
                        "job %s: no crash is counted, its worker could not reach the database",
                        lease.job_id,
                    )
            for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
                for worker_id in note.workers:
                    late = held_claims.held_by(conn, table, worker_id)
                    db.run(
                        conn,
                        handback.hand_back_all(
                            late, reason="its worker had exited before this claim"
                        ),
                    )
                    self._excuse_unanswered(conn, table, worker_id, note)
        return complete

    @staticmethod
    def _excuse_unanswered(
        conn: db.Connection, table: job_tables.JobTable, worker_id: str, note: notes.Note
    ) -> None:
        """Subtract the crashes of claims whose replies the worker had not got when it exited."""
        asked_at = note.asked.get(worker_id)
        if asked_at is not None and note.boot == identity.boot_id():
            ago_s = clock.boot_s() - asked_at
            recovery.excuse_unanswered(conn, table, worker_id, asked_ago_s=ago_s)


class ReportLoop:
    """Report the notes of dead workers on a thread of its own, until none is left.

    On a thread of its own: a frozen connection must not delay the recovery of other deaths.
    """

    def __init__(self) -> None:
        self._dedicated = db.DedicatedConnection()
        self._reporter = Reporter(self._dedicated)
        self._left = False
        self._loop = service.Loop("crash-notes", [service.Task("notes", self._pause, self._report)])

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread; leave what is not reported to the next worker."""
        if self._loop.stop(STOP_S):
            self._dedicated.close()

    def wake(self) -> None:
        """Report now, since a worker that may have left a note has died."""
        self._left = True
        self._loop.wake("notes")

    def _pause(self) -> float:
        return AGAIN_S if self._left else math.inf

    def _report(self) -> None:
        """Report the notes of dead workers; the sweep may have counted crashes before.

        It has, if this process had no connection when the worker died.
        """
        if not self._left:
            return
        left, self._left = True, False
        try:
            left = not self._reporter.report()
        finally:
            self._left |= left  # a further death may have set it meanwhile
        if not left:
            self._dedicated.close()
