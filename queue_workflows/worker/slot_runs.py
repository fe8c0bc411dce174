"""Start, observe and end the jobs that run in the executors of a worker.

Its length: starts, messages, recalls and deaths move jobs between the same lists.
"""

from __future__ import annotations

import functools
import logging
import math
import signal
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from queue_workflows import config
from queue_workflows.engine import claims, job_tables
from queue_workflows.executor import loaded_app, protocol
from queue_workflows.runtime import clock, log_context, log_format
from queue_workflows.types import Row
from queue_workflows.worker import (
    captured_streams,
    claimer,
    current_job,
    executor_set,
    executor_shape,
    executors,
    guards,
    slot_ahead,
    slot_announcer,
    slot_answers,
    slot_deaths,
    slot_jobs,
    slot_keeper,
    slot_models,
    slot_records,
)

_log = logging.getLogger(__name__)


class _Behind(NamedTuple):
    """An executor in which jobs wait, and when (`clock.boot_s`) they are recalled."""

    handle: executors.Handle
    at: float

    @property
    def is_recalled(self) -> bool:
        return self.handle.is_recalled


class Runs:
    """The claimed jobs of one worker, which wait or are in executors; an `executor_traffic.Owner`.

    For the thread of the executors, but for `kill`. What is to be written goes to `records`.
    """

    def __init__(
        self,
        table: job_tables.JobTable,
        who: claims.Claimant,
        claimer_: claimer.Claimer,
        registered: loaded_app.Registered,
        *,
        executors_: executor_set.ExecutorSet,
        records: slot_records.Records,
        keeper: slot_keeper.SlotKeeper,
        endings: slot_keeper.Endings,
        ahead: slot_ahead.Ahead,
        shape: executor_shape.Shape,
    ) -> None:
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        self._ahead = ahead
        self._shared, self._batch, self._mixed = shape.concurrent, shape.batch, shape.mixed
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
        # A fresh executor for each job would load the model for each.
        self._isolated = frozenset(() if shape.gpu else names)
        self._async = frozenset(registered.async_tasks if shape.mixed else ())
        self._busy: dict[job_tables.Lease, executors.Handle] = {}
        self._announcer = slot_announcer.Announcer(claimer_.connection, executors_.free)
        self.recorded = self._announcer.recorded
        """Lets the app hear of a node that is recorded."""
        self.answers = slot_answers.Answers(claimer_, executors_.traffic)
        """Answers what handlers ask."""
        self._deaths = slot_deaths.Deaths(who.host, endings, records)
        self.hand_back = self._deaths.hand_back
        """Hands back, uncounted, a job that runs no more."""
        self.models: slot_models.Changes | None = None
        """What is known of the models of a gpu worker's executor."""

    def kill(self, work: current_job.Work, now: bool) -> None:
        """End the executor of a job by SIGTERM, or at once; for any thread.

        One that runs many jobs is killed only at once. Before that the job alone is to end.
        """
        handle = self._busy.get(work.lease)
        if handle is None:
            return
        if work.waiting or (handle.concurrent and not now):
            work.interrupt("it must end")
        else:
            handle.kill_job(work, signal.SIGKILL if now else signal.SIGTERM)

    def has_neighbours(self, work: current_job.Work) -> bool:
        """Return whether the executor of a job runs others at once; for any thread."""
        handle = self._busy.get(work.lease)
        return handle is not None and handle.concurrent

    @property
    def busy(self) -> bool:
        """Return whether handlers run, or claimed jobs wait."""
        return bool(self._busy or self._waiting)

    @property
    def unsent(self) -> int:
        """Return how many claimed jobs wait for an executor."""
        return len(self._waiting)

    @property
    def waiting(self) -> int:
        """Return how many claimed jobs wait for an executor, or in one behind others."""
        return len(self._waiting) + self._executors.queued

    @property
    def late_at(self) -> float:
        """Return when a job has waited too long (`clock.boot_s`)."""
        at = self._waiting[0].started + slot_ahead.WAIT_S if self._waiting else math.inf
        return min((each.at for each in self._behind() if not each.is_recalled), default=at)

    # --- Start.

    def add(self, job: Row) -> None:
        """Let a claimed job wait for an executor; its claim is renewed from now on."""
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._who.lease_s)
        work = current_job.Work(self._table, job, lease_end)
        work.waiting = True
        self._keeper.begin(work)
        self._waiting.append(work)

    def start_waiting(self, *, fork: bool = True) -> None:
        """Send jobs to executors that have room. After a database error the rest still waits.

        Without `fork` a job for which one may have to be forked waits, and all behind it.
        """
        while self._waiting:
            work = self._waiting[0]
            isolated = self._is_isolated(work)
            if not self._executors.has_room(self._ahead.each, isolated=isolated):
                return
            if not fork and (isolated or self._mixed):
                return
            decision = self._endings.decision(work)
            if decision is not None:
                self._records.add_ending(work, decision.write)
            else:
                self._start(work, isolated=isolated)
            self._waiting.popleft()

    def _is_isolated(self, work: current_job.Work) -> bool:
        """Return whether a job runs in an executor of its own, also where others share one.

        A crash of a shared executor is charged to all its jobs. It must be the last of none.
        """
        job = work.job
        if (job["node_module"] if self._table.in_run else job["task_name"]) in self._isolated:
            return True
        return self._is_shared(job) and 0 < config.MAX_CRASHES.read() - 1 <= job["crash_count"]

    def _is_shared(self, job: Row) -> bool:
        """Return whether a job runs in an executor that runs several at once."""
        return self._shared or (bool(self._async) and job["task_name"] in self._async)

    def return_waiting(self, *, stopping: bool) -> None:
        """Hand waiting jobs back, if the worker stops or the first has waited too long.

        Jobs that wait in an executor behind a long handler are recalled first.
        """
        self._recall(stopping=stopping)
        if not self._waiting or not (
            stopping or clock.boot_s() >= self._waiting[0].started + slot_ahead.WAIT_S
        ):
            return
        self._ahead.reset()
        while self._waiting:
            work = self._waiting.popleft()
            decision = self._endings.decision(work)
            if decision is not None:
                self._records.add_ending(work, decision.write)
            else:
                reason = "shutdown" if stopping else "waited too long for an executor"
                self._deaths.hand_back(work, reason)

    def _behind(self) -> list[_Behind]:
        """Return the executors in which jobs wait behind the one that runs."""
        if self._shared or self._batch == 1:
            return []
        return [
            _Behind(each, work.started + slot_ahead.WAIT_S)
            for each in self._executors.busy()
            if each.count > 1 and (work := each.first) is not None
        ]

    def _recall(self, *, stopping: bool) -> None:
        if stopping and self._shared:
            for each in self._executors.busy():
                each.recall()
        for each in self._behind():
            if stopping or self._ahead.each == 1 or clock.boot_s() >= each.at:
                each.handle.recall()

    def _start(self, work: current_job.Work, *, isolated: bool) -> None:
        job = work.job
        wanted = slot_jobs.request(self._claimer.connection, self._table, job, self._registered)
        if not isinstance(wanted, slot_jobs.Request):
            work.settling = True
            self._records.add(work, wanted)
            return
        handle = self._executors.take(isolated=isolated, concurrent=self._is_shared(job))
        if handle.concurrent or not handle.count:
            work.start_now()
        self._busy[work.lease] = handle
        try:
            handle.run(work, *wanted)
            # Only now does the executor know the job that an earlier interrupt is about.
            work.when_interrupted(functools.partial(handle.interrupt, work))
        except protocol.ChannelLost as error:
            self._executors.traffic.lose(handle, error)
            self._endings.hand_back(work, "its executor had ended")
        self._executors.sent(handle)

    # --- Messages.

    def forked(self, handle: executors.Handle) -> None:
        """Let the guards of a gpu worker's jobs use samples of this executor."""
        if self.models is not None:
            self._keeper.follow(handle.pid)

    def received(self, handle: executors.Handle, message: protocol.Message) -> None:
        """Act on a message of an executor."""
        if isinstance(message, protocol.Outcome):
            self._on_outcome(handle, message)
        elif isinstance(message, protocol.Announced):
            handle.announcing = False
            self._executors.free(handle)
        elif isinstance(message, protocol.Recalled):
            self._on_recalled(handle, message)
        elif isinstance(message, (protocol.Model, protocol.ModelDone)):
            self._on_model(handle, message)
        elif (work := handle.get(getattr(message, "key", None) or 0)) is not None:
            with log_context.bound(work.ids):
                self._on_report(handle, work, message)
        elif isinstance(message, protocol.Log) and handle.shared:
            _log_record(message)  # of the executor itself, or of what a job has left behind

    def _on_model(
        self, handle: executors.Handle, message: protocol.Model | protocol.ModelDone
    ) -> None:
        if self.models is None:
            return
        if isinstance(message, protocol.Model):
            self.models.known.changed(message)
        else:
            self.models.done(handle, message.error)

    def _on_report(
        self, handle: executors.Handle, work: current_job.Work, message: protocol.Message
    ) -> None:
        if isinstance(message, protocol.Progress):
            work.beat(message.value)
        elif isinstance(message, protocol.CursorAt):
            work.note_cursor(message.name, message.step_key, message.position)
        elif isinstance(message, protocol.Ask):
            self.answers.add(handle, work, message)
        elif isinstance(message, protocol.Log):
            self._print_record(handle, work, message)
        elif isinstance(message, protocol.Event) and self.models is not None:
            self.models.reported(work, message)
        elif isinstance(message, protocol.Waits):
            work.waiting = True
        elif isinstance(message, protocol.Started):
            work.start_now()

    def printed(self, work: current_job.Work, data: bytes) -> None:
        """Keep what the handler of a job has printed."""
        self._keeper.printed(work, data)

    def _print_record(
        self, handle: executors.Handle, work: current_job.Work, message: protocol.Log
    ) -> None:
        # The engine's own records are for the worker's log, as those of a plain worker are.
        if message.name.partition(".")[0] != captured_streams.ENGINE:
            self._keeper.printed(work, f"{message.text}\n".encode("utf-8", "backslashreplace"))
        if message.stream:
            self._executors.traffic.print_lines(handle, message)
        else:
            _log_record(message)

    def _on_outcome(self, handle: executors.Handle, message: protocol.Outcome) -> None:
        if handle.get(message.key) is None:
            return
        self._executors.traffic.drain_all(handle)
        if not handle.shared:
            self._executors.traffic.end_lines(handle)
        work = handle.take(message.key)
        assert work is not None
        self._busy.pop(work.lease, None)
        self._keeper.handler_ended(work)
        if self.models is not None:
            self.models.known.used()
        outcome = work.judged(protocol.outcome_of(message), message.ended)
        self._ahead.ended(outcome.seconds)
        if not handle.concurrent and (following := handle.first) is not None:
            following.start_now()
        if self._table.in_run and self._registered.announces and outcome.kind == "completed":
            self._announcer.expect(work, handle, message.key)
        decision = self._endings.decision(work) if handle.shared else None
        if decision is not None and outcome.kind == "cancelled":
            # The handler has ended as it was requested to, or never started.
            self._records.add_ending(work, decision.write)
        else:
            self._records.add(work, outcome)
        if outcome.kind == "timed_out":
            self._endings.on_ended(guards.EXIT_BUDGET)
        self._executors.free(handle)

    def _on_recalled(self, handle: executors.Handle, message: protocol.Recalled) -> None:
        """Let jobs that have not started wait for an executor again, before all others."""
        works = [work for key in message.keys if (work := handle.take(key)) is not None]
        handle.jobs -= len(works)
        self._wait_again(works)
        self._executors.free(handle)

    def _wait_again(self, works: Sequence[current_job.Work]) -> None:
        for work in reversed(works):
            work.waiting = True
            work.when_interrupted(None)
            self._busy.pop(work.lease, None)
            self._waiting.appendleft(work)

    # --- Ends.

    def died(self, handle: executors.Handle, works: Sequence[current_job.Work]) -> None:
        """Write what was decided about the jobs, or charge them if nobody here killed the executor.

        Those whose handlers had not started wait for another executor.
        """
        if self.models is not None:
            self.models.died(handle)
        begun = [work for work in works if not work.waiting]
        self._wait_again([work for work in works if work.waiting])
        for work in begun:
            self._busy.pop(work.lease, None)
            self._keeper.handler_ended(work)
        self._deaths.end(handle, begun)


def _log_record(message: protocol.Log) -> None:
    if message.printed:
        extra = log_format.allowed(message.fields)
        logging.getLogger(message.name).log(message.level, "%s", message.text, extra=extra)
