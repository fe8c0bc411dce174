"""Keep the leases of a worker's jobs, send its heartbeat, and act on OFF, cancels and guards."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, worker_control
from queue_workflows.dag import payload
from queue_workflows.engine import controls, handback, job_steps, job_tables, recovery, workers
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, printed_lines, service
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import ExitFn, JsonDict, NowFn, Row
from queue_workflows.worker import (
    capture,
    claim_writes,
    claims_in_flight,
    current_job,
    gpu_runtime,
    guards,
    kill_timers,
    memory_throttle,
    model_requests,
    note_reporter,
    notes,
    renewal_failures,
    shared_status,
    shutdown,
    slot,
)

_log = logging.getLogger(__name__)
CHECK_S = 0.5
STALLS_S = 0.5
NOTES_S = 2.0
"""Seconds until a note is reported again, while its process may run or the database is away."""
NOTES_AGAIN_S = 30.0
"""Seconds between two searches for the notes of other workers of this machine."""
BATCH_S = 0.5
PARTS_S = 0.1
"""Seconds between two looks at what a handler has streamed and does not send itself."""
PARTS_AGAIN_S = 1.0
"""Seconds without a try to store it after the database was away."""
PROGRESS_S = 1.0
"""Shortest time in seconds between two writes of a job's progress."""
UNWIND_S = 2.0
"""Seconds before the stop deadline at which a handler that yields or awaits is interrupted."""


def renew_every_s(lease_s: float) -> float:
    """Return how often claims of this lease are renewed: DL_HEARTBEAT_SEC, a third at most."""
    return min(config.DL_HEARTBEAT_SEC.read(), lease_s / 3)


class LeaseKeeper:
    """Renew the leases of running jobs, send the heartbeat, act on OFF and on the guards' failures.

    One lease keeper serves one worker, or all `slots` of a process. It has a connection of its own.
    `on_exit` ends the process; tests replace it, which also disables the kernel timers. `sampler`
    measures the GPU and the memory, by default only on the gpu queue. `metrics` samples the
    machine; this worker stores the samples. `card`: the one GPU that this worker uses.
    """

    def __init__(
        self,
        slots: Sequence[slot.Slot],
        *,
        model_cache: model_requests.Models | None = None,
        known_models: Callable[[], list[str] | None] = lambda: None,
        on_exit: ExitFn = os._exit,
        now_fn: NowFn = clock.boot_s,
        sampler: Callable[[], worker_usage.Sample] | None = None,
        metrics: hw_metrics.Sampler | None = None,
        card: int | None = None,
    ) -> None:
        self._slots = slots
        self._who = who = slots[0].who
        self._now = now_fn
        self._kill_timers = kill_timers.KillTimers(enabled=on_exit is os._exit, now_fn=now_fn)
        self._status = shared_status.attach()
        self._lock = threading.Lock()
        self._works: list[current_job.Work] = []
        """The running jobs in the order of their start; the list is never changed in place."""
        self._batches = False
        self._notified_at = 0.0
        """When it last received a notification of a cancel or a switch."""
        self._dedicated = db.DedicatedConnection()
        self._gpu = gpu_runtime.GpuRuntime(
            who,
            dedicated=self._dedicated,
            works=lambda: self._works,
            wake=self.wake,
            model_cache=model_cache,
            known_models=known_models,
            sampler=sampler,
            metrics=metrics,
            now_fn=now_fn,
            card=card,
        )
        self.memory = memory_throttle.MemoryThrottle(
            self._worker_ids,
            is_busy=lambda: bool(self._works) or any(each.in_flight.ids() for each in slots),
            dedicated=self._dedicated,
            changed=lambda: self.wake("beat"),
            now_fn=now_fn,
        )
        """Says whether this worker may claim."""
        self._logs = capture.Source(self._printing)
        self._shutdown: shutdown.Ending = shutdown.Shutdown(
            [each.who for each in slots],
            self._claims_with,
            dedicated=self._dedicated,
            kill_timers_=self._kill_timers,
            fence=self._fence,
            leave_note=self._leave_note,
            withdraw_note=self._withdraw_note,
            on_exit=on_exit,
            now_fn=now_fn,
        )
        self._renewals = renewal_failures.Renewals(who().lease_s, self._dedicated, now_fn)
        self._exit_note = notes.ExitNote()
        self._lapsed_note = notes.ExitNote()
        self._lapsed: frozenset[job_tables.Lease] = frozenset()
        """The claims of `_lapsed_note`."""
        self._was_clear = True
        self._notes = note_reporter.Reporter(self._dedicated)
        self._notes_left = False
        self._unwritten = deque[job_tables.Lease](maxlen=notes.MAX_LEASES)
        """Claims that were lost before their outcomes were written, without a stall here."""
        self._charged = set[job_tables.Lease]()
        """Claims that were lost while this process stalled; there are few in its life."""
        for each in slots:
            each.in_flight.on_lost = self.lost
        self.may_hold_unknown_claims: Callable[[], bool] = lambda: False
        """Returns whether the server may have executed a claim whose reply was lost."""
        self.unanswered: Callable[[], dict[str, float]] = dict
        """Returns the time of the first claim without a reply, by worker id."""
        self._stops: list[float] = []
        self._parts_at = 0.0
        """When streamed parts may be stored again."""
        self.locked = False
        """Whether a session of this worker holds its advisory lock of a live worker."""
        self._tasks = [*self._own_tasks(who().lease_s), *self._gpu.tasks()]
        self._loop: service.Loop | None = None

    def _own_tasks(self, lease_s: float) -> list[service.Task]:
        tasks = [
            service.Task("renew", lambda: renew_every_s(lease_s), self._renew),
            service.Task("stalls", STALLS_S, self._check_stalls),
            service.Task("notes", self._notes_pause, self._report_notes),
            service.Task("parts", self._parts_pause, self._store_parts),
        ]
        if not config.DISABLE_WORKER_HEARTBEAT.read():
            tasks.append(service.Task("beat", config.HEARTBEAT_INTERVAL_S.read, self._beat))
        if not config.DISABLE_WORKER_CONTROL.read():
            control_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("control", control_s, self._check_control))
        return tasks

    @property
    def model_requests(self) -> model_requests.ModelRequests | None:
        """Return the pending load and unload requests, or None without a model cache."""
        return self._gpu.requests

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Run on threads of its own while the block runs; do nothing if they run already."""
        if self._loop is not None:
            yield
            return
        # The claimers themselves release what they claimed in an earlier block.
        self._exit_note.withdraw()
        with contextlib.suppress(db.Error):
            # Before the first claim: a job whose crash is not subtracted yet may end as poison.
            self._report_notes()
        self._loop = service.Loop("lease-keeper", self._tasks, now_fn=self._now)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._logs.capturing())
                stack.enter_context(self._loop)
                # On a thread of its own: the other tasks may wait for the database.
                judging = [service.Task("guards", CHECK_S, self._check_guards)]
                stack.enter_context(service.Loop("worker-guards", judging, now_fn=self._now))
                stack.enter_context(self._gpu.running())
                stack.enter_context(self.memory.running())
                yield
        finally:
            self._loop = None
            self._kill_timers.release()
            self._status.clear()
            self._close()

    def wake(self, *tasks: str) -> None:
        """Make tasks (`renew`, `beat`, `control` ...) due at once, if they are enabled."""
        self._notified_at = self._now()
        loop, known = self._loop, {task.name for task in self._tasks}
        if loop is not None and (due := known.intersection(tasks)):
            loop.wake(*due)

    def wait_until_published(self, stopped: Callable[[], bool]) -> None:
        """Wait until the GPU memory is published; see `GpuRuntime.wait_until_published`."""
        self._gpu.wait_until_published(stopped)

    @property
    def stop_deadline(self) -> float | None:
        """Return when (`clock.boot_s`) a stopping worker hands its jobs back, or None."""
        return min(self._stops, default=None)

    def stop_by(self, deadline: float) -> None:
        """Set a deadline at which running jobs are handed back; safe in a signal handler."""
        self._stops.append(deadline)

    @property
    def is_shutting_down(self) -> bool:
        """Return whether the process is about to exit, so that nothing may be claimed."""
        return self._shutdown.decided

    def enable_batches(self) -> None:
        """Let the keeper record and hand back jobs of its slots; call it before `running`."""
        self._batches = True
        self._status.enable_job_list()
        self._tasks.append(service.Task("batch", BATCH_S, self._write_back_due))

    def add_claims(
        self,
        own: claims_in_flight.ClaimsInFlight,
        jobs: Sequence[Row],
        lease_end: guards.LeaseEnd,
        sent_at: float,
    ) -> None:
        """Add claimed jobs to a slot's claims in flight; their claim was sent at `sent_at`.

        From now on their leases are renewed. The keeper hands a waiting job back if it is
        cancelled, if the worker stops or is turned off, or if another job runs for LONG_S. It
        records results after FLUSH_AFTER_S.
        """
        own.add(jobs, lease_end)
        if self._notified_at >= sent_at:
            # A notification that came before may have found none of these jobs.
            self.wake("renew", "control")

    def record(self) -> None:
        """Record the finished results in the background."""
        for each in self._slots:
            each.in_flight.flush_soon()
        if (loop := self._loop) is not None:
            loop.wake("batch")

    @contextlib.contextmanager
    def recording(self, work: current_job.Work) -> Generator[None]:
        """Check the guards of a job while its outcome is written apart from its batch."""
        with self._lock:
            self._works = [*self._works, work]
        try:
            yield
        finally:
            self.end(work)

    def begin(self, work: current_job.Work) -> None:
        """Note that a job runs, and arm its kernel timers."""
        self._logs.begin()
        work.on_left = self._wake_parts
        if not self._batches:
            self._renewals.renewed()  # its claim was one
        with self._lock:
            self._works = [*self._works, work]
            lease_ends, budget_ends = self._ends()
            assert lease_ends is not None
            self._kill_timers.begin(lease_ends, budget_ends)
            if self._batches:
                self._status.begin(seq=work.job["seq"])
            elif not self._gpu.samples:
                self._status.begin()
            else:
                work.on_activity = self._status.set_active
                self._status.begin(self._status_record())

    def handler_ended(self, work: current_job.Work) -> None:
        """Note that the handler has ended and that its outcome is about to be written."""
        work.settling = True
        self._logs.end(work.lease)
        printed_lines.end(work.lease.job_id)

    def _printing(self) -> job_tables.Lease | None:
        """Return the claim whose handler prints now, or None."""
        works = self._works
        return works[0].lease if works and not works[0].settling else None

    def end(self, work: current_job.Work) -> None:
        """Note that the job has ended; its guards are not checked any more."""
        with self._lock:
            self._status.end(seq=work.job["seq"] if self._batches else None)
            self._works = [each for each in self._works if each is not work]

    def _close(self) -> None:
        """Hand back what waits, deregister the worker and close the connection."""
        try:
            for each in self._slots:
                each.in_flight.return_waiting("shutdown")
                if each.in_flight.ids():
                    claim_writes.write_back(self._dedicated.get(), each.in_flight)
            if (conn := self._dedicated.current) is not None:
                for each in self._slots:
                    workers.stop(conn, each.who().worker_id)
        except db.Error as error:
            _log.debug("cannot deregister: %s", error)
        left = [lease for each in self._slots for lease in each.in_flight.claims()]
        if left:
            # No worker ids: this worker may run again under its id, and then holds new claims.
            notes.write_note((), left)
        unwritten = [work.lease for work in self._works]
        if unwritten or self.may_hold_unknown_claims():
            # Locked until this process ends, or this worker runs again.
            self._exit_note.write(self._worker_ids(), unwritten, self.unanswered())
        self._dedicated.close()

    def cancelled(self, name: str) -> None:
        """Renew at once if the cancelled run or job is one of this worker's."""
        self._notified_at = self._now()
        names = {
            text[:1000]
            for work in self._works
            for text in (work.job["id"], str(work.job.get("run_id")))
        }
        if any(each.in_flight.cancel(name) for each in self._slots):
            self.wake("batch")
        elif name in names or any(name in each.in_flight.ids() for each in self._slots):
            self.wake("renew")

    def _renew(self) -> None:
        reports = dict[job_tables.Lease, str | None]()
        ends = dict[job_tables.Lease, guards.LeaseEnd]()
        with self._slots[0].in_flight.writing():
            works, sent = self._works, self._now()
            for each in self._slots:
                ends |= each.in_flight.claims()
            for work in works:
                ends.setdefault(work.lease, work.lease_end)
                reports[work.lease], work.unsaved = work.unsaved, None
            if not ends and not self._unwritten:
                return
            found = claims_in_flight.RenewalResult([], [])
            try:
                with self._dedicated.using() as conn:
                    if ends:
                        found = claim_writes.renew(
                            conn, ends, reports, lease_s=self._who().lease_s, sent=sent
                        )
                        claim_writes.store_cursors(conn, works)
                    self._excuse(conn, found.lost)
            except db.Error as error:
                self._renewals.refused(error)
                for work in works:
                    work.unsaved = work.unsaved or reports[work.lease]
                raise
            self._renewals.renewed()
        stop_at = sent + config.CANCEL_GRACE_S.read()
        for each in self._slots:
            each.in_flight.renewed(found, stop_at)
        for work in works:
            self._renewed(work, found, sent, stop_at)
        self._keep_kill_timers()
        self._write_back_due()

    def _excuse(self, conn: db.Connection, lost: Sequence[job_tables.Lease]) -> None:
        """Subtract the crash that losing these claims may have counted, since this process lives.

        Do not subtract it if the process itself stalled, for example because a handler kept the
        GIL.
        """
        if self._renewals.starved:
            self._charged.update(lost)
        else:
            for lease in lost[: notes.MAX_LEASES]:
                recovery.excuse(conn, lease, ended=False)
        while self._unwritten:
            recovery.excuse(conn, self._unwritten[0], ended=False)
            self._unwritten.popleft()

    def lost(self, lease: job_tables.Lease) -> None:
        """Note that an outcome was not written because its claim was lost; see `_excuse`."""
        if not self._renewals.starved and lease not in self._charged:
            self._unwritten.append(lease)
            self.wake("renew")

    def _fence(self) -> None:
        """Report to the parent and to the next worker if this exit is the database's fault."""
        if self._renewals.blame_database():
            self._leave_note()

    def _leave_note(self) -> None:
        """Report to the parent and to the next worker that the claims left behind count nothing."""
        self._status.fence()
        leases = [*(work.lease for work in self._works)]
        for each in self._slots:
            leases += each.in_flight.claims()
        self._exit_note.write(self._worker_ids(), dict.fromkeys(leases), self.unanswered())

    def _withdraw_note(self) -> None:
        self._status.unfence()
        self._exit_note.withdraw()

    def _worker_ids(self) -> list[str]:
        return [each.who().worker_id for each in self._slots]

    def _notes_pause(self) -> float:
        return NOTES_S if self._notes_left else NOTES_AGAIN_S

    def _report_notes(self) -> None:
        self._notes_left = True
        self._notes_left = not self._notes.report()

    def _renewed(
        self,
        work: current_job.Work,
        found: claims_in_flight.RenewalResult,
        sent: float,
        stop_at: float,
    ) -> None:
        if work.lease not in found.lost:
            work.renewed = sent
            if work.lease in found.cancelled:
                work.cancelled_by(stop_at)
        elif not work.settling and self._is_running(work):
            failure = guards.Failure(guards.EXIT_LOST, "reassigned", "the claim was lost")
            self._shutdown.end_by_guard(work, failure)

    def _write_back_due(self) -> None:
        """Record the due results of each slot, and hand back its due jobs."""
        for each in self._slots:
            if self.stop_deadline is not None:
                each.in_flight.return_waiting("shutdown")
            if each.in_flight.is_due():
                with each.in_flight.writing(), self._dedicated.using() as conn:
                    claim_writes.write(conn, each.in_flight)

    def _ends(self) -> tuple[float | None, float | None]:
        """Return when the first lease and the first budget of the running jobs end, or None."""
        works = self._works
        lease_ends = min((work.lease_end.ends for work in works), default=None)
        budgets = (ends for work in works if (ends := work.budget_ends) is not None)
        return lease_ends, min(budgets, default=None)

    def _keep_kill_timers(self) -> None:
        with self._lock:
            self._kill_timers.keep(*self._ends())

    def _status_record(self) -> Row:
        """Return what the parent needs to check the guards in this process's place."""
        works = self._works
        return shared_status.worker_record(
            self._who(), works[0] if works else None, shown=self._gpu.shown
        )

    def _check_guards(self) -> None:
        self._renewals.watched()
        self._keep_kill_timers()
        with self._lock:
            self._status.beat(self._now(), self._status_record())
        works, deadline = self._works, self.stop_deadline
        if not works and (code := self._gpu.requests_end(deadline)) is not None:
            self._shutdown.exit_with(code)
        for work in works:
            self._check_guards_of(work, deadline)
        self._note_lapsed()

    def _note_lapsed(self) -> None:
        """Leave a note for claims that lapsed for want of the database, while no handler ran.

        A crash may be counted for each, which `_excuse` subtracts when the database is back. If the
        next handler kills this process before that, the note is reported. It stays until two checks
        in a row find nothing lapsed: an outcome may be on its way in between.
        """
        now = self._now()
        running = {work.lease for work in self._works if not work.settling}
        found = {
            lease
            for each in self._slots
            for lease, end in each.in_flight.claims().items()
            if lease not in running and now >= end.ends
        }.union(self._unwritten)
        if found - self._lapsed and self._renewals.blame_database():
            self._lapsed |= found
            self._lapsed_note.write((), self._lapsed)
        elif not found and self._lapsed and self._was_clear:
            self._lapsed = frozenset()
            self._lapsed_note.withdraw()
        self._was_clear = not found

    def _check_guards_of(self, work: current_job.Work, deadline: float | None) -> None:
        failure = work.verdict()
        if failure is not None:
            work.decided(failure)
            self._logs.store_soon()
            self._shutdown.end_by_guard(work, failure)
        elif work.stop_at is not None and self._now() >= work.stop_at and not work.settling:
            self._shutdown.stop_cancelled(work)
        elif deadline is not None and self._now() >= deadline:
            self._shutdown.give_back(work)
        elif deadline is not None and self._now() >= deadline - UNWIND_S:
            work.interrupt("shutdown")

    def _beat(self) -> None:
        columns, is_measured = self._gpu.columns(), self._gpu.is_measured
        with self._dedicated.using() as conn:
            for each in self._slots:
                workers.report(conn, self._report(each) | columns)
            self._gpu.publish_sizes(conn, columns["known_models"])
        if is_measured:
            self._gpu.published.set()

    def _report(self, own: slot.Slot) -> JsonDict:
        who, works = own.who(), self._works_of(own)
        detail = {
            "lease_s": who.lease_s,
            "lock": self.locked,
            "claim": workers.claim_detail(who),
            **self._gpu.detail(),
            **self.memory.detail(),
        }
        return {
            "worker_id": who.worker_id,
            "host_label": who.host,
            "queue": who.queue,
            "pid": os.getpid(),
            "state": "busy" if works else "throttled" if self.memory.active else "idle",
            "job_ids": [work.job["id"] for work in works],
            "detail": payload.encode(detail, "detail"),
            "obey": who.obey,
            "concurrency": own.concurrency,
        }

    def _works_of(self, own: slot.Slot) -> list[current_job.Work]:
        """Return the running jobs of a slot."""
        if len(self._slots) == 1:
            return self._works
        queue = own.who().queue
        return [work for work in self._works if work.job["queue"] == queue]

    def _check_control(self) -> None:
        """Read the ON/OFF rows while a job runs or a model is loaded.

        Otherwise there is nothing to stop, since an OFF worker claims nothing.
        """
        if self._works or any(each.in_flight.ids() for each in self._slots):
            self._renew()  # it also finds a cancel whose notification was lost
        elif not self._gpu.holds_model:
            return
        for each in self._slots:
            self._check_control_of(each)
        self._write_back_due()

    def _check_control_of(self, own: slot.Slot) -> None:
        works, holds, who = self._works_of(own), bool(own.in_flight.ids()), own.who()
        if not (works or holds or self._gpu.holds_model):
            return
        watcher = worker_control.WorkerControlWatcher(
            _Stopped(self, own),
            on_exit=self._shutdown.exit_with,
            host=who.host,
            queue=who.queue,
            read=self._stop_policy,
        )
        policy = watcher.policy()
        if policy is None:
            return
        if holds:
            # From now on no waiting job starts, and nothing new is claimed.
            own.in_flight.return_waiting("turned off")
            works = self._works_of(own)
        if not works and (holds or self._works_of(own)):
            return
        if not works or any(self._is_running(work) for work in works):
            if stop_policies.handler(policy) is stop_policies.HARD:
                self._shutdown.announce(guards.EXIT_CONTROL)
            watcher.obey(policy)

    def _stop_policy(self, host: str, queue: str) -> str | None:
        with self._dedicated.using() as conn:
            return controls.off_policy(conn, host, queue)

    def _check_stalls(self) -> None:
        """Store due progress, and record the stalls that guards suspect."""
        works, now = self._works, self._now()
        if any(work.unsaved is not None and now - work.renewed >= PROGRESS_S for work in works):
            self._renew()
        for work in works:
            self._gpu.report_suspicions(work)

    def _wake_parts(self) -> None:
        if (loop := self._loop) is not None:
            loop.wake("parts")

    def _parts_pause(self) -> float:
        return PARTS_S if any(work.has_left_parts for work in self._works) else math.inf

    def _store_parts(self) -> None:
        """Store what handlers in this process have streamed and have not sent themselves."""
        if self._now() < self._parts_at:
            return
        for work in self._works:
            try:
                work.store_parts(functools.partial(self._store_batch, work.lease))
            except (db.OperationalError, db.InterfaceError):
                self._parts_at = self._now() + PARTS_AGAIN_S
                raise

    def _store_batch(self, lease: job_tables.Lease, request: JsonDict) -> None:
        with self._dedicated.using() as conn:
            job_steps.answer(conn, lease, request)

    def _is_running(self, work: current_job.Work) -> bool:
        return any(each is work for each in self._works)

    def _claims_with(
        self, work: current_job.Work | None
    ) -> list[claims_in_flight.ClaimsInFlight] | None:
        """Return all claims in flight, or None if `work` is given and has ended."""
        if work is not None and not self._is_running(work):
            return None
        return [each.in_flight for each in self._slots]

    def requeue(self, own: slot.Slot, reason: str) -> None:
        """Hand back a slot's running jobs to the front and its waiting jobs; record results."""
        own.in_flight.return_waiting(reason)
        works = self._works_of(own)
        try:
            with own.in_flight.writing(), self._dedicated.using() as conn:
                for work in works:
                    handback.hand_back(conn, work.lease, reason=reason, front=True)
                own.in_flight.remove(work.lease for work in works)
                claim_writes.write(conn, own.in_flight)
        except db.Error:
            self._shutdown.left_behind = True
            raise

    def clear_model(self, own: slot.Slot) -> None:
        """Record that this worker's model is unloaded and that its heartbeat has ended."""
        who = own.who()
        with self._dedicated.using() as conn:
            workers.clear_model(conn, who.host, who.queue, mark_stale=True)


class _Stopped:
    """The worker of a slot as a stop policy sees it."""

    def __init__(self, watch: LeaseKeeper, own: slot.Slot) -> None:
        self._watch = watch
        self._own = own

    def requeue_in_flight(self, reason: str) -> None:
        """Hand back all jobs without counting an attempt; record results."""
        self._watch.requeue(self._own, reason)

    def clear_model(self) -> None:
        """Record that this worker's model is unloaded and that its heartbeat has ended."""
        self._watch.clear_model(self._own)
