"""List the periodic tasks of an orchestrator, and keep the state that they share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

from queue_workflows import config, db, events, history, workers
from queue_workflows.claim import admission, row_isolation
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.maintenance import sweeps
from queue_workflows.runtime import service
from queue_workflows.types import NowFn, Row

_log = logging.getLogger(__name__)
ORPHAN_SWEEP_S: Final = 60.0
"""It reads every waiting job; until then the claim refuses orphans."""
STALLED_S: Final = 30.0
STALLED_QUIET_S: Final = 10.0
"""How long the end of a node may precede its outbox event: with 0.3.0 they are two transactions."""
STALLED_NEXT_S: Final = 5.0
"""How long after a pass that had no time for all running runs the next one begins."""
STALLED_PASS_S: Final = 0.5
"""How long one pass may delay the other tasks, such as `reclaim`."""
UNASSIGNABLE_S: Final = 10.0
EVENTS_S: Final = 5.0
"""Seconds between checks for waits that began, or whose rows were locked, as their event came."""
LEFT_KEYS_S: Final = 1.0
"""Seconds between checks of lock keys while some are found that commits have left."""
COUNT_STEPS: Final = 20
"""With the default interval that is faster than a server makes transactions."""
FLAG: Final = "flag of model"


class Availability:
    """Distinguish heartbeats that an outage made stale from heartbeats of dead workers.

    A heartbeat that became stale during an outage, or while this machine was suspended, proves
    nothing. Call `note` after each statement that succeeded, every LEASE_RECLAIM_INTERVAL_S.
    """

    BREAK_S = 15.0
    BREAK_MIN_S = 1.0
    """A break lasts half of STALE_WORKER_AFTER_S, within these bounds."""
    LATE_S = 1.0
    """Seconds that a busy machine may add between two statements."""

    def __init__(self, now_fn: NowFn) -> None:
        self._now = now_fn
        self._seen = now_fn()
        """When the last statement succeeded."""
        self._since = self._seen
        """When the last break ended."""
        self._unmissed = self._seen
        """When a statement was last late, which takes a shorter gap than a break."""

    def note(self) -> None:
        """Record that the database answered now."""
        is_late, is_broken = self._gap()  # since the last time, so before it is set
        self._seen = self._now()
        if is_broken:
            self._since = self._seen
        if is_late:
            self._unmissed = self._seen

    def unmissed_s(self) -> float:
        """Return the seconds since a statement was last late; 0.0 if one is late now."""
        return 0.0 if self._gap()[0] else self._now() - self._unmissed

    def lasts(self, seconds: float) -> bool:
        """Return whether there was no break for that long; False until `note` ended a break."""
        return self._now() - self._since >= seconds and not self._gap()[1]

    def _gap(self) -> tuple[bool, bool]:
        """Return whether a statement is late since the last `note`, and whether that is a break.

        A statement that failed, or that waits for its reply, makes it late.
        """
        quiet_s, check_s = self._now() - self._seen, config.LEASE_RECLAIM_INTERVAL_S.read()
        half_s = config.STALE_WORKER_AFTER_S.read() / 2
        break_s = max(self.BREAK_MIN_S, min(self.BREAK_S, half_s))
        return quiet_s > self.LATE_S + 2 * check_s, quiet_s > max(break_s, 3 * check_s)


class PeriodicTasks:
    """Every periodic task of an orchestrator, on a connection of its own.

    `check_s`: how often leases and other dues are checked. `lock_keys_s`: how often lock keys are
    checked although nothing shows that one was missed. `plans`: whether runs that plain SQL has
    stopped are continued, which takes the app's hooks.
    """

    def __init__(
        self,
        now_fn: NowFn = time.monotonic,
        *,
        check_s: Callable[[], float] = config.LEASE_RECLAIM_INTERVAL_S.read,
        lock_keys_s: float = math.inf,
        plans: bool = True,
    ) -> None:
        self._now = now_fn
        self._check_s = check_s
        self._lock_keys_s = lock_keys_s
        self._plans = plans
        self._database = Availability(now_fn)
        self._dedicated = db.DedicatedConnection(lock_s=db.LOOP_LOCK_S)
        """An idle task is a single statement, without a checkout from the pool."""
        self._rows = row_isolation.Isolation(now_fn)
        self._stalled = sweeps.StalledRuns(self._rows, now_fn)
        self.wake: Callable[..., None] = lambda *_: None
        """Makes the tasks of these names due at once, while the loop runs."""
        self._has_counted = True
        """Whether the last count of events had the rights for it."""
        self._found_left_keys = False
        """Whether the last check found lock keys with waiters and no admitted job."""
        self._unserved: dict[str, float] = {}
        """Models whose jobs no worker can take, and since when."""

    def close(self) -> None:
        """Close the connection; the next task opens another."""
        self._dedicated.close()

    def loop(self) -> service.Loop:
        """Return the service that runs all tasks."""
        made = service.Loop("maintenance", self.tasks(), now_fn=self._now)
        self.wake = made.wake
        return made

    def tasks(self) -> list[service.Task]:
        """Return every task with its interval; `inf`: it runs only when `check` wakes it."""

        def lost_s() -> float:
            return config.STALE_WORKER_AFTER_S.read() / 3

        def stalled_s() -> float:
            return STALLED_NEXT_S if self._stalled.after else STALLED_S

        def keys_s() -> float:
            most_s = self._lock_keys_s
            return min(LEFT_KEYS_S, most_s) if self._found_left_keys else most_s

        dead_s = config.DEAD_WORKER_SWEEP_INTERVAL_S.read
        return [
            service.Task("check", self._check_s, self.check),
            service.Task("reclaim", math.inf, self.reclaim),
            service.Task("lost-sessions", lost_s, self.reclaim_lost_sessions),
            service.Task("orphans", ORPHAN_SWEEP_S, self.cancel_orphans),
            *([service.Task("stalled", stalled_s, self.end_stalled)] if self._plans else []),
            service.Task("dead-workers", dead_s, self.flag_dead_workers),
            service.Task("unassignable", UNASSIGNABLE_S, self.flag_unassignable),
            service.Task("metrics", history.COUNT_EVERY_S, self.count_events),
            service.Task("events", EVENTS_S, self.wake_waiting),
            service.Task("input-timeouts", math.inf, self.expire_inputs),
            service.Task("lock-keys", keys_s, self.repair_lock_queues),
            service.Task("limits", math.inf, self.repair_partition_queues),
        ]

    def check(self) -> None:
        """Wake the frequent tasks that have something to do, found by one statement for all."""
        with self._dedicated.using() as conn:
            found = statements.pending.sweeps(conn)
        self._database.note()
        wanted = {
            "reclaim": found["leases"],
            "input-timeouts": found["inputs"],
            "lock-keys": found["lock_queues"],
            "limits": found["partitions"],
        }
        if names := [name for name, has_work in wanted.items() if has_work]:
            self.wake(*names)

    def reclaim(self) -> None:
        """Take back jobs whose lease has lapsed.

        A claim that was renewed last before a gap in this process's own access to the database
        counts no lapse: its worker had the same gap.
        """
        had_s = self._database.unmissed_s()
        with self._dedicated.using() as conn:
            sweeps.reclaim_all_lapsed(conn, self._rows, had_s=had_s)
        self._database.note()

    def reclaim_lost_sessions(self) -> None:
        """Take back jobs whose worker's session has ended and that are renewed no more.

        Does nothing within STALE_WORKER_AFTER_S of a break: an outage ends every session.
        """
        silent_s = config.STALE_WORKER_AFTER_S.read()
        if not self._database.lasts(silent_s):
            return
        with self._dedicated.using() as conn:
            if statements.pending.silent_jobs(conn, silent_s=silent_s):
                sweeps.reclaim_lost_sessions(conn, silent_s, self._rows)

    def cancel_orphans(self) -> None:
        """Cancel jobs that were inserted while their run ended."""
        with self._dedicated.using() as conn:
            sweeps.cancel_orphans(conn, self._rows)

    def end_stalled(self) -> None:
        """Go on with the runs that plain SQL has stopped, or end them with the reason."""
        begin = run_cache.on_connection(self._dedicated)
        self._stalled.end(begin, quiet_s=STALLED_QUIET_S, for_s=STALLED_PASS_S)

    def wake_waiting(self) -> None:
        """Wake jobs that wait although their event is there, a bounded number of them.

        The rest follows at once, after the other tasks that are due.
        """
        with self._dedicated.using() as conn:
            woken = statements.events.wake_waiting(
                conn, name=None, key=None, most=events.WAKE_BATCH
            )
        if woken >= events.WAKE_BATCH:
            self.wake("events")

    def expire_inputs(self) -> None:
        """End the waits of input nodes that are past their timeout."""
        with self._dedicated.using() as conn:
            sweeps.expire_inputs(conn, self._rows)

    def repair_lock_queues(self) -> None:
        """Admit missed waiters of lock keys, and waiters for a job whose queue has no worker.

        A queue counts as unserved only after the database was available for STALE_WORKER_AFTER_S.
        """
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        with self._dedicated.using() as conn:
            served = statements.unserved_jobs.served(conn, stale_s=stale_after_s)
            unserved = statements.unserved_jobs
            admission.in_batches(conn, unserved.unblock_served, served)
            if self._database.lasts(stale_after_s) and (
                count := admission.in_batches(conn, unserved.block_unserved, served)
            ):
                _log.warning(
                    "%d jobs gave up their lock key: no worker serves their queue; "
                    "`queue-workflows status` names it",
                    count,
                )
            count = statements.promotion.admit_missed_waiters(conn)
        if count and not self._found_left_keys:
            _log.warning("admitted %d jobs that waited for a lock key that was free", count)
        self._found_left_keys = count > 0

    def repair_partition_queues(self) -> None:
        """Admit jobs of limited partitions whose time has come or that were missed."""
        with self._dedicated.using() as conn:
            statements.queues.admit_from_partitions(conn)

    def count_events(self) -> None:
        """Count new events of the history of jobs, for metrics; the rest at its next run.

        A backlog takes several runs, so that it delays no other task for long. A role without the
        rights, as after an upgrade, counts nothing, which is logged once.
        """
        with self._dedicated.using() as conn:
            seen = statements.metrics.progress(conn)
            if seen["behind"] in (0, 1):  # the count before is a transaction, too
                return
            may_count = seen["may_count"]
            if not may_count and self._has_counted:
                _log.warning("no events are counted for metrics: %s", history.NO_RIGHTS)
            self._has_counted = may_count
            for _ in range(COUNT_STEPS if may_count else 0):
                if not history.count_step(conn):
                    break

    def flag_dead_workers(self) -> None:
        """Flag workers whose heartbeat is stale while they own running jobs."""
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        if self._database.lasts(stale_after_s):
            with self._dedicated.using() as conn:
                workers.flag_stale(stale_after_s=stale_after_s, conn=conn)

    def flag_unassignable(self) -> None:
        """Flag models whose queued jobs no live worker could take for STALE_WORKER_AFTER_S.

        Each reason is logged once, whichever orchestrator is first. The flag goes when a worker
        can take the jobs.
        """
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        if not self._database.lasts(stale_after_s):
            self._unserved.clear()
            return
        with self._dedicated.using() as conn:
            rows = {row["model"]: row for row in statements.models.unserved(conn)}
            now = self._now()
            wanting = [model for model, row in rows.items() if row["reason"]]
            self._unserved = {model: self._unserved.get(model, now) for model in wanting}
            for model, row in rows.items():
                if row["reason"] is None or now - self._unserved[model] >= stale_after_s:
                    self._rows.attempt(FLAG, model, lambda row=row: _note_service(conn, row))


def _note_service(conn: db.Connection, row: Row) -> None:
    """Flag a model of `unserved`, or end its flag; log it if that is new.

    The first 100 of its waiting jobs get an event.
    """
    model, is_unserved = row["model"], row["reason"] is not None
    values = {**row, "event": "unassignable" if is_unserved else "assignable"}
    values["detail"] = row["detail"] if is_unserved else None
    change = statements.models.flag if is_unserved else statements.models.unflag
    log = statements.models.log_for_model if model else statements.models.log_without_model
    with conn.transaction():
        is_new = change(conn, **values) > 0
        if is_new:
            log(conn, **values)
    what = f"model {model}" if model else "gpu jobs without a model"
    if is_new and is_unserved:
        _log.warning("no live worker can take %s: %s", what, row["detail"])
    elif is_new:
        _log.info("a live worker can take %s again, or no job waits for one", what)
