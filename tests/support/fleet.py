"""Simulate a fleet in one process: workers without threads, orchestrators and their faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from queue_workflows import config, db, dispatcher, input_listener, node_pool
from queue_workflows.dag import policy
from queue_workflows.dispatch import run_cache
from queue_workflows.engine import (
    attempts,
    claims,
    finish,
    handback,
    job_tables,
    outcomes,
    recovery,
)
from queue_workflows.maintenance import periodic
from queue_workflows.runtime import clock
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import Row
from queue_workflows.worker import claimer, current_job, guards, lease_keeper, slot
from tests.support import deaths, transitions
from tests.support import fleet_model as model

_pids = itertools.count(5_000_000)
"""No process has such pids."""


NOTHING_SEEN = worker_usage.Sample(None, None)


GUARDS = {"budget_trip": 75, "stall_trip": 76, "reassigned": 77, "gpu_health_trip": 78}
"""The exit code of each event of a guard."""


def hold_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no back-off end before the test ends it."""
    monkeypatch.setattr(policy, "BASE_S", 3600.0)
    monkeypatch.setattr(input_listener, "NOT_PARKED_RETRY_S", 3600.0)
    monkeypatch.setenv(config.CRASH_BACKOFF_S.variables[0], "3600")


class Left(BaseException):
    """A worker leaves its process, with this code."""

    def __init__(self, code: int) -> None:
        self.code = code


def leave(code: int) -> None:
    raise Left(code)


@dataclass(eq=False)
class Process:
    """What one worker process is and knows."""

    host: str
    queue: str
    pid: int
    worker_id: str
    locks: bool
    work: current_job.Work | None = None
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


class Slot:
    """A place for a worker, in which one process follows the other."""

    def __init__(
        self, host: str, queue: str, lives: db.Connection, *, newest: bool = False,
        locks: bool = True,
    ) -> None:  # fmt: skip
        self.host, self.queue, self.newest, self.locks = host, queue, newest, locks
        self.table = job_tables.NODE_JOBS if queue in ("cpu", "gpu") else job_tables.INGEST_JOBS
        self._lives = lives
        self.mind: Any = run_cache._Cache(8)
        self.claimer = claimer.Claimer(self.table, self.who)
        self.claimer._pause.set()  # it waits for nothing before it tries again
        self.process = self._born()
        self.watch = lease_keeper.LeaseKeeper(
            [slot.Slot(self.who)], on_exit=leave, sampler=lambda: NOTHING_SEEN
        )

    def who(self) -> claims.Claimant:
        return transitions.who(
            self.queue, self.process.worker_id, host=self.host, newest=self.newest
        )

    def _born(self) -> Process:
        pid = next(_pids)
        worker_id = deaths.worker_id(self.host, pid, "0")
        self._lock("pg_advisory_lock", worker_id)
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
        self.claimer._own_jobs, self.claimer._was_lost, self.claimer._release_again = (
            set(),
            False,
            False,
        )
        self.claimer._asked_at = None
        self.process = self._born()
        self.watch.heartbeat.locked = self.locks
        return dead

    def forget_times(self) -> None:
        """Let the next claim admit what has become due only if the test requests that."""
        self.claimer._times.forget()

    def close(self) -> None:
        self._lock("pg_advisory_unlock", self.process.worker_id)
        self.claimer.close()
        self.watch._close()

    def past(self, row: Row, job: model.Job) -> Past:
        """Return a claim of this slot, which it may lose."""
        return Past(job, job_tables.lease_of(self.table, row))

    def begin(self, row: Row, job: model.Job) -> None:
        lease_end = guards.LeaseEnd(clock.boot_s(), 600)
        self.process.work = current_job.Work(self.table, row, lease_end)
        self.process.job = job

    def claim_unseen(self, conn: db.Connection, promote: bool) -> None:
        """Let the server make a claim of this slot whose reply is lost."""
        step = claims.node_step if self.table.in_run else claims.ingest_step
        step(conn, self.who(), promote=promote)
        self.claimer.lose()
        self.claimer.connection()

    def judge(self, act: str) -> int | None:
        """Let the lease keeper act on the running job; return the exit code, if it exits.

        `act`: `renew`, `control`, `stop` (the shutdown timeout is over), `cancelled` (its grace is
        over), or the event of a guard.
        """
        work = self.process.work
        assert work is not None
        acts: dict[str, Callable[[], object]] = {
            "renew": self.watch._renew,
            "control": self.watch._check_control,
            "stop": lambda: self.watch._shutdown.give_back(work),
            "cancelled": lambda: self.watch._shutdown.stop_cancelled(work),
        }
        for event, code in GUARDS.items():
            failure = guards.Failure(code, event, "r")
            acts[event] = lambda failure=failure: self.watch._shutdown.end_by_guard(work, failure)
        self.watch.begin(work)
        try:
            with mind(self.mind):
                acts[act]()
        except Left as left:
            return left.code
        finally:
            self.watch.end(work)
        return None


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


class Cut:
    """A connection that is lost once, before or after a worker's write was committed."""

    def __init__(self, of: claimer.Claimer, when: str | None) -> None:
        self._of, self._when, self._record = of, when, of._record

    def __enter__(self) -> None:
        self._of._record = self._once  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._of._record = self._record  # type: ignore[method-assign]

    def _once(self, *given: Any, **more: Any) -> Row | None:
        when, self._when = self._when, None
        if when == "before":
            raise db.OperationalError("the connection is lost")
        row = self._record(*given, **more)
        if when == "after":
            raise db.OperationalError("the reply is lost")
        return row


WRITES = ("completed", "failed", "renew", "trip", "back", "park")


def write(conn: db.Connection, past: Past, act: str) -> bool:
    """Return whether the database accepts this write under a claim, made as a worker makes it."""
    lease = past.lease
    if act == "renew":
        return bool(db.run(conn, claims.renew([lease], lease_s=600)))
    if act == "trip":
        return db.run(conn, attempts.end_by_watchdog(lease, error="e", seconds=1)) is not None
    if act == "back":
        return db.run(conn, handback.hand_back(lease, reason="r")) is not None
    kind = "parked" if act == "park" and lease.table.in_run else act
    return finish.record(conn, lease, outcome(kind)) != "skipped"


def callback(run_id: str, node: str, kind: str) -> None:
    """Call a dispatch as an app may, once more than needed."""
    if kind == "completed":
        dispatcher.on_node_completed(run_id, node)
    else:
        dispatcher.on_node_awaiting_input(run_id, node)
