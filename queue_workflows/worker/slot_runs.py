"""The jobs that run in the executors of a worker: start, observe and end them."""

from __future__ import annotations

import functools
import logging
import math
import signal
from collections import deque

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.engine import claims, handback, job_tables, recovery
from queue_workflows.executor import protocol, registry
from queue_workflows.runtime import clock
from queue_workflows.types import Row
from queue_workflows.worker import (
    capture,
    claimer,
    crash_recovery,
    current_job,
    executor_set,
    executors,
    guards,
    slot_ahead,
    slot_jobs,
    slot_keeper,
    slot_records,
)

_log = logging.getLogger(__name__)


class Runs:
    """The running jobs of one worker, each in an executor of its own; an `executor_set.Owner`.

    For the thread of the executors, but for `kill`. What is to be written goes to `records`.
    """

    def __init__(
        self,
        table: job_tables.JobTable,
        who: claims.Claimant,
        claimer_: claimer.Claimer,
        registered: registry.Registered,
        *,
        executors_: executor_set.ExecutorSet,
        records: slot_records.Records,
        keeper: slot_keeper.SlotKeeper,
        endings: slot_keeper.Endings,
        ahead: slot_ahead.Ahead,
    ) -> None:
        self._ahead = ahead
        self._waiting: deque[current_job.Work] = deque()
        """Claimed jobs for which no executor is free yet, in the order of their claims."""
        self._table = table
        self._who = who
        self._claimer = claimer_
        self._registered = registered
        self._executors = executors_
        self._records = records
        self._keeper = keeper
        self._endings = endings
        names = registered.isolated_nodes if table.in_run else registered.isolated_tasks
        self._isolated = frozenset(names)
        self._busy: dict[job_tables.Lease, executors.Handle] = {}
        self._announcing: dict[job_tables.Lease, executors.Handle] = {}
        """The executors whose completed node is announced to the app once it is recorded."""
        self._asks: list[tuple[executors.Handle, current_job.Work, protocol.Ask]] = []
        self._oom = executors.OomKills()

    def kill(self, work: current_job.Work, now: bool) -> None:
        """End the executor of a job by SIGTERM, or at once; for any thread."""
        handle = self._busy.get(work.lease)
        if handle is not None:
            handle.kill_job(work, signal.SIGKILL if now else signal.SIGTERM)

    @property
    def busy(self) -> bool:
        """Return whether handlers run, or claimed jobs wait."""
        return bool(self._busy or self._waiting)

    @property
    def waiting(self) -> int:
        """Return how many claimed jobs wait for an executor."""
        return len(self._waiting)

    @property
    def late_at(self) -> float:
        """Return when a job has waited too long (`clock.boot_s`)."""
        return self._waiting[0].started + slot_ahead.WAIT_S if self._waiting else math.inf

    @property
    def asked(self) -> bool:
        """Return whether handlers wait for answers."""
        return bool(self._asks)

    # --- Start.

    def add(self, job: Row) -> None:
        """Let a claimed job wait for an executor; its claim is renewed from now on."""
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._who.lease_s)
        work = current_job.Work(self._table, job, lease_end)
        work.waiting = True
        self._keeper.begin(work)
        self._waiting.append(work)

    def start_waiting(self) -> None:
        """Send jobs to the free executors. After a database error the rest still waits."""
        while self._waiting and self._executors.idle:
            work = self._waiting[0]
            decision = self._endings.decision(work)
            if decision is not None:
                self._records.add_ending(work, decision.write)
            else:
                self._start(work)
            self._waiting.popleft()

    def return_waiting(self, *, stopping: bool) -> None:
        """Hand waiting jobs back, if the worker stops or the first has waited too long."""
        if not self._waiting or not (stopping or clock.boot_s() >= self.late_at):
            return
        self._ahead.reset()
        while self._waiting:
            work = self._waiting.popleft()
            self.hand_back(work, "shutdown" if stopping else "waited too long for an executor")

    def _start(self, work: current_job.Work) -> None:
        job = work.job
        wanted = slot_jobs.request(self._claimer.connection, self._table, job, self._registered)
        if not isinstance(wanted, slot_jobs.Request):
            work.settling = True
            self._records.add(work, wanted)
            return
        work.start_now()
        name = job["node_module"] if self._table.in_run else job["task_name"]
        handle = self._executors.take(isolated=name in self._isolated)
        self._busy[work.lease] = handle
        work.when_interrupted(functools.partial(handle.interrupt, work))
        try:
            handle.run(work, *wanted)
        except protocol.ChannelLost as error:
            self._executors.lose(handle, error)
            self._endings.hand_back(work, "its executor had ended")
        self._executors.sent(handle)

    # --- Messages.

    def received(self, handle: executors.Handle, message: protocol.Message) -> None:
        """Act on a message of an executor."""
        if isinstance(message, protocol.Outcome):
            self._on_outcome(handle, message)
        elif isinstance(message, protocol.Announced):
            handle.announcing = False
            self._executors.free(handle)
        elif handle.work is None or getattr(message, "key", None) != handle.key:
            return
        elif isinstance(message, protocol.Progress):
            handle.work.beat(message.value)
        elif isinstance(message, protocol.Ask):
            self._asks.append((handle, handle.work, message))
        elif isinstance(message, protocol.Log):
            self._print_record(handle.work, message)

    def printed(self, work: current_job.Work, data: bytes) -> None:
        """Keep what the handler of a job has printed."""
        self._keeper.printed(work, data)

    def _print_record(self, work: current_job.Work, message: protocol.Log) -> None:
        # The engine's own records are for the worker's log, as those of a plain worker are.
        if message.name.partition(".")[0] != capture.ENGINE:
            self._keeper.printed(work, f"{message.text}\n".encode("utf-8", "backslashreplace"))
        if message.printed:
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    def _on_outcome(self, handle: executors.Handle, message: protocol.Outcome) -> None:
        if handle.work is None or message.key != handle.key:
            return
        self._executors.drain_all(handle)
        work = handle.finished()
        assert work is not None
        self._busy.pop(work.lease, None)
        self._keeper.handler_ended(work)
        outcome = protocol.outcome_of(message)
        self._ahead.ended(outcome.seconds)
        if self._table.in_run and self._registered.announces and outcome.kind == "completed":
            handle.announcing = True
            self._announcing[work.lease] = handle
        self._records.add(work, outcome)
        self._executors.free(handle)

    def answer(self) -> None:
        """Answer what handlers ask; the questions wait while the database is away."""
        while self._asks:
            handle, work, ask = self._asks[0]
            if handle.work is work and handle.lost is None:
                value, refused = None, None
                try:
                    value = slot_jobs.answer(self._claimer.connection(), work.job, ask.what)
                except errors.QueueWorkflowsError as error:
                    refused = str(error)
                except db.Error:
                    self._claimer.lose()
                    raise
                handle.forked.jobs.send(protocol.Answer(ask.key, ask.what, value, refused))
            self._asks.pop(0)

    # --- Ends.

    def recorded(self, work: current_job.Work, completed: bool) -> None:
        """Let the app hear of a node that is recorded, in the process that has run it."""
        handle = self._announcing.pop(work.lease, None)
        if handle is None or handle.lost is not None:
            return
        if not (completed and self._announce(handle, work)):
            handle.announcing = False
            self._executors.free(handle)

    def _announce(self, handle: executors.Handle, work: current_job.Work) -> bool:
        try:
            rows = slot_jobs.rows(self._claimer.connection(), work.job)
            handle.forked.jobs.send(protocol.Announce(handle.key, *rows))
        except (db.Error, errors.QueueWorkflowsError) as error:
            _log.warning("node %s is not announced: %s", work.job["node_id"], error)
            return False
        return True

    def died(self, handle: executors.Handle, work: current_job.Work) -> None:
        """Write what was decided about the job, or charge it if nobody here killed its executor."""
        self._busy.pop(work.lease, None)
        self._keeper.handler_ended(work)
        decision = self._endings.decision(work)
        if decision is not None:
            self._records.add_ending(work, decision.write)
            return
        assert handle.died is not None
        if handle.died.by_deadline:
            self.hand_back(work, "its worker was silent")
            return
        found = executors.death(handle, self._oom.new(), clock.boot_s() - work.started)
        _log.error("job %s: its executor %s", work.job["id"], found.evidence)
        charge = functools.partial(_charge, work.lease, self._who.host, found)
        self._records.add_ending(work, charge)

    def hand_back(self, work: current_job.Work, reason: str) -> None:
        """Hand back, uncounted, a job whose executor has ended."""
        lease = work.lease
        self._records.add_ending(work, lambda conn: handback.hand_back(conn, lease, reason=reason))


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
            crash_recovery.note_death(
                conn, lease.table, job, lease.worker_id, found.detail, found.evidence
            )
    if row is not None:
        what = f"node {row['node_id']}" if lease.table.in_run else f"ingest job {row['id']}"
        _log.warning("%s; %s is %s", found.evidence, what, row["status"])
    return True
