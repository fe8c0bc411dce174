"""Keep the leases of a worker's jobs, and act on cancels, stops and the verdicts of guards.

Its length: each renewal, guard, stop and cancel may end the same job, and one place decides which.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics
from queue_workflows.engine import handback, job_tables, workers
from queue_workflows.runtime import clock, printed_lines, service
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import ExitFn, NowFn, Row
from queue_workflows.worker import (
    capture,
    claim_writes,
    claims_in_flight,
    crash_excuses,
    current_job,
    gpu_runtime,
    guards,
    heartbeat,
    job_ending,
    kill_timers,
    memory_throttle,
    model_requests,
    note_reporter,
    off_switch,
    process_jobs,
    renewal_failures,
    shutdown,
    slot,
    unsent_parts,
)

_log = logging.getLogger(__name__)
CHECK_S = 0.5
STALLS_S = 0.5
BATCH_S = 0.5
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
    `on_exit` ends the process; tests replace it, which also disables the kernel timers. `ending`
    ends jobs; None: with the process. `sampler` measures the GPU and the memory, by default only on
    the gpu queue. `metrics` samples the machine; this worker stores the samples. `card`: the one
    GPU that this worker uses.
    """

    def __init__(
        self,
        slots: Sequence[slot.Slot],
        *,
        model_cache: model_requests.Models | None = None,
        known_models: Callable[[], list[str] | None] = lambda: None,
        on_exit: ExitFn = os._exit,
        ending: job_ending.Ending | None = None,
        now_fn: NowFn = clock.boot_s,
        sampler: Callable[[], worker_usage.Sample] | None = None,
        metrics: hw_metrics.Sampler | None = None,
        card: int | None = None,
    ) -> None:
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        self._now = now_fn
        self._who = who = slots[0].who
        self._lock = threading.Lock()
        """Held while jobs are added and removed, and their ends put into timers."""
        self._jobs = process_jobs.ProcessJobs(slots)
        self._dedicated = db.DedicatedConnection()
        self._kill_timers = kill_timers.KillTimers(enabled=on_exit is os._exit, now_fn=now_fn)
        self._renewals = renewal_failures.Renewals(who().lease_s, self._dedicated, now_fn)
        self.excuses = crash_excuses.CrashExcuses(self._jobs, self._renewals, now_fn)
        self._notes = note_reporter.Reporter(self._dedicated)
        self._parts = unsent_parts.UnsentParts(self._jobs, self._dedicated, now_fn)
        self._logs = capture.Source(self._printing)
        self._notified_at = 0.0
        """When it last received a notification of a cancel or a switch."""
        self._stops: list[float] = []
        self._batches = False
        self._gpu = gpu_runtime.GpuRuntime(
            who,
            dedicated=self._dedicated,
            works=lambda: self._jobs.running,
            wake=self.wake,
            model_cache=model_cache,
            known_models=known_models,
            sampler=sampler,
            metrics=metrics,
            now_fn=now_fn,
            card=card,
        )
        self.memory = memory_throttle.MemoryThrottle(
            self._jobs.worker_ids,
            is_busy=self._jobs.is_busy,
            dedicated=self._dedicated,
            changed=lambda: self.wake("beat"),
            now_fn=now_fn,
        )
        """Says whether this worker may claim."""
        self.heartbeat = heartbeat.Heartbeat(self._jobs, self._gpu, self.memory, self._dedicated)
        self._shutdown = ending or self._process_ending(on_exit)
        self.switches = [self._off_switch(each) for each in slots]
        for each in slots:
            each.in_flight.on_lost = self.lost
        self._tasks = [*self._own_tasks(who().lease_s), *self._gpu.tasks()]
        self._loop: service.Loop | None = None

    def _process_ending(self, on_exit: ExitFn) -> job_ending.Ending:
        return shutdown.Shutdown(
            [each.who for each in self._jobs.slots],
            self._jobs.claims_with,
            dedicated=self._dedicated,
            kill_timers_=self._kill_timers,
            fence=self.excuses.fence,
            leave_note=self.excuses.leave_note,
            withdraw_note=self.excuses.withdraw_note,
            on_exit=on_exit,
            now_fn=self._now,
        )

    def _off_switch(self, own: slot.Slot) -> off_switch.OffSwitch:
        return off_switch.OffSwitch(
            own,
            self._jobs,
            self._dedicated,
            holds_model=lambda: self._gpu.holds_model,
            requeue=self.requeue,
            ending=self._shutdown,
        )

    def _own_tasks(self, lease_s: float) -> list[service.Task]:
        tasks = [
            service.Task("renew", lambda: renew_every_s(lease_s), self._renew),
            service.Task("stalls", STALLS_S, self._check_stalls),
            service.Task("notes", self._notes.pause_s, self._notes.report),
            service.Task("parts", self._parts.pause_s, self._parts.store),
        ]
        if not config.DISABLE_WORKER_HEARTBEAT.read():
            tasks.append(
                service.Task("beat", config.HEARTBEAT_INTERVAL_S.read, self.heartbeat.send)
            )
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
        self.excuses.start()
        with contextlib.suppress(db.Error):
            # Before the first claim: a job whose crash is not subtracted yet may end as poison.
            self._notes.report()
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

    def enable_batches(self) -> None:
        """Let the keeper record and hand back jobs of its slots; call it before `running`."""
        self._batches = True
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
        for each in self._jobs.slots:
            each.in_flight.flush_soon()
        if (loop := self._loop) is not None:
            loop.wake("batch")

    @contextlib.contextmanager
    def recording(self, work: current_job.Work) -> Generator[None]:
        """Check the guards of a job while its outcome is written apart from its batch."""
        with self._lock:
            self._jobs.add(work)
        try:
            yield
        finally:
            self.end(work)

    def begin(self, work: current_job.Work) -> None:
        """Note that a job runs, and arm its kernel timers."""
        self._logs.begin()
        work.on_unsent_parts = self._wake_parts
        if not self._batches:
            self._renewals.renewed(self._now())  # its claim was one
        with self._lock:
            self._jobs.add(work)
            lease_ends = self._jobs.lease_ends()
            assert lease_ends is not None
            self._kill_timers.begin(lease_ends, self._jobs.budget_ends())

    def handler_ended(self, work: current_job.Work) -> None:
        """Note that the handler has ended and that its outcome is about to be written."""
        work.settling = True
        self._logs.end(work.lease)
        printed_lines.end(work.lease.job_id)

    def _printing(self) -> job_tables.Lease | None:
        """Return the claim whose handler prints now, or None."""
        works = self._jobs.running
        return works[0].lease if works and not works[0].settling else None

    def end(self, work: current_job.Work) -> None:
        """Note that the job has ended; its guards are not checked any more."""
        with self._lock:
            self._jobs.remove(work)

    def _close(self) -> None:
        """Hand back what waits, deregister the worker and close the connection."""
        try:
            for each in self._jobs.slots:
                each.in_flight.return_waiting("shutdown")
                if each.in_flight.ids():
                    claim_writes.write_back(self._dedicated.get(), each.in_flight)
            if (conn := self._dedicated.current) is not None:
                for worker_id in self._jobs.worker_ids():
                    workers.stop(conn, worker_id)
        except db.Error as error:
            _log.debug("cannot deregister: %s", error)
        self.excuses.stop()
        self._dedicated.close()

    def cancelled(self, name: str) -> None:
        """Renew at once if the cancelled run or job is one of this worker's."""
        self._notified_at = self._now()
        names = {
            text[:1000]
            for work in self._jobs.running
            for text in (work.job["id"], str(work.job.get("run_id")))
        }
        if any(each.in_flight.cancel(name) for each in self._jobs.slots):
            self.wake("batch")
        elif name in names or any(name in each.in_flight.ids() for each in self._jobs.slots):
            self.wake("renew")

    def lost(self, lease: job_tables.Lease) -> None:
        """Note that an outcome was not written because its claim was lost; see `CrashExcuses`."""
        if self.excuses.add(lease):
            self.wake("renew")

    def _renew(self) -> None:
        reports = dict[job_tables.Lease, str | None]()
        with self._jobs.slots[0].in_flight.writing():
            works, sent = self._jobs.running, self._now()
            ends = self._jobs.claims()
            for work in works:
                ends.setdefault(work.lease, work.lease_end)
                reports[work.lease], work.unsaved = work.unsaved, None
            if not ends and not self.excuses.are_due:
                return
            found = claims_in_flight.RenewalResult([], [])
            try:
                with self._dedicated.using() as conn:
                    if ends:
                        found = claim_writes.renew(
                            conn, ends, reports, lease_s=self._who().lease_s, sent=sent
                        )
                        claim_writes.store_cursors(conn, works)
                    self.excuses.excuse(conn, found.lost)
            except db.Error as error:
                self._renewals.refused(error)
                for work in works:
                    work.unsaved = work.unsaved or reports[work.lease]
                raise
            self._renewals.renewed(sent)
        stop_at = sent + config.CANCEL_GRACE_S.read()
        for each in self._jobs.slots:
            each.in_flight.renewed(found, stop_at)
        for work in works:
            self._renewed(work, found, sent, stop_at)
        self._keep_kill_timers()
        self._write_back_due()

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
        elif not work.settling and self._jobs.is_running(work):
            failure = guards.Failure(guards.EXIT_LOST, "reassigned", "the claim was lost")
            self._shutdown.end_by_guard(work, failure)

    def _write_back_due(self) -> None:
        """Record the due results of each slot, and hand back its due jobs."""
        for each in self._jobs.slots:
            if self.stop_deadline is not None:
                each.in_flight.return_waiting("shutdown")
            if each.in_flight.is_due():
                with each.in_flight.writing(), self._dedicated.using() as conn:
                    claim_writes.write(conn, each.in_flight)

    def _keep_kill_timers(self) -> None:
        with self._lock:
            self._kill_timers.keep(self._jobs.lease_ends(), self._jobs.budget_ends())

    def _check_guards(self) -> None:
        self._renewals.watched()
        self._keep_kill_timers()
        works, deadline = self._jobs.running, self.stop_deadline
        if not works and (code := self._gpu.requests_end(deadline)) is not None:
            self._shutdown.exit_with(code)
        for work in works:
            self._check_guards_of(work, deadline)
        self.excuses.note_lapsed()

    def _check_guards_of(self, work: current_job.Work, deadline: float | None) -> None:
        failure = work.verdict(stopped=self._gpu.is_stopped)
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

    def _check_control(self) -> None:
        """Read the ON/OFF rows while a job runs or a model is loaded.

        Otherwise there is nothing to stop, since an OFF worker claims nothing.
        """
        if self._jobs.is_busy():
            self._renew()  # it also finds a cancel whose notification was lost
        elif not self._gpu.holds_model:
            return
        for each in self.switches:
            each.check()
        self._write_back_due()

    def _check_stalls(self) -> None:
        """Store due progress, and record the stalls that guards suspect."""
        works, now = self._jobs.running, self._now()
        if any(work.unsaved is not None and now - work.renewed >= PROGRESS_S for work in works):
            self._renew()
        for work in works:
            self._gpu.report_suspicions(work)

    def _wake_parts(self) -> None:
        if (loop := self._loop) is not None:
            loop.wake("parts")

    def requeue(self, own: slot.Slot, reason: str) -> None:
        """Hand back a slot's running jobs to the front and its waiting jobs; record results."""
        own.in_flight.return_waiting(reason)
        works = self._jobs.running_in(own)
        if not works and not own.in_flight.ids():
            return
        try:
            with own.in_flight.writing(), self._dedicated.using() as conn:
                for work in works:
                    handback.hand_back(conn, work.lease, reason=reason, front=True)
                own.in_flight.remove(work.lease for work in works)
                claim_writes.write(conn, own.in_flight)
        except db.Error:
            self._shutdown.left_behind = True
            raise
