"""The orchestrator's duties: start runs, dispatch, take answers, and every sweep."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from queue_workflows import config, db, errors, input_listener, workers
from queue_workflows.dag import payload
from queue_workflows.dispatch import drain, inputs, run_cache, starts
from queue_workflows.engine import (
    cancellation,
    input_timeouts,
    job_tables,
    lock_queues,
    models,
    pending,
    poison,
    promotion,
    queues,
    recovery,
    row_isolation,
)
from queue_workflows.operations import retention
from queue_workflows.runtime import service
from queue_workflows.types import NowFn, Row, Unreadable

_log = logging.getLogger(__name__)
CHANNEL = "orchestrator_work"
ORPHAN_SWEEP_S = 60.0
"""It looks at every waiting job; the claim refuses orphans meanwhile."""
UNASSIGNABLE_S = 10.0
HEAD_START_S = 0.004
"""How long events are left to the workers that wrote them, who mostly dispatch them at once."""
FLAG, UNFLAG = "flag of model", "end of the flag of model"
STREAM_PAUSE_S = 0.04
STREAM_WITHIN_S = 0.1
"""In a stream of events (a fan) they are taken together: each round costs as much as its batch."""


class NodePool:
    """Runs the orchestrator's threads; any number of pools may work on one database.

    `register_builtins` is called once at start. `cpu_workers` and `gpu_workers` are accepted and
    ignored: workers are processes of their own. `pause(seconds)` waits between tries of the
    recovery and returns whether to stop; by default it waits for `stop`.
    """

    def __init__(
        self,
        register_builtins: Callable[[], None] | None = None,
        *,
        cpu_workers: int | None = None,
        gpu_workers: int | None = None,
        now_fn: NowFn = time.monotonic,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        del cpu_workers, gpu_workers
        self._pause = pause
        self._register = register_builtins
        self._now = now_fn
        self._look_at = self._drained_at = -math.inf
        self._drain_at: float | None = None
        """When events that were notified are to be drained."""
        self._kept = db.DedicatedConnection()
        self._begin = run_cache.on_connection(self._kept)
        self._rows = row_isolation.Isolation(now_fn)
        self._prune_rows = row_isolation.Isolation(now_fn)
        self._waiting_said = False
        self._stopped = threading.Event()
        self._inputs = input_listener.InputListener(begin=self._begin, rows=self._rows)
        self._sweeps = Sweeps(now_fn)
        self._services: list[service.Service] = []

    def start(self) -> None:
        """Recover what is lapsed or has no owner, then start dispatching and sweeping.

        The recovery is tried NODE_POOL_RECOVERY_RETRIES times with NODE_POOL_RECOVERY_BACKOFF_S
        seconds between; then its error is raised, nothing has started, and `start` may be called
        again. Raises RuntimeError when the pool was started before. Returns without having started
        anything when `stop` was called meanwhile.
        """
        if self._services or self._stopped.is_set():
            raise RuntimeError("this pool was started before; make a new one")
        if self._register is not None:
            self._register()
        if not recover(self._pause or self._stopped.wait):
            return
        listener = db.listen(CHANNEL, poll_s=self._poll_s)
        self._services = [
            service.Follow("dispatch", listener, self._act),
            self._sweeps.loop(),
            # Apart: leases must not wait until a year's rows are gone.
            service.Loop("prune", [self._pruning()]),
        ]
        for each in self._services:
            each.start()

    def stop(self) -> None:
        """Stop both, finish the decision under way, and close the connection."""
        self._stopped.set()
        for each in self._services:
            each.stop()
        self._sweeps.close()
        self._kept.close()

    def _pruning(self) -> service.Task:
        return service.Task("prune", config.NODE_EVENT_PRUNE_INTERVAL_S.read, self._prune)

    def _prune(self) -> None:
        gone: Counter[str] = Counter()
        for kind, count in retention.batches(self._prune_rows):
            gone[kind] += count
            if self._stopped.is_set():
                break
        if said := ", ".join(f"{count} {kind}" for kind, count in gone.items() if count):
            _log.info("past their retention and deleted: %s", said)

    def _poll_s(self) -> float:
        due = self._look_at if self._drain_at is None else min(self._look_at, self._drain_at)
        return max(0.0, min(config.DISPATCH_POLL_S.read(), due - self._now()))

    def _act(self, wake: db.Wake) -> None:
        try:
            now = self._now()
            # Under a stream of notifications what has become due is seen by a look only.
            if now >= self._look_at or wake.reason in ("connected", "wake"):
                self.look()
                return
            kinds = {text for _, text in wake.notified}
            if "event" in kinds and self._drain_at is None:
                streaming = now - self._drained_at < STREAM_WITHIN_S
                self._drain_at = now + (STREAM_PAUSE_S if streaming else HEAD_START_S)
            events = self._drain_at is not None and now >= self._drain_at
            if events:
                self._drain_at, self._drained_at = None, now
            self.work(runs="run" in kinds, events=events, inputs="input" in kinds)
        except db.Error:
            self._kept.close()
            raise

    def look(self) -> None:
        """See what there is to do, in one statement, and do it."""
        self._look_at = self._now() + config.DISPATCH_POLL_S.read()
        self._drain_at = None
        conn = self._kept.get()
        seen = pending.work(conn)
        row_isolation.all_of(
            [
                lambda: seen.due and promotion.promote_due(conn, self._rows),
                lambda: self.work(
                    runs=seen.runs or seen.due, events=seen.events, inputs=seen.answers
                ),
            ]
        )

    def work(self, *, runs: bool, events: bool, inputs: bool) -> None:
        """Start runs, take answers and dispatch events by turns, until nothing of it is left.

        An error of one kind leaves the other kinds their turn, and is raised afterwards.
        """
        kinds = {self._start: runs, self._answer: inputs, self._drain: events}
        todo = [act for act, wanted in kinds.items() if wanted]
        while todo and not self._stopped.is_set():
            turn, todo = todo, list[Callable[[], bool]]()
            row_isolation.all_of([functools.partial(_again, act, todo) for act in turn])

    def _start(self) -> bool:
        """Start runs; whether there may be more to start."""
        started, waiting = starts.start_queued(begin=self._begin, rows=self._rows)
        self._say_waiting(waiting)
        return started > 0

    def _answer(self) -> bool:
        self._inputs.process_all(self._stopped)
        return False

    def _drain(self) -> bool:
        """Dispatch events; whether there may be more to dispatch."""
        dispatched = drain.drain_outbox(begin=self._begin, rows=self._rows)
        if dispatched:
            # An event that came in beside these was not notified.
            self._look_at = min(self._look_at, self._now() + STREAM_PAUSE_S)
        return dispatched >= drain.RUNS_A_ROUND

    def _say_waiting(self, run_ids: list[str]) -> None:
        if run_ids and not self._waiting_said:
            self._waiting_said = True
            _log.warning(
                "queued runs wait (%s and others): this orchestrator has no workflow provider; "
                "start it with --app, or call set_workflow_provider()",
                run_ids[0],
            )


def _again(act: Callable[[], bool], todo: list[Callable[[], bool]]) -> None:
    """Do `act`, and put it on the list if there may be more for it to do."""
    if act():
        todo.append(act)


def recover(pause: Callable[[float], bool]) -> bool:
    """Reclaim lapsed and ownerless jobs, and touch no fresh lease; False when `pause` says stop.

    No crash is counted: nobody knows whether the database was there until now. Tried
    NODE_POOL_RECOVERY_RETRIES times, with `pause(NODE_POOL_RECOVERY_BACKOFF_S)` between; then the
    error is raised.
    """
    left = max(1, config.NODE_POOL_RECOVERY_RETRIES.read())
    while True:
        left -= 1
        try:
            reclaim(had_s=0.0)
            sweep_orphans()
        except db.Error as error:
            if not left:
                raise
            _log.warning("recovery at start, %d tries left: %s", left, error)
            if pause(config.NODE_POOL_RECOVERY_BACKOFF_S.read()):
                return False
        else:
            return True


class Sweeps:
    """The sweeps that need a memory: since when this process has had the database without a break.

    Staleness that spans a break (an outage, a suspended box) is nobody's fault but the break's.
    """

    BREAK_S = 15.0
    BREAK_MIN_S = 1.0
    """A break is half of a small SILENT_WORKER_AFTER_S, within these bounds."""
    MISSED_S = 1.0
    """What a busy machine may add to the time between two looks."""

    def __init__(self, now_fn: NowFn = time.monotonic) -> None:
        self._now = now_fn
        self._since = self._seen = self._whole = now_fn()
        """`_whole`: since when no look was missed, which is finer than what counts as a break."""
        self._kept = db.DedicatedConnection()
        """Idle sweeps are single statements, not pool checkouts."""
        self._rows = row_isolation.Isolation(now_fn)
        self._wake: Callable[..., None] = lambda *_: None
        self._unserved: dict[str, float] = {}
        """Models whose jobs no worker takes, and since when."""

    def close(self) -> None:
        """Close the connection; the next sweep opens another."""
        self._kept.close()

    def loop(self) -> service.Loop:
        """The service that runs them all; those of `look` run in the round of a look that asks."""
        made = service.Loop("sweeps", maintenance(self), now_fn=self._now)
        self._wake = made.wake
        return made

    def look(self) -> None:
        """See which frequent sweeps have something to do, and note that the database was there.

        In one statement, where each of them alone would be one or two that find nothing.
        """
        with self._kept.using() as conn:
            found = pending.sweeps(conn)
        self._note()
        wanted = {
            "reclaim": found.leases,
            "input-timeouts": found.inputs,
            "lock-keys": found.lock_queues,
            "limits": found.partitions,
        }
        if names := [name for name, there in wanted.items() if there]:
            self._wake(*names)

    def reclaim(self) -> None:
        """Take back what is lapsed, and note that the database was there.

        Where it was not since before the last renewal of a claim, the claim's end is no evidence of
        a crash: its worker could not renew either.
        """
        had_s = 0.0 if self._missed() else self._now() - self._whole
        with self._kept.using() as conn:
            reclaim(conn, self._rows, had_s=had_s)
        self._note()

    def reclaim_gone(self) -> None:
        """Take back what workers held whose session has ended and that renew no more.

        Only once the database has been here for as long: an outage silences everybody.
        """
        silent_s = config.SILENT_WORKER_AFTER_S.read()
        if not self._was_there_for(silent_s):
            return
        with self._kept.using() as conn:
            if not pending.has_silent_jobs(conn, silent_s):
                return
            for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
                for row in recovery.reclaim_gone(conn, table, silent_s, rows=self._rows):
                    _log.warning(
                        "job %s: the session of its worker is gone, now %s",
                        row["id"],
                        row["status"],
                    )

    def sweep_orphans(self) -> None:
        """Cancel jobs that came in beside the end of their run."""
        with self._kept.using() as conn:
            sweep_orphans(conn, self._rows)

    def expire_inputs(self) -> None:
        """End the waits of input nodes that are over."""
        with self._kept.using() as conn:
            expire_inputs(conn, self._rows)

    def repair_lock_queues(self) -> None:
        """Let in whose turn with a lock key was missed, or was kept by a job that nobody serves.

        No job loses its turn before the database was there for as long as makes a worker stale.
        """
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        with self._kept.using() as conn:
            served = lock_queues.served(conn, stale_after_s)
            lock_queues.unblock_served(conn, served)
            if self._was_there_for(stale_after_s) and (
                count := lock_queues.block_unserved(conn, served)
            ):
                _log.warning(
                    "%d jobs gave up their turn with a lock key: no worker serves their queue; "
                    "`queue-workflows status` names it",
                    count,
                )
            if count := promotion.admit_missed_waiters(conn):
                _log.warning("%d jobs had missed their turn with a lock key", count)

    def repair_partition_queues(self) -> None:
        """Look at the lines of limited partitions that are due, or that nobody was let in from."""
        with self._kept.using() as conn:
            queues.admit_from_partitions(conn)

    def _note(self) -> None:
        if self._broke():
            self._since = self._now()
        if self._missed():
            self._whole = self._now()
        self._seen = self._now()

    def _missed(self) -> bool:
        """Whether the last look is so long ago that one at least failed, or waited for a reply."""
        return self._now() - self._seen > self.MISSED_S + 2 * config.LEASE_RECLAIM_INTERVAL_S.read()

    def _broke(self) -> bool:
        half_s = config.SILENT_WORKER_AFTER_S.read() / 2
        break_s = max(self.BREAK_MIN_S, min(self.BREAK_S, half_s))
        return self._now() - self._seen > max(break_s, 3 * config.LEASE_RECLAIM_INTERVAL_S.read())

    def _was_there_for(self, seconds: float) -> bool:
        """Whether the database was; not so until `reclaim` has noted the end of a break."""
        return self._now() - self._since >= seconds and not self._broke()

    def flag_dead_workers(self) -> None:
        """Flag stale workers, once the database has been there for as long as makes one stale."""
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        if self._was_there_for(stale_after_s):
            with self._kept.using() as conn:
                workers.flag_stale(stale_after_s=stale_after_s, conn=conn)

    def flag_unassignable(self) -> None:
        """Flag gpu jobs that no live worker has been able to take for as long as makes one stale.

        Said once per reason, whichever orchestrator is first; taken back when one can.
        """
        stale_after_s = config.STALE_WORKER_AFTER_S.read()
        if not self._was_there_for(stale_after_s):
            self._unserved.clear()
            return
        with self._kept.using() as conn:
            rows = {row["model"]: row for row in models.unserved(conn)}
            now = self._now()
            wanting = [model for model, row in rows.items() if row["reason"]]
            self._unserved = {model: self._unserved.get(model, now) for model in wanting}
            for model, row in rows.items():
                if row["reason"] is None:
                    self._rows.attempt(UNFLAG, model, lambda model=model: unflag(conn, model))
                elif now - self._unserved[model] >= stale_after_s:
                    self._rows.attempt(FLAG, model, lambda row=row: flag(conn, row))


def flag(conn: db.Connection, row: Row) -> None:
    """Flag a line of gpu jobs, in one transaction, and say why unless it was said."""
    with db.transaction(conn) as own:
        said = models.flag(own, row)
    if said:
        what = f"model {row['model']}" if row["model"] else "gpu jobs without a model"
        _log.warning("no live worker can take %s: %s", what, row["detail"])


def unflag(conn: db.Connection, model: str) -> None:
    """Take the flag of a line away, in one transaction, and say so."""
    with db.transaction(conn) as own:
        said = models.unflag(own, model)
    if said:
        what = f"model {model}" if model else "gpu jobs without a model"
        _log.info("%s: no job waits any more that no worker can take", what)


def maintenance(duties: Sweeps) -> list[service.Task]:
    """Every sweep with its interval; a new one is one line, and those at `inf` wait for a look."""

    dead_s = config.DEAD_WORKER_SWEEP_INTERVAL_S.read

    def gone_s() -> float:
        return config.SILENT_WORKER_AFTER_S.read() / 3

    return [
        service.Task("look", config.LEASE_RECLAIM_INTERVAL_S.read, duties.look),
        service.Task("reclaim", math.inf, duties.reclaim),
        service.Task("gone", gone_s, duties.reclaim_gone),
        service.Task("orphans", ORPHAN_SWEEP_S, duties.sweep_orphans),
        service.Task("dead-workers", dead_s, duties.flag_dead_workers),
        service.Task("unassignable", UNASSIGNABLE_S, duties.flag_unassignable),
        service.Task("input-timeouts", math.inf, duties.expire_inputs),
        service.Task("lock-keys", math.inf, duties.repair_lock_queues),
        service.Task("limits", math.inf, duties.repair_partition_queues),
    ]


def reclaim(
    conn: db.Connection | None = None,
    rows: row_isolation.Isolation | None = None,
    *,
    had_s: float | None = None,
) -> None:
    """Take back the jobs of both families whose lease has lapsed, batch after batch.

    Rows that raise are set aside in `rows` (None: for this call), here and below. `had_s`: for how
    long the caller has had the database; a lease that was renewed last before that counts no
    crash. None: all count one.
    """
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
            if had_s is not None:
                while taken := recovery.excuse_lapsed(own, table, had_s=had_s, rows=kept):
                    _say_lapsed(taken, "lease lapsed while the database was away")
            while taken := recovery.reclaim_lapsed(own, table, had_s=had_s, rows=kept):
                _say_lapsed(taken, "lease lapsed")


def _say_lapsed(rows: list[Row], what: str) -> None:
    for row in rows:
        if "node_id" in row:
            name = f"node {row['node_id']} of run {row['run_id']}"
        else:
            name = f"ingest job {row['id']}"
        _log.warning("%s: %s, now %s", name, what, row["status"])


def sweep_orphans(
    conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> None:
    """Cancel jobs that came in beside the end of their run, batch after batch."""
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        while kept.batch(own, cancellation.ORPHANS):
            pass


TIMEOUT = "end of the wait of node job"
ANSWER_GRACE_S = 5.0
"""How long an answer that came before the timeout has to be taken before the next look."""


def expire_inputs(
    conn: db.Connection | None = None, rows: row_isolation.Isolation | None = None
) -> None:
    """Input nodes past their `timeout_s` take their default or fail, one transaction each."""
    kept = rows or row_isolation.Isolation()
    with db.statement(conn) as own:
        while job_id := input_timeouts.next_overdue(own, kept.aside(TIMEOUT)):
            kept.attempt(
                TIMEOUT,
                job_id,
                lambda job_id=job_id: _end_wait(own, job_id),
                lambda error, failures, job_id=job_id: _give_up(own, job_id, error, failures),
            )


def _end_wait(conn: db.Connection, job_id: str) -> None:
    with conn.transaction():
        job = input_timeouts.lock_overdue(conn, job_id)
        if job is None:
            return
        if job["answered"] and not job["over"]:
            input_timeouts.extend_wait(conn, job_id, ANSWER_GRACE_S)
            return
        if not job["over"]:
            _expire(conn, job)
        input_timeouts.end_wait(conn, job_id)


def _give_up(conn: db.Connection, job_id: str, error: BaseException, failures: int) -> bool:
    """Fail a node whose wait could not be ended in too many tries; whether that was so."""
    with conn.transaction():
        if not poison.node_job(conn, job_id, error, failures):
            return False
        input_timeouts.end_wait(conn, job_id)
        return True


def _expire(conn: db.Connection, job: Row) -> None:
    found: Any = job["policy"]
    policy = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    error = f"nobody answered within {_plain(policy.get('timeout_s'))} s"
    default = None
    if isinstance(found, Unreadable):
        error = f"its policy cannot be read: {found.reason}"
    elif "default" in policy:
        try:
            default = inputs.answer_delta(job, policy["default"])
        except errors.InvalidPayload as refused:
            error = str(refused)
    error = payload.error_text(error)
    if input_timeouts.time_out(conn, job["id"], default=default, error=error) is not None:
        said = "takes its default" if default is not None else "fails"
        _log.warning("node %s of run %s: %s; it %s", job["node_id"], job["run_id"], error, said)


def _plain(seconds: object) -> str:
    """As text what a definition has as a number, and a plain SQL writer perhaps as anything."""
    if isinstance(seconds, (int, float)) and abs(seconds) < 1e300:
        return f"{seconds:g}"
    return f"{seconds!s:.80}"
