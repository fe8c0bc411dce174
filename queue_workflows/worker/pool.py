"""Run the main loop of a worker pool: record finished jobs, fill the free slots of each queue."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Sequence

from queue_workflows import config, db, errors
from queue_workflows.engine import controls, job_tables, outcomes, recovery
from queue_workflows.runtime import service
from queue_workflows.types import Row
from queue_workflows.worker import (
    claim_writes,
    claimer,
    claims_in_flight,
    current_job,
    guards,
    lease_keeper,
    loop,
    pool_threads,
    slot,
)

_log = logging.getLogger(__name__)


class _PoolQueue:
    """The slot of one queue, its claimer, and what the main thread knows of it."""

    def __init__(self, own: slot.Slot, dedicated: db.DedicatedConnection) -> None:
        self.slot = own
        self.in_flight = own.in_flight
        self.claimer = claimer.Claimer(job_tables.INGEST_JOBS, own.who, dedicated=dedicated)
        self.claimer.other_jobs = own.in_flight.ids
        self.claimer.on_lost = own.in_flight.on_lost
        self.queue = own.who().queue
        self.may_claim = False
        """Whether there may be a job to claim."""
        self.promote = False
        self.due_at = math.inf
        """When a limit of the queue admits the next job."""

    def free(self) -> int:
        """Return how many more handlers may run."""
        return self.slot.concurrency - len(self.in_flight.running())


class PoolLoop:
    """Run several jobs of several queues at once; claim all of them on the calling thread.

    It needs three connections whatever runs: for claims and records, for the lease keeper, and to
    listen. A job whose next crash would be its last runs alone, since a crash counts for all
    running jobs.
    """

    def __init__(self, slots: Sequence[slot.Slot], keeper: lease_keeper.LeaseKeeper) -> None:
        self._keeper = keeper
        keeper.enable_batches()
        self._dedicated = db.DedicatedConnection(self._opened)
        self._queues = [_PoolQueue(each, self._dedicated) for each in slots]
        keeper.may_hold_unknown_claims = lambda: any(
            each.claimer.may_hold_unknown_claims() for each in self._queues
        )
        keeper.unanswered = self._unanswered
        self._by_name = {each.queue: each for each in self._queues}
        self._handlers = pool_threads.HandlerThreads(keeper.begin, self._ended)
        self._exclusive: current_job.Work | None = None
        """The job that runs alone."""
        self._ready = threading.Event()
        self._pause = threading.Event()
        self._stopping = False

    def _unanswered(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in self._queues:
            found |= each.claimer.unanswered()
        return found

    def _opened(self, conn: db.Connection) -> None:
        for each in self._queues:
            each.claimer.opened(conn)

    def stop(self) -> None:
        """Claim no further job; safe in a signal handler."""
        self._stopping = True

    def run_forever(self) -> None:
        """Run jobs until `stop` is called and the running jobs have ended."""
        locks = [recovery.LIFE_LOCK + each.slot.who().worker_id for each in self._queues]
        channel = loop.READY_CHANNEL[job_tables.INGEST_JOBS.name]
        listener = db.listen(channel, "worker_control", "job_cancel", poll_s=3600.0, locks=locks)
        try:
            with service.Follow("worker-listen", listener, self._on_wake):
                self._serve()
        finally:
            self._handlers.stop()
            self._dedicated.close()

    def _serve(self) -> None:
        delay, logged, poll_at = 0.1, "", 0.0
        while not self._stopping or self._is_busy():
            self._ready.clear()
            if time.monotonic() >= poll_at:
                poll_at = time.monotonic() + config.CLAIM_POLL_S.read()
                self._mark_claimable(promote=True)
            for each in self._queues:
                if time.monotonic() >= each.due_at:
                    each.may_claim, each.promote, each.due_at = True, True, math.inf
            try:
                self._serve_all()
                delay, logged = 0.1, ""
            except db.Error as error:
                # The message changes during one outage, from "closed" to "starting up".
                if logged != (logged := error.sqlstate or "away"):
                    _log.warning("claiming waits for the database: %s", loop.brief(error))
                self._mark_claimable()
                self._pause.wait(delay * random.uniform(0.5, 1.0))  # noqa: S311  jitter
                delay = min(loop.BACKOFF_MAX_S, delay * 2)
                continue
            # A signal handler sets no event, so `stop` takes effect within a second.
            next_at = min(poll_at, *(each.due_at for each in self._queues))
            self._ready.wait(max(0.0, min(1.0, next_at - time.monotonic())))

    def _is_busy(self) -> bool:
        return any(each.in_flight.running() or each.in_flight.unrecorded() for each in self._queues)

    def _mark_claimable(self, *, promote: bool = False) -> None:
        """Note that every queue may have a job to claim."""
        for each in self._queues:
            each.may_claim = True
            each.promote |= promote

    def _on_wake(self, wake: db.Wake) -> None:
        if wake.reason == "connected":
            self._keeper.locked = True
            self._keeper.wake("beat")
        if wake.reason != "notify":
            # Notifications that were sent while the connection was lost are lost too.
            self._keeper.wake("renew", "control")
            self._mark_claimable()
            self._ready.set()
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self._keeper.cancelled(text)
            elif channel == "worker_control":
                self._on_control(text)
            elif (pool_queue := self._by_name.get(text)) is not None:
                pool_queue.may_claim = True
                self._ready.set()

    def _on_control(self, text: str) -> None:
        host = self._queues[0].slot.who().host
        named = {f"{host}:{each.queue}" for each in self._queues}
        if text in named or text == f"{host}:{controls.ALL}":
            self._keeper.wake("control", "beat")
            self._mark_claimable()
            self._ready.set()

    def _serve_all(self) -> None:
        """Serve the queues in turn until no queue makes progress."""
        moved = True
        while moved:
            moved = False
            for each in self._queues:
                moved |= self._serve_queue(each)

    def _serve_queue(self, pool_queue: _PoolQueue) -> bool:
        """Record a queue's finished jobs and fill its free slots; return whether anything happened.

        It takes one statement, apart from jobs that did not complete.
        """
        self._start_exclusive()
        free = (
            0
            if self._stopping or self._is_exclusive() or not pool_queue.may_claim
            else pool_queue.free()
        )
        done = pool_queue.in_flight.take_done()
        if not done and free < 1:
            return False
        if free:
            pool_queue.may_claim = (
                False  # before the claim, so that a notification during it counts
            )
        jobs = self._step(pool_queue, done, free)
        if free:
            pool_queue.due_at = time.monotonic() + pool_queue.claimer.wait_s
        # A job that may have crashed a worker is claimed alone; others may wait behind it.
        partial = pool_queue.claimer.isolated or any(job["crash_count"] for job in jobs)
        if free and (len(jobs) == free or (jobs and partial)):
            pool_queue.may_claim = True
        self._start(pool_queue, jobs)
        return bool(done or jobs)

    def _step(
        self, pool_queue: _PoolQueue, done: Sequence[claims_in_flight.Done], free: int
    ) -> list[Row]:
        completed = [each for each in done if each[1].kind == "completed"]
        one_by_one = [each for each in done if each[1].kind != "completed"]
        jobs: list[Row] = []
        try:
            with pool_queue.in_flight.writing():
                # Checked inside `writing`: a shutdown hands back all claims once it may write.
                if self._stopping or self._keeper.is_shutting_down:
                    free = 0
                if completed or free:
                    jobs = pool_queue.claimer.claim_batch(
                        free,
                        claim_writes.completed(completed),
                        promote=pool_queue.promote and free > 0,
                    )
                    pool_queue.in_flight.remove(work.lease for work, _ in completed)
                    pool_queue.promote &= not free
                self._hold(pool_queue, jobs)
        except (errors.ClaimLost, db.Error):
            pool_queue.in_flight.put_back(done)
            if not completed:
                raise
            pool_queue.may_claim, one_by_one = True, [*done]
        else:
            pool_queue.in_flight.put_back(one_by_one)
        for _ in one_by_one:
            for each in pool_queue.in_flight.take_done(1):
                self._record(pool_queue, *each)
        return jobs

    def _hold(self, pool_queue: _PoolQueue, jobs: Sequence[Row]) -> None:
        sent_at, lease_s = pool_queue.claimer.sent_at, pool_queue.slot.who().lease_s
        for job in jobs:
            self._keeper.add_claims(
                pool_queue.in_flight, [job], guards.LeaseEnd(sent_at, lease_s), sent_at
            )

    def _record(
        self, pool_queue: _PoolQueue, work: current_job.Work, outcome: outcomes.Outcome
    ) -> None:
        try:
            with self._keeper.recording(work):
                pool_queue.claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error)
        finally:
            pool_queue.in_flight.remove([work.lease])

    def _start(self, pool_queue: _PoolQueue, jobs: Sequence[Row]) -> None:
        """Start the jobs except one that has to run alone."""
        for job in jobs:
            if not 0 < config.MAX_CRASHES.read() - 1 <= job["crash_count"]:
                self._begin(pool_queue)

    def _begin(self, pool_queue: _PoolQueue) -> current_job.Work | None:
        """Start the job that has waited longest, unless it was handed back meanwhile."""
        work = pool_queue.in_flight.start_next()
        if work is not None:
            self._handlers.start(work)
        return work

    def _is_exclusive(self) -> bool:
        """Return whether a job runs alone or waits to, so that nothing is claimed."""
        return self._exclusive is not None or any(
            each.in_flight.has_waiting() for each in self._queues
        )

    def _start_exclusive(self) -> None:
        """Start a job that has to run alone once nothing else runs."""
        if not self._is_exclusive() or any(each.in_flight.running() for each in self._queues):
            return
        if self._exclusive is not None:
            self._exclusive = None
            self._mark_claimable()
        waiting = (each for each in self._queues if each.in_flight.has_waiting())
        self._exclusive = next((work for each in waiting if (work := self._begin(each))), None)

    def _ended(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        """Note a finished job; called on the thread of its handler."""
        self._keeper.handler_ended(work)
        self._by_name[work.job["queue"]].in_flight.add_done((work, outcome))
        self._keeper.end(work)
        self._ready.set()
