"""What an orchestrator's maintenance does, each in one call on a given connection.

Tests of sweeps call this module alone: when the engine's own functions change, this file does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from queue_workflows import db
from queue_workflows.claim import admission, row_isolation
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.maintenance import periodic
from queue_workflows.maintenance import sweeps as maintenance_sweeps
from queue_workflows.types import Row
from tests.support import counting_cursor, transitions


class Sweeper:
    """The sweeps of one process, which leaves rows that raised alone for a while."""

    def __init__(self, conn: db.Connection, now_fn: Callable[[], float] = time.monotonic) -> None:
        self._conn = conn
        self._rows = row_isolation.Isolation(now_fn)

    def promote_due(self) -> int:
        """Admit all delayed jobs and runs whose time has come; return how many."""
        return admission.promote_due(self._conn, self._rows)

    def reclaim_lapsed(self, kind: transitions.Kind) -> list[Row]:
        """Take back the jobs of a kind whose leases have lapsed, counting a lapse of each."""
        return transitions.reclaim_lapsed(self._conn, kind, rows=self._rows)

    def reclaim_gone(self, kind: transitions.Kind, silent_s: float) -> list[Row]:
        """Take back the jobs of workers without a session that were not renewed `silent_s`."""
        return transitions.reclaim_gone(self._conn, kind, silent_s, rows=self._rows)


@contextmanager
def tasks(
    now_fn: Callable[[], float] = time.monotonic,
) -> Generator[periodic.PeriodicTasks]:
    """Yield the periodic tasks of one orchestrator, on a connection of their own."""
    made = periodic.PeriodicTasks(now_fn)
    try:
        yield made
    finally:
        made.close()


def soon(patch: pytest.MonkeyPatch, interval: str) -> None:
    """Let the periodic task with this interval run a hundred times a second."""
    patch.setattr(periodic, interval, 0.01)


def first_of_waits(patch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set once waits were checked, after which only a wake-up checks them."""
    patch.setattr(periodic, "EVENTS_S", math.inf)
    done, run = threading.Event(), periodic.PeriodicTasks.wake_waiting

    def wake_waiting(made: periodic.PeriodicTasks) -> None:
        run(made)
        done.set()

    patch.setattr(periodic.PeriodicTasks, "wake_waiting", wake_waiting)
    return done


def counter(made: periodic.PeriodicTasks) -> counting_cursor.Counter:
    """Count what periodic tasks execute on their own connection from now on."""
    return counting_cursor.Counter(made._dedicated.get())


def reclaim(conn: db.Connection, *, had_s: float | None = None) -> None:
    """Take back all jobs whose lease has lapsed.

    `had_s`: a claim that was renewed last before so many seconds ago counts no crash.
    """
    with db.statement(conn) as own:
        maintenance_sweeps.reclaim_all_lapsed(own, had_s=had_s)


def cancel_orphans(conn: db.Connection) -> None:
    """Cancel the jobs that were inserted while their run ended."""
    with db.statement(conn) as own:
        maintenance_sweeps.cancel_orphans(own)


def end_stalled(conn: db.Connection, *, quiet_s: float = 0.0) -> None:
    """Go on with the running runs that plain SQL has stopped, or end them with the reason."""
    begin = run_cache.on_connection(conn)
    maintenance_sweeps.StalledRuns(row_isolation.Isolation()).end(
        begin, quiet_s=quiet_s, for_s=math.inf
    )


def short_passes(conn: db.Connection) -> Callable[[], None]:
    """Return a call that does the same for the runs for which the shortest pass has time."""
    made = maintenance_sweeps.StalledRuns(row_isolation.Isolation())
    begin = run_cache.on_connection(conn)
    return lambda: made.end(begin, quiet_s=0.0, for_s=0.0)


def expire_inputs(conn: db.Connection) -> None:
    """End the waits of input nodes that are past their timeout."""
    with db.statement(conn) as own:
        maintenance_sweeps.expire_inputs(own)


def hold_overdue_input(conn: db.Connection, job_id: str) -> bool:
    """Lock the wait of an input node that is past its timeout, before its end; False: it is not."""
    return maintenance_sweeps.lock_overdue(conn, job_id) is not None


def admit_missed_waiters(conn: db.Connection) -> int:
    """Admit the first waiter of each free lock key; return how many."""
    return statements.promotion.admit_missed_waiters(conn)


def admit_from_partitions(conn: db.Connection) -> int:
    """Admit jobs of limited partitions whose time has come or that were missed."""
    return statements.queues.admit_from_partitions(conn)


def served(conn: db.Connection, stale_s: float) -> list[str]:
    """Return the queues that a worker takes jobs of which was seen within that time."""
    return statements.unserved_jobs.served(conn, stale_s=stale_s)


def unserved(conn: db.Connection, stale_s: float) -> tuple[int, int]:
    """Return how many jobs wait for their lock key again, and how many let others go first."""
    found = served(conn, stale_s)
    unserved = statements.unserved_jobs
    back = admission.in_batches(conn, unserved.unblock_served, found)
    return back, admission.in_batches(conn, unserved.block_unserved, found)


def unserved_models(conn: db.Connection) -> list[Row]:
    """Return the models whose waiting jobs no live worker takes, each with reason and detail."""
    return statements.models.unserved(conn)


def flagged_models(conn: db.Connection) -> list[Row]:
    """Return the models that a sweep has flagged as unserved, with reason and number of jobs."""
    return statements.models.flagged(conn)


def wanted(conn: db.Connection) -> set[str]:
    """Return the sweeps that have work: `reclaim`, `input-timeouts`, `lock-keys`, `limits`."""
    found = statements.pending.sweeps(conn)
    names = {
        "reclaim": found["leases"],
        "input-timeouts": found["inputs"],
        "lock-keys": found["lock_queues"],
        "limits": found["partitions"],
    }
    return {name for name, has_work in names.items() if has_work}
