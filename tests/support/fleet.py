"""Simulate a fleet in one process: workers without threads, orchestrators and their faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from queue_workflows import config, db, dispatcher, input_listener, node_pool
from queue_workflows.claim import claims, job_tables, outcomes, record, recovery
from queue_workflows.dag import policy
from queue_workflows.db import link
from queue_workflows.dispatch import run_cache
from queue_workflows.maintenance import periodic
from queue_workflows.run import executors
from queue_workflows.worker import (
    claim_times,
    claimed_job,
    desk,
    guards,
    job_logs,
    leases,
    queue_state,
    shapes,
)
from tests.support import deaths, transitions, worker_scripts
from tests.support import fleet_model as model

_pids = itertools.count(5_000_000)
"""No process has such pids."""


Work = claimed_job.ClaimedJob
"""A job that a worker holds."""
GUARDS = {"budget_trip": 75, "stall_trip": 76, "gpu_health_trip": 78}
"""The exit code of each event of a guard."""


def hold_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no back-off end before the test ends it."""
    monkeypatch.setattr(policy, "BASE_S", 3600.0)
    monkeypatch.setattr(input_listener, "NOT_PARKED_RETRY_S", 3600.0)
    monkeypatch.setenv(config.CRASH_BACKOFF_S.variables[0], "3600")


@dataclass(eq=False)
class Process:
    """What one worker process is and knows."""

    host: str
    queue: str
    pid: int
    worker_id: str
    locks: bool
    work: claimed_job.ClaimedJob | None = None
    job: model.Job | None = None
    alive: bool = True
    quiet: bool = False
    reported: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the claim that it believes to have is still its own."""
        if self.work is None or self.job is None:
            return False
        return self.job.is_held(self.worker_id, self.work.lease.claim_no)


class Past(NamedTuple):
    """A claim that was made once."""

    job: model.Job
    lease: job_tables.Lease

    @property
    def is_held(self) -> bool:
        return self.job.is_held(self.lease.worker_id, self.lease.claim_no)


@contextmanager
def mind(of: Any) -> Generator[None]:
    """Restrict what this process knows of runs to what it has seen itself."""
    before, run_cache._cache = run_cache._cache, of
    try:
        yield
    finally:
        run_cache._cache = before


class Place:
    """An executor with one job."""

    shared = False

    def __init__(self, job: claimed_job.ClaimedJob) -> None:
        self.jobs = {1: job}


class Runner:
    """One executor, whose handler ends when the test says so."""

    gives_back = False

    def __init__(self) -> None:
        self.accepts = False
        self.places: list[Place] = []

    @property
    def room(self) -> int:
        return 1 - len(self.places)

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        del isolated, shared
        job.place = Place(job)
        self.places.append(job.place)

    def catch_up(self) -> None:
        """Nothing is unread."""

    def interrupt(self, job: Any, reason: str) -> None:
        del job, reason

    def recorded(self, job: Any, found: object) -> None:
        del job, found


class Always:
    """A guard that fails."""

    def __init__(self, failure: guards.Failure) -> None:
        self._failure = failure

    def beat(self, now: float) -> None:
        del now

    def check(self, now: float) -> guards.Failure:
        del now
        return self._failure


def ignore(*_: object) -> None:
    return


class Core:
    """What a worker process decides, with its statements one by one on a connection."""

    def __init__(self, who: claims.Claimant, conn: db.Connection, *, locks: bool) -> None:
        self._conn = conn
        self.now = 1000.0
        self._killed: list[Any] = []
        self.runner: Any = Runner()
        logs = job_logs.JobLogs(ignore, self.clock)
        self.runner.kill = lambda place, *_: self._killed.append(place)
        self.desk = desk.Desk(ignore, ignore, logs, ends_with_job=True, now_fn=self.clock)
        self.queue = queue_state.Queue(who, shapes.Shape(1), self.runner)
        self.desk.queues.append(self.queue)
        columns = {"current_model": None, "known_models": [], "vram_total_mb": None}
        self.leases = leases.Leases(
            self.desk, logs, hold=ignore, ring=ignore,
            report=lambda: {"columns": columns}, now_fn=self.clock,
        )  # fmt: skip
        self.leases.locked = locks

    def clock(self) -> float:
        return self.now

    @property
    def held(self) -> claimed_job.ClaimedJob | None:
        """Return its job."""
        return next(iter(self.queue.jobs.values()), None)

    def serve(self, request: link.Request | None, lost: str | None = None) -> None:
        """Run a request; `lost`: whether its connection is lost before or after the commit."""
        assert request is not None
        if lost == "before":
            request.lost()
            return
        try:
            found = worker_scripts.run(self._conn, request.script)
        except db.Error as error:
            request.refused(error)
        else:
            request.lost() if lost == "after" else request.done(found)

    def serve_until(self, done: Callable[[], bool], lost: str | None = None) -> None:
        """Run the requests of the claiming connection until then."""
        for _ in range(20):
            if done():
                return
            self.now += desk.RETRY_MAX_S + 1
            self.serve(self.desk.next(), lost)
            lost = None
        raise AssertionError("it does not end")

    def wants(self, claim: bool, *, promote: bool = False) -> None:
        """Let it claim, or not. What has become due is let in only if the test requests that."""
        self.queue.off = None
        self.runner.accepts = self.queue.may_claim = claim
        self.queue.promote = promote
        self.queue.times = claim_times.ClaimTimes()

    def claim(self, promote: bool, *, unseen: bool = False) -> claimed_job.ClaimedJob | None:
        """Claim a job; `unseen`: the reply is lost."""
        self.wants(True, promote=promote)
        self.serve(self.desk.next(), "after" if unseen else None)
        self.wants(False)
        self.serve_until(lambda: not self.queue.unsure)
        return self.held

    def finish(
        self, job: claimed_job.ClaimedJob, outcome: outcomes.Outcome, claim: bool, cut: str | None
    ) -> claimed_job.ClaimedJob | None:
        """Record how a job has ended; return the one that the same statement has claimed."""
        if job.place is not None:  # else it waits for input, and has no handler
            self.runner.places.clear()
            self.desk.ended(job, outcome)
        self.wants(claim)
        self.serve_until(lambda: self.queue.jobs.get(job.id) is not job, cut)
        self.wants(False)
        self.serve_until(lambda: not self.queue.unsure)
        return self.held

    def end_killed(self) -> None:
        """Let the executors that are to be killed die, and what follows be written."""
        while self._killed:
            (job,) = self._killed.pop().jobs.values()
            self.runner.places.clear()
            self.desk.died(job, executors.Death("killed", {}, False, "its job"))
            self.serve_until(lambda job=job: self.queue.jobs.get(job.id) is not job)

    def leave(self) -> None:
        """Record that the worker has stopped."""
        self.leases.leave()
        while not self.leases.left:
            self.serve(self.leases.next())


class Slot:
    """A place for a worker, in which one process follows the other."""

    def __init__(
        self, host: str, queue: str, lives: db.Connection, *, newest: bool = False,
        locks: bool = True,
    ) -> None:  # fmt: skip
        self.host, self.queue, self.newest, self.locks = host, queue, newest, locks
        self._lives = lives
        self._conn = db.connect()
        self.mind: Any = run_cache._Cache(8)
        self.process = self._born()

    def _born(self) -> Process:
        pid = next(_pids)
        worker_id = deaths.worker_id(self.host, pid, "0")
        self._lock("pg_advisory_lock", worker_id)
        who = transitions.who(
            self.queue, worker_id, host=self.host, newest=self.newest, lease_s=600
        )
        self.core = Core(who, self._conn, locks=self.locks)
        return Process(self.host, self.queue, pid, worker_id, self.locks)

    def _lock(self, function: str, worker_id: str) -> None:
        name = recovery.LIFE_LOCK + worker_id
        query = f"SELECT {function}(hashtextextended(%s, 0))"
        self._lives.execute(query.encode(), (name,))

    def renew_process(self) -> Process:
        """End the process and let another take its place; return the one that ended."""
        dead = self.process
        dead.alive = False
        self._lock("pg_advisory_unlock", dead.worker_id)
        self.process = self._born()
        return dead

    def close(self) -> None:
        self._lock("pg_advisory_unlock", self.process.worker_id)
        self._conn.close()

    def beat(self) -> None:
        """Report what the process does."""
        self.core.serve(self.core.leases._beat(self.core.now))

    def judge(self, act: str) -> int | None:
        """Let the worker act on the running job; return the exit code, if it exits.

        `act`: `renew`, `control`, `stop` (the shutdown timeout is over), `cancelled` (its grace is
        over), `late` (the lease is about to end), or the event of a guard.
        """
        work, core = self.process.work, self.core
        assert work is not None
        with mind(self.mind):
            if act == "renew":
                core.serve(core.leases._renew(core.now))
            elif act == "control":
                core.serve(core.leases._check_control(core.now))
            else:
                work.lease_end.beat(core.now)
                if act == "stop":
                    core.desk.stop(0.0)
                elif act == "cancelled":
                    work.cancel_at = core.now
                elif act == "late":
                    work.lease_end.ends = core.now
                else:
                    work.guards = [Always(guards.Failure(GUARDS[act], act, "r"))]
                core.desk.tick(core.now)
            core.end_killed()
            if not core.desk.stopping:
                return None
            core.leave()
        return core.desk.exit_code


class Orchestrator:
    """A pool and its sweeps, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = self.since = self.whole = self.seen = 1000.0
        self.pool = node_pool.NodePool()
        self.sweeps = periodic.PeriodicTasks(lambda: self.now)
        self.mind: Any = run_cache._Cache(8)

    def trusts(self, seconds: float) -> bool:
        """Return whether it has had the database for so long without a break."""
        return self.now - self.seen <= 15 and self.now - self.since >= seconds

    @property
    def missed(self) -> bool:
        """Return whether its last check is so old that one was missed."""
        return self.now - self.seen > 11

    @property
    def had_s(self) -> float:
        """Return for how long it has had the database without missing a check."""
        return 0.0 if self.missed else self.now - self.whole

    def reclaim(self) -> None:
        self.sweeps.reclaim()
        if self.now - self.seen > 15:
            self.since = self.now
        if self.missed:
            self.whole = self.now
        self.seen = self.now

    def close(self) -> None:
        self.pool.stop()
        self.sweeps.close()


def outcome(how: str) -> outcomes.Outcome:
    """Return the outcome of a handler, by its kind."""
    return outcomes.Outcome(how, 0.1, error="e" if how == "failed" else "")


WRITES = ("completed", "failed", "renew", "trip", "back", "park")


def write(conn: db.Connection, past: Past, act: str) -> bool:
    """Return whether the database accepts this write under a claim, made as a worker makes it."""
    lease = past.lease
    if act == "renew":
        return bool(db.run(conn, claims.renew([lease], lease_s=600)))
    if act == "trip":
        return (
            db.run(conn, record.end_by_guard(lease, record.BUDGET_TRIP, error="e", seconds=1))
            is not None
        )
    if act == "back":
        return db.run(conn, record.hand_back(lease, reason="r")) is not None
    kind = "parked" if act == "park" and lease.table.in_run else act
    return record.record(conn, lease, outcome(kind)) != "skipped"


def callback(run_id: str, node: str, kind: str) -> None:
    """Call a dispatch as an app may, once more than needed."""
    if kind == "completed":
        dispatcher.on_node_completed(run_id, node)
    else:
        dispatcher.on_node_awaiting_input(run_id, node)
