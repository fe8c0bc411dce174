"""The main loop of a pool: records what has ended and claims as much as is free, queue by queue."""

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


class _Seats:
    """The places of one queue, and what the main thread knows of it."""

    def __init__(self, own: slot.Slot, kept: db.DedicatedConnection) -> None:
        self.lane = own
        self.held = own.held
        self.claimer = claimer.Claimer(job_tables.INGEST_JOBS, own.who, kept=kept)
        self.claimer.also_held = own.held.ids
        self.claimer.on_lost = own.held.on_lost
        self.queue = own.who().queue
        self.look = False
        """Whether there may be something to claim."""
        self.promote = False
        self.due_at = math.inf
        """When a limit of the queue lets the next job in."""

    def free(self) -> int:
        """How many bodies more may run."""
        return self.lane.concurrency - len(self.held.running())


class PoolLoop:
    """Several queues, several jobs of each at once, all claimed on the thread that calls.

    Three connections whatever runs: one to claim and record, the watch's, and one to listen. A job
    whose next crash would be its last runs when nothing else does, as that would be counted too.
    """

    def __init__(self, lanes: Sequence[slot.Slot], watcher: lease_keeper.LeaseKeeper) -> None:
        self._watch = watcher
        watcher.batches()
        self._kept = db.DedicatedConnection(self._opened)
        self._seats = [_Seats(each, self._kept) for each in lanes]
        self._of_queue = {each.queue: each for each in self._seats}
        self._bodies = pool_threads.HandlerThreads(watcher.begin, self._ended)
        self._lone: current_job.Work | None = None
        """The job that runs alone."""
        self._ready = threading.Event()
        self._pause = threading.Event()
        self._stopping = False

    def _opened(self, conn: db.Connection) -> None:
        for each in self._seats:
            each.claimer.opened(conn)

    def stop(self) -> None:
        """Take no further job; safe in a signal handler."""
        self._stopping = True

    def run_forever(self) -> None:
        """Run jobs as they come until `stop` and the end of what runs then."""
        locks = [recovery.LIFE_LOCK + each.lane.who().worker_id for each in self._seats]
        channel = loop.READY_CHANNEL[job_tables.INGEST_JOBS.name]
        listener = db.listen(channel, "worker_control", "job_cancel", poll_s=3600.0, locks=locks)
        try:
            with service.Follow("worker-listen", listener, self._heard):
                self._serve()
        finally:
            self._bodies.stop()
            self._kept.close()

    def _serve(self) -> None:
        delay, said, poll_at = 0.1, "", 0.0
        while not self._stopping or self._is_busy():
            self._ready.clear()
            if time.monotonic() >= poll_at:
                poll_at = time.monotonic() + config.CLAIM_POLL_S.read()
                self._look(promote=True)
            for each in self._seats:
                if time.monotonic() >= each.due_at:
                    each.look, each.promote, each.due_at = True, True, math.inf
            try:
                self._turn_all()
                delay, said = 0.1, ""
            except db.Error as error:
                # Of one outage the words change, from "closed" to "starting up".
                if said != (said := error.sqlstate or "away"):
                    _log.warning("claiming waits for the database: %s", loop.brief(error))
                self._look()
                self._pause.wait(delay * random.uniform(0.5, 1.0))  # noqa: S311  jitter
                delay = min(loop.BACKOFF_MAX_S, delay * 2)
                continue
            # A signal handler sets no event: `stop` is seen within a second.
            next_at = min(poll_at, *(each.due_at for each in self._seats))
            self._ready.wait(max(0.0, min(1.0, next_at - time.monotonic())))

    def _is_busy(self) -> bool:
        return any(each.held.running() or each.held.unrecorded() for each in self._seats)

    def _look(self, *, promote: bool = False) -> None:
        """There may be something to claim in every queue."""
        for each in self._seats:
            each.look = True
            each.promote |= promote

    def _heard(self, wake: db.Wake) -> None:
        if wake.reason == "connected":
            self._watch.locked = True
            self._watch.wake("beat")
        if wake.reason != "notify":
            # What was notified while the connection was away is lost.
            self._watch.wake("renew", "control")
            self._look()
            self._ready.set()
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self._watch.cancelled(text)
            elif channel == "worker_control":
                self._heard_control(text)
            elif (seats := self._of_queue.get(text)) is not None:
                seats.look = True
                self._ready.set()

    def _heard_control(self, text: str) -> None:
        host = self._seats[0].lane.who().host
        named = {f"{host}:{each.queue}" for each in self._seats}
        if text in named or text == f"{host}:{controls.ALL}":
            self._watch.wake("control", "beat")
            self._look()
            self._ready.set()

    def _turn_all(self) -> None:
        """Serve each queue in its turn until nothing comes of it any more."""
        moved = True
        while moved:
            moved = False
            for each in self._seats:
                moved |= self._turn(each)

    def _turn(self, seats: _Seats) -> bool:
        """Record what has ended in a queue and fill its free places; whether anything came of it.

        One statement, but for what did not complete.
        """
        self._let_in()
        free = 0 if self._stopping or self._is_closed() or not seats.look else seats.free()
        done = seats.held.take_done()
        if not done and free < 1:
            return False
        if free:
            seats.look = False  # before the claim: what is notified meanwhile counts
        jobs = self._step(seats, done, free)
        if free:
            seats.due_at = time.monotonic() + seats.claimer.wait_s
        # What may have killed a worker is claimed alone; others may wait behind it.
        partial = seats.claimer.isolated or any(job["crash_count"] for job in jobs)
        if free and (len(jobs) == free or (jobs and partial)):
            seats.look = True
        self._start(seats, jobs)
        return bool(done or jobs)

    def _step(self, seats: _Seats, done: Sequence[claims_in_flight.Done], free: int) -> list[Row]:
        completed = [each for each in done if each[1].kind == "completed"]
        one_by_one = [each for each in done if each[1].kind != "completed"]
        jobs: list[Row] = []
        try:
            with seats.held.writing():
                # Asked here: who leaves hands back what is held once nobody writes.
                if self._stopping or self._watch.is_leaving:
                    free = 0
                if completed or free:
                    jobs = seats.claimer.claim_batch(
                        free,
                        claims_in_flight.completed(completed),
                        promote=seats.promote and free > 0,
                    )
                    seats.held.settled(work.lease for work, _ in completed)
                    seats.promote &= not free
                self._hold(seats, jobs)
        except (errors.ClaimLost, db.Error):
            seats.held.put_back(done)
            if not completed:
                raise
            seats.look, one_by_one = True, [*done]
        else:
            seats.held.put_back(one_by_one)
        for _ in one_by_one:
            for each in seats.held.take_done(1):
                self._record(seats, *each)
        return jobs

    def _hold(self, seats: _Seats, jobs: Sequence[Row]) -> None:
        sent_at, lease_s = seats.claimer.sent_at, seats.lane.who().lease_s
        for job in jobs:
            self._watch.hold(seats.held, [job], guards.LeaseEnd(sent_at, lease_s), sent_at)

    def _record(self, seats: _Seats, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        try:
            with self._watch.recording(work):
                seats.claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error)
        finally:
            seats.held.settled([work.lease])

    def _start(self, seats: _Seats, jobs: Sequence[Row]) -> None:
        """Start these, but for one that has to run alone."""
        for job in jobs:
            if not 0 < config.MAX_CRASHES.read() - 1 <= job["crash_count"]:
                self._begin(seats)

    def _begin(self, seats: _Seats) -> current_job.Work | None:
        """Start what has waited longest, unless it has left meanwhile."""
        work = seats.held.next()
        if work is not None:
            self._bodies.start(work)
        return work

    def _is_closed(self) -> bool:
        """Whether a job runs alone, or waits for that: nothing is claimed."""
        return self._lone is not None or any(each.held.waits() for each in self._seats)

    def _let_in(self) -> None:
        """Start a job that has to run alone once nothing else runs."""
        if not self._is_closed() or any(each.held.running() for each in self._seats):
            return
        if self._lone is not None:
            self._lone = None
            self._look()
        waiting = (each for each in self._seats if each.held.waits())
        self._lone = next((work for each in waiting if (work := self._begin(each))), None)

    def _ended(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        """Where its body ran."""
        self._watch.settle(work)
        self._of_queue[work.job["queue"]].held.keep((work, outcome))
        self._watch.end(work)
        self._ready.set()
