"""The watch: what renews, reports, obeys and judges for as long as the worker lives."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, worker_control
from queue_workflows.dag import payload
from queue_workflows.engine import controls, handback, job_tables, recovery, workers
from queue_workflows.model_cache import ModelCache
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, service
from queue_workflows.telemetry import gpu_health
from queue_workflows.types import ExitFn, JsonDict, NowFn, Row
from queue_workflows.worker import (
    capture,
    claims_in_flight,
    current_job,
    fencing,
    gpu_runtime,
    guards,
    kill_timers,
    model_requests,
    shared_status,
    shutdown,
    slot,
)

_log = logging.getLogger(__name__)
RENEW_MAX_S = 10.0
JUDGE_S = 0.5
DOUBTS_S = 0.5
NOTES_S = 2.0
"""How often a note is tried again whose process may still run, or while the database is away."""
NOTES_AGAIN_S = 30.0
"""How often a worker looks for the notes of others of this machine that do not come back."""
BATCH_S = 0.5
PROGRESS_S = 1.0
"""How often progress is stored at most."""
UNWIND_S = 2.0
"""A stopping worker ends a task that yields or awaits so long before it would leave without it."""


class LeaseKeeper:
    """Renews the leases of the jobs that run, beats, obeys OFF, and carries out what guards decide.

    Of one worker, or of all `lanes` of a process. Holds one connection of its own. `on_exit` leaves
    the process (a seam for tests, which turns the kernel timers off). `sampler` tells what the GPU
    and the memory do; by default on the gpu queue. `metrics`: whose samples of the box it stores.
    """

    def __init__(
        self,
        lanes: Sequence[slot.Slot],
        *,
        model_cache: ModelCache | None = None,
        known_models: Callable[[], list[str] | None] = lambda: None,
        on_exit: ExitFn = os._exit,
        now_fn: NowFn = clock.boot_s,
        sampler: Callable[[], gpu_health.Sample] | None = None,
        metrics: hw_metrics.Sampler | None = None,
    ) -> None:
        self._lanes = lanes
        self._who = who = lanes[0].who
        self._several = len(lanes) > 1 or lanes[0].concurrency > 1
        """Whether bodies may run side by side."""
        self._now = now_fn
        self._fuses = kill_timers.KillTimers(enabled=on_exit is os._exit, now_fn=now_fn)
        self._board = shared_status.attach()
        self._lock = threading.Lock()
        self._works: list[current_job.Work] = []
        """The jobs that run, in the order in which they began; never changed in place."""
        self._batches = False
        self._told = 0.0
        """When it last heard of a cancel or a switch."""
        self._kept = db.DedicatedConnection()
        self._gear = gpu_runtime.GpuRuntime(
            who,
            kept=self._kept,
            works=lambda: self._works,
            wake=self.wake,
            model_cache=model_cache,
            known_models=known_models,
            sampler=sampler,
            metrics=metrics,
            now_fn=now_fn,
        )
        self._logs = capture.Source(self._printing)
        self._leaving = shutdown.Shutdown(
            [each.who for each in lanes],
            self._held_with,
            kept=self._kept,
            fuses_=self._fuses,
            fence=self._fence,
            on_exit=on_exit,
            now_fn=now_fn,
        )
        self._renewals = fencing.Renewals(who().lease_s, self._kept, now_fn)
        self._notes = fencing.Reporter(self._kept)
        self._notes_left = False
        self._unwritten = deque[job_tables.Lease](maxlen=fencing.MAX_LEASES)
        """Claims that were lost before their outcomes were written, by nobody's fault here."""
        self._charged = set[job_tables.Lease]()
        """Claims that were lost while this process was held up itself: few in its life."""
        for each in lanes:
            each.held.on_lost = self.lost
        self._stops: list[float] = []
        self.locked = False
        """Whether a session of this worker holds its lock of life."""
        self._tasks = [*self._own_tasks(who().lease_s), *self._gear.tasks()]
        self._loop: service.Loop | None = None

    def _own_tasks(self, lease_s: float) -> list[service.Task]:
        tasks = [
            service.Task("renew", lambda: min(RENEW_MAX_S, lease_s / 3), self._renew),
            service.Task("doubts", DOUBTS_S, self._note_doubts),
            service.Task("notes", self._notes_pause, self._report_notes),
        ]
        if not config.DISABLE_WORKER_HEARTBEAT.read():
            tasks.append(service.Task("beat", config.HEARTBEAT_INTERVAL_S.read, self._beat))
        if not config.DISABLE_WORKER_CONTROL.read():
            control_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("control", control_s, self._obey))
        return tasks

    @property
    def model_requests(self) -> model_requests.Requests | None:
        """What the worker is asked to load or unload; None without a model cache."""
        return self._gear.requests

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Watch in a thread of its own while the block runs; joins a watch that runs already."""
        if self._loop is not None:
            yield
            return
        with contextlib.suppress(db.Error):
            # Before anything is claimed: a job that is claimed again may end as poison.
            self._report_notes()
        self._loop = service.Loop("worker-watch", self._tasks, now_fn=self._now)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._logs.listening())
                stack.enter_context(self._loop)
                # Apart: it asks no database, which may keep the others waiting.
                judging = [service.Task("judge", JUDGE_S, self._judge)]
                stack.enter_context(service.Loop("worker-judge", judging, now_fn=self._now))
                stack.enter_context(self._gear.beside())
                yield
        finally:
            self._loop = None
            self._fuses.release()
            self._board.clear()
            self._close()

    def wake(self, *tasks: str) -> None:
        """Make tasks (`renew`, `beat`, `control` ...) due at once, if not disabled."""
        self._told = self._now()
        loop, known = self._loop, {task.name for task in self._tasks}
        if loop is not None and (due := known.intersection(tasks)):
            loop.wake(*due)

    def introduce(self, stopped: Callable[[], bool]) -> None:
        """Wait until the fleet has heard of this worker's card; see `gear.GpuRuntime.introduce`."""
        self._gear.introduce(stopped)

    @property
    def stop_deadline(self) -> float | None:
        """Instant (`clock.boot_s`) at which a stopping worker gives its jobs back."""
        return min(self._stops, default=None)

    def stop_by(self, deadline: float) -> None:
        """Give the jobs back at that instant, if not before; safe in a signal handler."""
        self._stops.append(deadline)

    @property
    def is_leaving(self) -> bool:
        """Whether the process is about to leave: nothing is claimed any more."""
        return self._leaving.decided

    def batches(self) -> None:
        """For a worker whose lanes hold jobs, before it is watched: the watch has a hand in it."""
        self._batches = True
        self._board.tell()
        self._tasks.append(service.Task("batch", BATCH_S, self._mind_batch))

    def hold(
        self,
        own: claims_in_flight.ClaimsInFlight,
        jobs: Sequence[Row],
        lease_end: guards.LeaseEnd,
        sent_at: float,
    ) -> None:
        """Jobs of the lane `own` were claimed by a statement that was sent then.

        From now on their leases are renewed; a job that was cancelled, and all whose turn has not
        come when the worker stops, is turned off, or is busy with one for LONG_S, are handed back;
        results are recorded after FLUSH_AFTER_S.
        """
        own.add(jobs, lease_end)
        if self._told >= sent_at:
            # Who was told may have looked before there was anything to see.
            self.wake("renew", "control")

    def record(self) -> None:
        """Record the results that wait, while the thread that calls goes on."""
        for each in self._lanes:
            each.held.hurry()
        if (loop := self._loop) is not None:
            loop.wake("batch")

    @contextlib.contextmanager
    def recording(self, work: current_job.Work) -> Generator[None]:
        """An outcome is written apart from its batch: judged meanwhile as if its job ran."""
        with self._lock:
            self._works = [*self._works, work]
        try:
            yield
        finally:
            self.end(work)

    def begin(self, work: current_job.Work) -> None:
        """A job runs from now on."""
        if not self._several:
            self._logs.begin()
            if not self._batches:
                self._renewals.renewed()  # its claim was one
        with self._lock:
            self._works = [*self._works, work]
            lease_ends, budget_ends = self._ends()
            assert lease_ends is not None
            self._fuses.begin(lease_ends, budget_ends)
            if self._batches:
                self._board.begin(seq=work.job["seq"])
            elif not self._gear.samples:
                self._board.begin()
            else:
                work.heard = self._board.heard
                self._board.begin(self._account())

    def settle(self, work: current_job.Work) -> None:
        """The body has ended, and its outcome is about to be written."""
        work.settling = True
        self._logs.end(work.lease)

    def _printing(self) -> job_tables.Lease | None:
        """The claim of the body that runs now, or that asks."""
        works = self._works
        work = current_job.here.get() if self._several else works[0] if works else None
        return None if work is None or work.settling else work.lease

    def end(self, work: current_job.Work) -> None:
        """The job has ended; it is judged no more."""
        with self._lock:
            self._board.end(seq=work.job["seq"] if self._batches else None)
            self._works = [each for each in self._works if each is not work]

    def _close(self) -> None:
        """Say that the worker ends in good order, and close the connection."""
        try:
            for each in self._lanes:
                each.held.give_up("shutdown")
                if each.held.ids():
                    claims_in_flight.write_back(self._kept.get(), each.held)
            if (conn := self._kept.current) is not None:
                for each in self._lanes:
                    workers.stop(conn, each.who().worker_id)
        except db.Error as error:
            _log.debug("could not say goodbye: %s", error)
        self._kept.close()

    def cancelled(self, name: str) -> None:
        """A run or job of this name was cancelled: look at once if it is ours."""
        self._told = self._now()
        names = {
            text[:1000]
            for work in self._works
            for text in (work.job["id"], str(work.job.get("run_id")))
        }
        if any(each.held.cancel(name) for each in self._lanes):
            self.wake("batch")
        elif name in names or any(name in each.held.ids() for each in self._lanes):
            self.wake("renew")

    def _renew(self) -> None:
        said = dict[job_tables.Lease, str | None]()
        ends = dict[job_tables.Lease, guards.LeaseEnd]()
        with self._lanes[0].held.writing():
            works, sent = self._works, self._now()
            for each in self._lanes:
                ends |= each.held.claims()
            for work in works:
                ends.setdefault(work.lease, work.lease_end)
                said[work.lease], work.unsaved = work.unsaved, None
            if not ends and not self._unwritten:
                return
            found = claims_in_flight.Found([], [])
            try:
                with self._kept.using() as conn:
                    if ends:
                        found = claims_in_flight.renew(
                            conn, ends, said, lease_s=self._who().lease_s, sent=sent
                        )
                    self._excuse(conn, found.lost)
            except db.Error as error:
                self._renewals.refused(error)
                for work in works:
                    work.unsaved = work.unsaved or said[work.lease]
                raise
            self._renewals.renewed()
        stop_at = sent + config.CANCEL_GRACE_S.read()
        for each in self._lanes:
            each.held.renewed(found, stop_at)
        for work in works:
            self._renewed(work, found, sent, stop_at)
        self._keep_fuses()
        self._mind_batch()

    def _excuse(self, conn: db.Connection, lost: Sequence[job_tables.Lease]) -> None:
        """Take back the crash that the end of these claims may have counted: this process lives.

        Not where it was held up itself, as by a handler that kept the GIL past its lease.
        """
        if self._renewals.starved:
            self._charged.update(lost)
        else:
            for lease in lost[: fencing.MAX_LEASES]:
                recovery.excuse(conn, lease, ended=False)
        while self._unwritten:
            recovery.excuse(conn, self._unwritten[0], ended=False)
            self._unwritten.popleft()

    def lost(self, lease: job_tables.Lease) -> None:
        """An outcome was not written, as its claim is held no longer: see `_excuse`."""
        if not self._renewals.starved and lease not in self._charged:
            self._unwritten.append(lease)
            self.wake("renew")

    def _fence(self) -> None:
        """Say whether this exit is the database's fault, to a parent and to the next worker."""
        if not self._renewals.blame_database():
            return
        self._board.fence()
        held_ = [*(work.lease for work in self._works)]
        for each in self._lanes:
            held_ += each.held.claims()
        fencing.write_note((each.who().worker_id for each in self._lanes), dict.fromkeys(held_))

    def _notes_pause(self) -> float:
        return NOTES_S if self._notes_left else NOTES_AGAIN_S

    def _report_notes(self) -> None:
        self._notes_left = True
        self._notes_left = not self._notes.report()

    def _renewed(
        self, work: current_job.Work, found: claims_in_flight.Found, sent: float, stop_at: float
    ) -> None:
        if work.lease not in found.lost:
            work.renewed = sent
            if work.lease in found.asked:
                work.cancelled_by(stop_at)
        elif not work.settling and self._is_running(work):
            trip = guards.Trip(guards.EXIT_LOST, "reassigned", "the claim is held no longer")
            self._leaving.trip(work, trip)

    def _mind_batch(self) -> None:
        """Record results and hand back jobs, where either is due."""
        for each in self._lanes:
            if self.stop_deadline is not None:
                each.held.give_up("shutdown")
            if each.held.is_due():
                with self._kept.using() as conn:
                    claims_in_flight.write_back(conn, each.held)

    def _ends(self) -> tuple[float | None, float | None]:
        """When the first lease ends of the jobs that run, and the first budget."""
        works = self._works
        if len(works) == 1 and not self._several:
            return works[0].lease_end.ends, works[0].budget_ends
        lease_ends = min((work.lease_end.ends for work in works), default=None)
        budgets = [(ends, work) for work in works if (ends := work.budget_ends) is not None]
        if not budgets:
            return lease_ends, None
        budget_ends, first = min(budgets, key=lambda each: each[0])
        self._board.due(first.job["seq"])
        return lease_ends, budget_ends

    def _keep_fuses(self) -> None:
        with self._lock:
            self._fuses.keep(*self._ends())

    def _account(self) -> Row:
        """What the parent needs to know to judge in our stead."""
        works = self._works
        if self._several:
            queues = dict.fromkeys(work.job["queue"] for work in works)
            return shared_status.account(self._who(), None, queues=[*queues])
        return shared_status.account(
            self._who(), works[0] if works else None, shown=self._gear.shown
        )

    def _judge(self) -> None:
        self._renewals.watched()
        self._keep_fuses()
        with self._lock:
            self._board.beat(self._now(), self._account())
        works, deadline = self._works, self.stop_deadline
        if not works and (code := self._gear.requests_end(deadline)) is not None:
            self._leaving.obeyed(code)
        for work in works:
            self._judge_one(work, deadline)

    def _judge_one(self, work: current_job.Work, deadline: float | None) -> None:
        trip = work.verdict()
        if trip is not None:
            self._logs.hurry()
            self._leaving.trip(work, trip)
        elif work.stop_at is not None and self._now() >= work.stop_at and not work.settling:
            self._leaving.stop_cancelled(work)
        elif deadline is not None and self._now() >= deadline:
            self._leaving.give_back(work)
        elif deadline is not None and self._now() >= deadline - UNWIND_S:
            work.interrupt("shutdown")

    def _beat(self) -> None:
        columns, is_measured = self._gear.columns(), self._gear.is_measured
        with self._kept.using() as conn:
            for each in self._lanes:
                workers.report(conn, self._report(each) | columns)
            self._gear.publish_sizes(conn, columns["known_models"])
        if is_measured:
            self._gear.introduced.set()

    def _report(self, own: slot.Slot) -> JsonDict:
        who, works = own.who(), self._works_of(own)
        detail = {
            "lease_s": who.lease_s,
            "lock": self.locked,
            "claim": workers.claim_detail(who),
            **self._gear.detail(),
        }
        return {
            "worker_id": who.worker_id,
            "host_label": who.host,
            "queue": who.queue,
            "pid": os.getpid(),
            "state": "busy" if works else "idle",
            "job_ids": [work.job["id"] for work in works],
            "detail": payload.encode(detail, "detail"),
            "obey": who.obey,
            "concurrency": own.concurrency,
        }

    def _works_of(self, own: slot.Slot) -> list[current_job.Work]:
        """The jobs of a lane that run."""
        if len(self._lanes) == 1:
            return self._works
        queue = own.who().queue
        return [work for work in self._works if work.job["queue"] == queue]

    def _obey(self) -> None:
        """Read the ON/OFF rows while a job runs or a model is warm.

        Without either there is nothing to stop: the claims refuse by themselves.
        """
        if self._works or any(each.held.ids() for each in self._lanes):
            self._renew()  # which also sees a cancel that no notification told of
        elif not self._gear.holds_model:
            return
        for each in self._lanes:
            self._obey_in(each)
        self._mind_batch()

    def _obey_in(self, own: slot.Slot) -> None:
        works, holds, who = self._works_of(own), bool(own.held.ids()), own.who()
        if not (works or holds or self._gear.holds_model):
            return
        watcher = worker_control.WorkerControlWatcher(
            _Stopped(self, own),
            on_exit=self._leaving.obeyed,
            host=who.host,
            queue=who.queue,
            read=self._stop_policy,
        )
        policy = watcher.policy()
        if policy is None:
            return
        if holds:
            # Nothing of it begins from now on, and nothing new is claimed.
            own.held.give_up("turned off")
            works = self._works_of(own)
        if not works and (holds or self._works_of(own)):
            return
        if not works or any(self._is_running(work) for work in works):
            if stop_policies.handler(policy) is stop_policies.HARD:
                self._fuses.leave(guards.EXIT_CONTROL)
            watcher.obey(policy)

    def _stop_policy(self, host: str, queue: str) -> str | None:
        with self._kept.using() as conn:
            return controls.off_policy(conn, host, queue)

    def _note_doubts(self) -> None:
        """Store progress, and say what guards suspect."""
        works, now = self._works, self._now()
        if any(work.unsaved is not None and now - work.renewed >= PROGRESS_S for work in works):
            self._renew()
        for work in works:
            self._gear.doubt(work)

    def _is_running(self, work: current_job.Work) -> bool:
        return any(each is work for each in self._works)

    def _held_with(
        self, work: current_job.Work | None
    ) -> list[claims_in_flight.ClaimsInFlight] | None:
        """All that is held while this job runs, or in any case; None once it does not."""
        if work is not None and not self._is_running(work):
            return None
        return [each.held for each in self._lanes]

    def requeue(self, own: slot.Slot, reason: str) -> None:
        """Give back what runs in a lane, at the front, and what waits; record what is done."""
        own.held.give_up(reason)
        works = self._works_of(own)
        with self._kept.using() as conn:
            for work in works:
                handback.hand_back(conn, work.lease, reason=reason, front=True)
            own.held.settled(work.lease for work in works)
            claims_in_flight.write_back(conn, own.held)

    def clear_model(self, own: slot.Slot) -> None:
        """Let the fleet know that this host's model is gone and the host with it."""
        who = own.who()
        with self._kept.using() as conn:
            workers.clear_model(conn, who.host, who.queue, mark_stale=True)


class _Stopped:
    """What a stop policy may ask of the worker of a lane."""

    def __init__(self, watch: LeaseKeeper, own: slot.Slot) -> None:
        self._watch = watch
        self._own = own

    def requeue_in_flight(self, reason: str) -> None:
        """Give what runs back, at the front, and what waits; record what is done; count nothing."""
        self._watch.requeue(self._own, reason)

    def clear_model(self) -> None:
        """Let the fleet know that this host's model is gone and the host with it."""
        self._watch.clear_model(self._own)
