"""The main loop of a worker with slots: one thread over the sockets of its executors."""

from __future__ import annotations

import functools
import logging
import math
import random
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from queue_workflows import config, db, errors, hw_metrics
from queue_workflows.dag import payload
from queue_workflows.engine import controls, handback, job_tables, recovery
from queue_workflows.executor import launcher_client, protocol, registry, streams
from queue_workflows.runtime import clock, service
from queue_workflows.types import Row
from queue_workflows.worker import (
    claimer,
    crash_recovery,
    current_job,
    executors,
    guards,
    loop,
    slot,
    slot_jobs,
    slot_keeper,
    slot_records,
)

_log = logging.getLogger(__name__)
TURN_S = 1.0
"""Longest wait in seconds: a signal handler sets no event."""
END_S = 5.0
"""Seconds for which the end of killed executors is awaited."""
LOST_S = 1.0
"""Seconds that a process gets to end after its channel was closed."""
PRINT_AGAIN_S = 0.05
"""Seconds until a reader that is too slow is tried again."""
FORK_AGAIN_S = 5.0
"""Longest pause in seconds before an executor that died without a job is replaced."""


class Limits(NamedTuple):
    """When executors are replaced, and when the worker ends by itself; None: never."""

    max_jobs: int | None = None
    max_rss_mb: float | None = None
    idle_exit_s: float | None = None
    burst: bool = False


class SlotLoop:
    """Run the jobs of one queue in `count` executors, one in each; claim and record on this thread.

    All that has happened is read before one statement records the finished jobs and claims as many
    as executors are free. An executor that dies is replaced; its job is charged if nobody killed
    it.
    """

    def __init__(
        self,
        own: slot.Slot,
        launcher: launcher_client.Launcher,
        registered: registry.Registered,
        *,
        limits: Limits,
        metrics: hw_metrics.Sampler | None = None,
    ) -> None:
        who = own.who()
        self._queue = who.queue
        self._host = who.host
        self._own = own
        self._launcher = launcher
        self._registered = registered
        self._limits = limits
        known = registered.isolated_nodes if who.queue in config.DAG_QUEUES else None
        self._isolated = frozenset(registered.isolated_tasks if known is None else known)
        in_run = who.queue in config.DAG_QUEUES
        self._table = job_tables.NODE_JOBS if in_run else job_tables.INGEST_JOBS
        self._endings = slot_keeper.Endings(self._kill_job, self.wake)
        self.keeper = slot_keeper.SlotKeeper(
            own, self._endings, launcher.hold_until, metrics=metrics
        )
        self._claimer = claimer.Claimer(self._table, own.who)
        self._claimer.on_lost = self.keeper.lost
        self._claimer.other_jobs = self.keeper.job_ids
        self._records = slot_records.Records(self._table, self._claimer, self.keeper, own.in_flight)
        self._records.on_ended = self._ended
        self._announcing: dict[job_tables.Lease, executors.Handle] = {}
        """The executors whose completed node is announced to the app once it is recorded."""
        self._handles: dict[int, executors.Handle] = {}
        """The executors by pid, until both their end and its cause are known."""
        self._idle: list[executors.Handle] = []
        self._busy: dict[job_tables.Lease, executors.Handle] = {}
        self._asks: list[tuple[executors.Handle, current_job.Work, protocol.Ask]] = []
        self._oom = executors.OomKills()
        self._printed = {number: streams.Forward(number) for number in (1, 2)}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._woken = False
        self._may_claim = self._promote = True
        self._poll_at = self._due_at = self._retry_at = self._fork_at = 0.0
        self._retry_s = self._fork_s = 0.1
        self._logged = ""
        self._worked_at = time.monotonic()
        self._stopping = False

    # --- Any thread.

    def wake(self) -> None:
        """Make the loop look at what has changed."""
        if not self._woken:
            self._woken = True
            try:
                self._wake_writer.send(b"w")
            except OSError:
                return  # full: it wakes anyway; closed: nothing waits

    def stop(self) -> None:
        """Claim no further job; safe in a signal handler."""
        self._stopping = True

    def _kill_job(self, work: current_job.Work, now: bool) -> None:
        handle = self._busy.get(work.lease)
        if handle is not None:
            handle.kill_job(work, signal.SIGKILL if now else signal.SIGTERM)

    def _on_wake(self, wake: db.Wake) -> None:
        if wake.reason == "connected":
            self.keeper.locked = True
            self.keeper.wake("beat")
        if wake.reason != "notify":
            # Notifications that were sent while the connection was lost are lost too.
            self.keeper.wake("renew", "control")
            self._ready()
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self.keeper.cancelled(text)
            elif channel == "worker_control":
                if text in (f"{self._host}:{self._queue}", f"{self._host}:{controls.ALL}"):
                    self.keeper.wake("control", "beat")
                    self._ready()
            elif text == self._queue:
                self._ready()

    def _ready(self) -> None:
        self._may_claim = True
        if self._idle:
            self.wake()

    # --- The loop's thread.

    def run_forever(self) -> None:
        """Run jobs until `stop` and the end of what runs then; survive the loss of the database.

        Raises `LauncherLost`, and `ForkRefused` if no executor can be forked.
        """
        listener = db.listen(
            loop.READY_CHANNEL[self._table.name],
            "worker_control",
            "job_cancel",
            poll_s=3600.0,
            locks=[recovery.LIFE_LOCK + self._own.who().worker_id],
        )
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._clear_wake)
        self._selector.register(self._launcher, selectors.EVENT_READ, self._on_launcher)
        self.keeper.arm()
        try:
            for _ in range(self._own.concurrency):
                self._fork()
            with service.Follow("worker-listen", listener, self._on_wake):
                while not self._is_over():
                    for key, _ in self._selector.select(self._timeout()):
                        key.data()
                    if self._launcher.pending:
                        self._on_launcher()
                    self._step()
        finally:
            self._close()

    def _is_over(self) -> bool:
        if not self._stopping:
            self._stopping = self._is_done()
            return False
        if not self._busy and not self._records.waiting:
            return True
        deadline = self.keeper.stop_deadline
        late = deadline is not None and clock.boot_s() >= deadline
        return late and not self._busy

    def _is_done(self) -> bool:
        """Return whether nothing is left to do for a worker that ends by itself."""
        if self._busy or self._records.waiting or self._retry_at > time.monotonic():
            self._worked_at = time.monotonic()
            return False
        if self._limits.burst:
            return not self._may_claim and self._poll_at > 0.0
        idle_s = self._limits.idle_exit_s
        return idle_s is not None and time.monotonic() - self._worked_at >= idle_s

    def _timeout(self) -> float:
        now = time.monotonic()
        if self._launcher.pending:
            return 0.0
        if any(each.pending for each in self._printed.values()):
            return PRINT_AGAIN_S
        if self._retry_at > now:
            return min(TURN_S, self._retry_at - now)
        if self._records.waiting or self._asks or (self._may_claim and self._may_start()):
            return 0.0
        missing = self._own.concurrency > len(self._handles)
        at = min(self._poll_at, self._due_at, self._fork_at if missing else math.inf)
        return max(0.0, min(TURN_S, at - now))

    def _may_start(self) -> bool:
        return bool(self._idle) and not self._stopping

    def _clear_wake(self) -> None:
        self._woken = False
        try:
            self._wake_reader.recv(64)
        except BlockingIOError:
            return

    def _step(self) -> None:
        """Record what has ended, claim for the free executors, and start what was claimed."""
        now = time.monotonic()
        for each in self._printed.values():
            each.flush()
        if now >= self._poll_at:
            self._poll_at = now + config.CLAIM_POLL_S.read()
            self._may_claim = self._promote = True
        if now >= self._due_at:
            self._may_claim, self._promote, self._due_at = True, True, math.inf
        self._replace(now)
        if now < self._retry_at:
            return
        try:
            self._answer()
            # What follows from a completed node can be claimed in the statement that records it.
            self._may_claim |= self._table.in_run and self._records.has_outcomes
            free = len(self._idle) if self._may_claim and self._may_start() else 0
            if free or self._records.waiting:
                self._record_and_claim(free)
            self._retry_s, self._logged = 0.1, ""
        except db.Error as error:
            # The message changes during one outage, from "closed" to "starting up".
            if self._logged != (logged := error.sqlstate or "away"):
                self._logged = logged
                _log.warning("claiming waits for the database: %s", loop.brief(error))
            self._may_claim = True
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
            self._retry_s = min(loop.BACKOFF_MAX_S, self._retry_s * 2)

    def _record_and_claim(self, free: int) -> None:
        if free:
            self._may_claim = False  # before the claim, so that a notification during it counts
        jobs = self._records.step(free, promote=self._promote and free > 0)
        if len(jobs) < free and self._records.dispatch():
            self._may_claim = True
        if not free:
            return
        self._promote = False
        self._due_at = time.monotonic() + self._claimer.wait_s
        # A job that may have crashed a worker is claimed alone; others may wait behind it.
        partial = self._claimer.isolated or any(job["crash_count"] for job in jobs)
        if len(jobs) == free or (jobs and partial):
            self._may_claim = True
        for job in jobs:
            self._start(job)
        if jobs:
            self.keeper.claimed(self._claimer.sent_at)

    def _start(self, job: Row) -> None:
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._own.who().lease_s)
        work = current_job.Work(self._table, job, lease_end)
        self.keeper.begin(work)
        wanted = slot_jobs.request(self._claimer.connection, self._table, job, self._registered)
        if not isinstance(wanted, slot_jobs.Request):
            work.settling = True
            self._records.add(work, wanted)
            return
        name = job["node_module"] if self._table.in_run else job["task_name"]
        handle = self._fresh() if name in self._isolated else self._idle.pop()
        self._busy[work.lease] = handle
        work.when_interrupted(functools.partial(handle.interrupt, work))
        try:
            handle.run(work, *wanted)
        except protocol.ChannelLost as error:
            self._lose(handle, error)
            self._endings.hand_back(work, "its executor had ended")
        if handle.forked.jobs.pending:
            self._watch(handle, writing=True)

    # --- Executors.

    def _fresh(self) -> executors.Handle:
        """Return an executor that has run no job, for one job alone."""
        handle = self._idle.pop()
        if handle.jobs:
            handle.retire()
            self._fork()
            handle = self._idle.pop()
        handle.isolated = True
        return handle

    def _fork(self) -> None:
        handle = executors.Handle(self._launcher.fork())
        self._handles[handle.pid] = handle
        register = self._selector.register
        register(handle.forked.pidfd, selectors.EVENT_READ, lambda: self._exited(handle))
        for fd in handle.forked.out.fds:
            register(fd, selectors.EVENT_READ, lambda: self._drain(handle))
        self._selector.register(
            handle.forked.jobs, selectors.EVENT_READ, lambda: self._receive(handle)
        )
        self._idle.append(handle)

    def _watch(self, handle: executors.Handle, *, writing: bool) -> None:
        """Wait until the executor takes the rest of a message, as well as for messages of it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        act = self._exchange if writing else self._receive
        self._selector.modify(handle.forked.jobs, events, lambda: act(handle))

    def _exchange(self, handle: executors.Handle) -> None:
        try:
            handle.forked.jobs.flush()
        except protocol.ChannelLost as error:
            self._lose(handle, error)
            return
        if not handle.forked.jobs.pending:
            self._watch(handle, writing=False)
        self._receive(handle)

    def _receive(self, handle: executors.Handle) -> bool:
        """Act on what an executor has sent; return False if there is nothing more to come."""
        try:
            messages = handle.forked.jobs.receive()
        except errors.QueueWorkflowsError as error:
            self._lose(handle, error)
            return False
        for message in messages:
            self._act(handle, message)
        return bool(messages)

    def _lose(self, handle: executors.Handle, error: Exception) -> None:
        """Stop listening to an executor whose channel is of no use any more, and end it.

        If the channel was closed, the process is most likely ending, and its own end is the cause.
        """
        if handle.lost is None:
            handle.lost, handle.lost_at = str(error), time.monotonic()
        self._forget(handle.forked.jobs)
        if not handle.exited and not isinstance(error, protocol.ChannelLost):
            handle.kill(signal.SIGKILL)

    def _forget(self, source: object) -> None:
        try:
            self._selector.unregister(source)  # pyright: ignore[reportArgumentType]
        except (KeyError, ValueError):
            return

    def _act(self, handle: executors.Handle, message: protocol.Message) -> None:
        if isinstance(message, protocol.Outcome):
            self._on_outcome(handle, message)
        elif isinstance(message, protocol.Announced):
            handle.announcing = False
            self._free(handle)
        elif handle.work is None or getattr(message, "key", None) != handle.key:
            return
        elif isinstance(message, protocol.Progress):
            handle.work.beat(message.value)
        elif isinstance(message, protocol.Ask):
            self._asks.append((handle, handle.work, message))
        elif isinstance(message, protocol.Log):
            self._print_record(handle.work, message)

    def _print_record(self, work: current_job.Work, message: protocol.Log) -> None:
        self.keeper.printed(work, f"{message.text}\n".encode("utf-8", "backslashreplace"))
        if message.printed:
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    def _on_outcome(self, handle: executors.Handle, message: protocol.Outcome) -> None:
        if handle.work is None or message.key != handle.key:
            return
        while self._drain(handle):
            continue
        work = handle.finished()
        assert work is not None
        self._busy.pop(work.lease, None)
        self.keeper.handler_ended(work)
        outcome = protocol.outcome_of(message)
        if self._table.in_run and self._registered.announces and outcome.kind == "completed":
            handle.announcing = True
            self._announcing[work.lease] = handle
        self._records.add(work, outcome)
        self._free(handle)

    def _ended(self, work: current_job.Work, completed: bool) -> None:
        """Let the app hear of a node that is recorded, in the process that has run it."""
        handle = self._announcing.pop(work.lease, None)
        if handle is None or handle.lost is not None:
            return
        if not (completed and self._announce(handle, work)):
            handle.announcing = False
            self._free(handle)

    def _announce(self, handle: executors.Handle, work: current_job.Work) -> bool:
        try:
            rows = slot_jobs.rows(self._claimer.connection(), work.job)
            handle.forked.jobs.send(protocol.Announce(handle.key, *rows))
        except (db.Error, errors.QueueWorkflowsError) as error:
            _log.warning("node %s is not announced: %s", work.job["node_id"], error)
            return False
        return True

    def _free(self, handle: executors.Handle) -> None:
        """Give the executor further jobs, or end it if it has had enough."""
        limits = self._limits
        if handle.was_killed or handle.lost is not None or handle.announcing:
            return
        if (
            handle.isolated
            or (limits.max_jobs is not None and handle.jobs >= limits.max_jobs)
            or (limits.max_rss_mb is not None and handle.rss_mb() > limits.max_rss_mb)
        ):
            handle.retire()
        else:
            self._idle.append(handle)

    def _drain(self, handle: executors.Handle) -> bool:
        """Keep and print what an executor has printed; return whether there was anything."""
        before = [*handle.forked.out.fds]
        found = handle.forked.out.drain()
        for fd in before:
            if fd not in handle.forked.out.fds:
                self._forget(fd)
        for number, data in found:
            self._printed[number].add(data)
            if handle.work is not None:
                handle.printed(data)
                self.keeper.printed(handle.work, data)
        return bool(found)

    def _answer(self) -> None:
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

    # --- Executors that end.

    def _exited(self, handle: executors.Handle) -> None:
        """Read the last messages of an executor whose process has ended."""
        handle.exited = True
        self._forget(handle.forked.pidfd)
        while handle.lost is None and self._receive(handle):
            continue
        self._forget(handle.forked.jobs)
        handle.kill_children()
        while self._drain(handle):
            continue
        for fd in handle.forked.out.fds:
            self._forget(fd)
        self._end_if_known(handle)

    def _on_launcher(self) -> None:
        for died in self._launcher.receive():
            handle = self._handles.get(died.pid)
            if handle is not None:
                handle.died = died
                self._end_if_known(handle)

    def _end_if_known(self, handle: executors.Handle) -> None:
        """End the job of an executor once its end and the cause of its end are known."""
        if not handle.exited or handle.died is None:
            return
        del self._handles[handle.pid]
        if handle in self._idle:
            self._idle.remove(handle)
        work = handle.finished()
        if work is not None:
            self._end_job(handle, work)
        elif not (handle.retired or handle.was_killed):
            self._fork_at = time.monotonic() + self._fork_s
            self._fork_s = min(FORK_AGAIN_S, self._fork_s * 2)
            _log.warning("an idle executor %s", executors.death(handle, None, 0.0).evidence)
        handle.close()

    def _end_job(self, handle: executors.Handle, work: current_job.Work) -> None:
        self._busy.pop(work.lease, None)
        self.keeper.handler_ended(work)
        decision = self._endings.decision(work)
        if decision is not None:
            self._records.add_ending(work, decision.write)
            return
        assert handle.died is not None
        if handle.died.by_deadline:
            write = functools.partial(_hand_back, work.lease, "its worker was silent")
            self._records.add_ending(work, write)
            return
        found = executors.death(handle, self._oom.new(), clock.boot_s() - work.started)
        _log.error("job %s: its executor %s", work.job["id"], found.evidence)
        self._records.add_ending(work, functools.partial(_charge, work.lease, self._host, found))

    def _replace(self, now: float) -> None:
        """Kill executors whose channel is lost, and fork others for those that end."""
        for handle in self._handles.values():
            if handle.lost is not None and not handle.exited and now - handle.lost_at >= LOST_S:
                handle.kill(signal.SIGKILL)
        if self._stopping or now < self._fork_at:
            return
        live = sum(not each.retired for each in self._handles.values())
        for _ in range(self._own.concurrency - live):
            self._fork()

    def _close(self) -> None:
        """End the executors, and write what can still be written."""
        self._launcher.close()
        for handle in self._handles.values():
            handle.wait_ended(END_S)
        for work in [*self._works_left()]:
            self._records.add_ending(
                work, functools.partial(_hand_back, work.lease, "its worker ended")
            )
        try:
            self._records.step(0, promote=False)
        except db.Error as error:
            _log.warning("claims are left to their leases: %s", loop.brief(error))
            self.keeper.fence()
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self._claimer.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _works_left(self) -> Sequence[current_job.Work]:
        return [work for each in self._handles.values() if (work := each.finished()) is not None]


def _hand_back(lease: job_tables.Lease, reason: str, conn: db.Connection) -> None:
    handback.hand_back(conn, lease, reason=reason)


def _charge(
    lease: job_tables.Lease, host: str, found: executors.Death, conn: db.Connection
) -> None:
    """Count a crash of the job, and record how its executor died, in one transaction."""
    with conn.transaction():
        row = recovery.charge(conn, lease, evidence=payload.error_text(found.evidence))
        if row is not None:
            job = row | {"claimed_by": host}
            crash_recovery.note_death(
                conn, lease.table, job, lease.worker_id, found.detail, found.evidence
            )
