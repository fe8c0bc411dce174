"""Record the ends of jobs whose executor has ended before them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.engine import handback, job_tables, recovery
from queue_workflows.runtime import clock, log_context
from queue_workflows.worker import (
    current_job,
    death_events,
    executors,
    guards,
    oom_kills,
    slot_keeper,
    slot_records,
)

_log = logging.getLogger(__name__)


class Deaths:
    """The ends of jobs whose handlers ran when their executor ended; written by `records`."""

    def __init__(
        self, host: str, endings: slot_keeper.Endings, records: slot_records.Records
    ) -> None:
        self._host = host
        self._endings = endings
        self._records = records
        self._oom = oom_kills.OomKills()

    def end(self, handle: executors.Handle, works: Sequence[current_job.Work]) -> None:
        """Write what was decided about the jobs, or charge them if nobody here killed it."""
        kills = self._oom_kills(handle)
        for work in works:
            decision = self._endings.decision(work)
            if decision is not None:
                self._records.add_ending(work, decision.write)
                self._endings.ended(work)
                continue
            assert handle.died is not None
            if handle.died.by_deadline:
                self.hand_back(work, "its worker was silent")
                self._endings.on_ended(guards.EXIT_LOST)
            elif handle.killed_for:
                self.hand_back(work, f"its executor was ended for {handle.killed_for}")
            else:
                self._charge(handle, work, kills, len(works) - 1)

    def _oom_kills(self, handle: executors.Handle) -> int | None:
        """Return the kills in the executor's own cgroup; without one, the new ones in ours."""
        ours = self._oom.new()
        of_its_own = None if handle.died is None else handle.died.oom_kills
        return ours if of_its_own is None else of_its_own

    def hand_back(self, work: current_job.Work, reason: str) -> None:
        """Hand a job back, uncounted, that runs no more."""
        lease = work.lease
        self._records.add_ending(work, lambda conn: handback.hand_back(conn, lease, reason=reason))

    def _charge(
        self, handle: executors.Handle, work: current_job.Work, oom_kills: int | None, others: int
    ) -> None:
        found = executors.death(handle, oom_kills, clock.boot_s() - work.started, others)
        _log.error("job %s: its executor %s", work.job["id"], found.evidence, extra=work.ids)
        self._records.add_ending(work, functools.partial(_charge, work.lease, self._host, found))


def _charge(
    lease: job_tables.Lease, host: str, found: executors.Death, conn: db.Connection
) -> bool:
    """Count a crash of the job, and record how its executor died, in one transaction.

    Returns True also if the claim was lost: a crash that was counted for that stays counted.
    """
    with conn.transaction():
        row = recovery.charge(conn, lease, evidence=payload.error_text(found.evidence))
        if row is not None:
            job = row | {"claimed_by": host}
            death_events.note(conn, lease.table, job, lease.worker_id, found.detail, found.evidence)
    if row is not None:
        what = f"node {row['node_id']}" if lease.table.in_run else f"ingest job {row['id']}"
        ids = log_context.ids_of_job(row)
        _log.warning("%s; %s is %s", found.evidence, what, row["status"], extra=ids)
    return True
