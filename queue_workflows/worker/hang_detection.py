"""Check the guards of a worker from its parent, while a handler blocks the worker's own threads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config, db
from queue_workflows.engine import controls, held_claims, job_tables
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, identity, service, supervisor
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import NowFn
from queue_workflows.worker import guards, shared_status, shutdown

_log = logging.getLogger(__name__)
SILENT_S = 2.0
"""Seconds without a check after which the parent takes over; a worker checks every half second."""
SAMPLE_S = 0.5
ASK_S = 1.0
STOP_S = 1.0
OFF = "control"
CANCELLED = "cancel"
STOPPED = "shutdown"
"""Stands for a guard's event where no guard failed the job."""
_PROC = Path("/proc")


class Decision(NamedTuple):
    """Why a worker is killed, and the claim it concerns; `lease` None: all of the process."""

    failure: guards.Failure
    host: str
    queue: str
    lease: job_tables.Lease | None = None
    seconds: float = 0.0
    """How long that job had run."""


class SilencePeriod:
    """Measure how long a worker has been silent while its parent was running.

    A parent that did not check for a while was stopped, or its machine slept. What it missed proves
    nothing.
    """

    def __init__(self) -> None:
        self._checked_at = self._awake_since = -math.inf

    def is_silent(self, beat: float, now: float) -> bool:
        """Return whether a worker that last checked at `beat` is silent; call it every second."""
        if now - self._checked_at > guards.FROZEN_S:
            self._awake_since = now
        self._checked_at = now
        return now - max(beat, self._awake_since) >= SILENT_S


class HungWorker:
    """A worker that is silent during a job: its guards, continued from their last state.

    One thread reads OFF rows and cancels, another one samples for the guards.
    """

    def __init__(
        self, seen: shared_status.Snapshot, *, sampler: worker_usage.Sampler | None = None
    ) -> None:
        self.beat, self.job = seen.beat, seen.job
        self.decision: Decision | None = None
        record = seen.record
        self.pid: int = record["pid"]
        self._host: str = record["host"]
        self._queues: list[str] = record["queues"] or [record["queue"]]
        self._obeys: bool = record["obey"]
        self._lease: job_tables.Lease | None = None
        self._guards: list[guards.Guard] = []
        self._started = 0.0
        self._seqs = seen.ran
        # A short job may have started after the record was written.
        if record["number"] == seen.job and "lease" in record:
            self._lease = shared_status.lease_of(record)
            self._started = record["started"]
            self._guards = guards.revive(record["guards"])
            for guard in self._guards:
                if seen.active_at:
                    guard.beat(seen.active_at)
        self._sampler = sampler or worker_usage.Sampler(
            pid=self.pid, shown=bool(record.get("shown"))
        )

    def is_of(self, seen: shared_status.Snapshot) -> bool:
        """Return whether the worker is still silent during the same job."""
        return (self.beat, self.job) == (seen.beat, seen.job)

    def check_guards(self, now: float) -> None:
        """Check the guards, with samples if any guard wants one.

        Do nothing while the process is stopped by a signal or a debugger: its handler is idle for
        that reason.
        """
        if not self._guards or is_stopped(self.pid):
            return
        self._check(now)
        wanting = [guard for guard in self._guards if guard.wants_sample(now)]
        if wanting:
            found = self._sampler.sample()
            for guard in wanting:
                guard.sample(now, found)
            self._check(now)

    def _check(self, now: float) -> None:
        failure = next((failure for guard in self._guards if (failure := guard.check(now))), None)
        if failure is not None:
            self._decide(failure, self._lease, now - self._started)

    def check_requests(self, conn: db.Connection, grace_s: float) -> None:
        """Decide to kill if the worker is OFF by policy `hard`, or if a cancel's grace is over."""
        for queue in self._queues if self._obeys else ():
            policy = controls.off_policy(conn, self._host, queue)
            if policy is not None and stop_policies.handler(policy) is stop_policies.HARD:
                self._decide(guards.Failure(guards.EXIT_CONTROL, OFF, "turned off"), self._lease)
                return
        prefix = identity.process_prefix(self._host, self.pid)
        table = (
            job_tables.NODE_JOBS if self._queues[0] in config.DAG_QUEUES else job_tables.INGEST_JOBS
        )
        since = held_claims.cancelled_since(conn, table, prefix, seqs=self._seqs)
        over = [asked_s is not None and asked_s >= grace_s for asked_s in since]
        # If several handlers run, each has its grace; the process ends once one has used it up.
        if over and (all(over) if self._seqs is None else any(over)):
            reason = f"cancelled, and did not end within {grace_s:g} s"
            self._decide(guards.Failure(guards.EXIT_CONTROL, CANCELLED, reason))

    def stop(self) -> None:
        """Decide to kill because the parent stops and the worker does not react."""
        if self.decision is None:
            self._decide(
                guards.Failure(0, STOPPED, "it was requested to stop, and did not"), self._lease
            )

    def _decide(
        self, failure: guards.Failure, lease: job_tables.Lease | None = None, seconds: float = 0.0
    ) -> None:
        self.decision = Decision(failure, self._host, self._queues[0], lease, seconds)


class _WatchedWorker:
    """A child's shared status, and its state while it is silent."""

    def __init__(self, own: shared_status.SharedStatus) -> None:
        self.status = own
        self.hung: HungWorker | None = None
        self._silence = SilencePeriod()

    def update(self, pid: int, now: float) -> bool:
        """Read the status; return whether the worker has just become silent."""
        seen = self.status.read()
        silent = self._silence.is_silent(seen.beat, now)
        if not (silent and seen.beat and seen.job and seen.record.get("pid") == pid):
            self.hung = None
        elif self.hung is None or not self.hung.is_of(seen):
            self.hung = HungWorker(seen)
            return True
        return False


class HangDetector:
    """Detect hung workers for the supervisor of their processes.

    `watch` costs microseconds. Sampling and the database may take seconds, so they have threads and
    a connection of their own, which are used only while a worker is silent.
    """

    def __init__(self, *, now_fn: NowFn = clock.boot_s) -> None:
        self._now = now_fn
        self._workers: dict[str, _WatchedWorker] = {}
        self._conn = db.DedicatedConnection()
        self._is_database_away = False
        self._loops = [
            service.Loop(f"hang-detection-{name}", [service.Task(name, self._every(pause_s), run)])
            for name, pause_s, run in (
                ("samples", SAMPLE_S, self._check_guards),
                ("requests", ASK_S, self._check_requests),
            )
        ]

    def __enter__(self) -> HangDetector:
        for loop in self._loops:
            loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        stopped = [loop.stop(STOP_S) for loop in self._loops]
        if all(stopped):
            self._conn.close()
        for worker in self._workers.values():
            worker.status.close()

    def attach_status(self, spec: supervisor.ChildSpec) -> supervisor.ChildSpec:
        """Return the child spec with a shared status, where the platform has one."""
        own = shared_status.make()
        if own is None or own.fd is None:
            return spec
        self._workers[spec.name] = _WatchedWorker(own)
        env = {**(spec.env or {}), shared_status.VARIABLE: str(own.fd)}
        return spec._replace(env=env, fds=[*spec.fds, own.fd])

    def watch(self, name: str, pid: int, due: bool) -> supervisor.Verdict | None:
        """Return a verdict if that child must be killed now; a supervisor calls it.

        A silent worker that is `due` to have exited neither hands its job back nor exits by itself.
        """
        worker = self._workers.get(name)
        if worker is None:
            return None
        if worker.update(pid, self._now()):
            for loop in self._loops:
                loop.wake()
        if due and worker.hung is not None:
            worker.hung.stop()
        decision = worker.hung.decision if worker.hung else None
        if decision is None:
            return None
        return supervisor.Verdict(decision.failure.code, decision.failure.reason, decision)

    def ended(self, name: str, code: int | None = None) -> frozenset[int] | None:
        """Return the `seq` of the jobs that ran when that child exited; None if that is unknown.

        Clears its status. After an exit because the database was away, or on request, none is
        returned. See `Snapshot.ran`.
        """
        worker = self._workers.get(name)
        if worker is None:
            return None
        seen = worker.status.read()
        ran = seen.ran
        excused = seen.fenced and code in (guards.EXIT_LOST, *shutdown.ORDERLY)
        # A handler that ends the process itself, with `os._exit(0)`, is charged: its job still ran.
        if excused or (code in shutdown.ORDERLY and not seen.job):
            ran = frozenset[int]()
        worker.status.clear()
        worker.hung = None
        return ran

    def _hung_workers(self) -> list[HungWorker]:
        found = [worker.hung for worker in self._workers.values()]
        return [hung for hung in found if hung is not None and hung.decision is None]

    def _check_guards(self) -> None:
        for hung in self._hung_workers():
            hung.check_guards(self._now())

    def _check_requests(self) -> None:
        hung_workers = self._hung_workers()
        if not hung_workers:
            self._conn.close()
            return
        grace_s = config.CANCEL_GRACE_S.read()
        try:
            with self._conn.using() as conn:
                for hung in hung_workers:
                    hung.check_requests(conn, grace_s)
            self._is_database_away = False
        except db.Error as error:
            if not self._is_database_away:
                _log.warning(
                    "cannot read the OFF row of a worker that does not respond: %s",
                    str(error).strip(),
                )
            self._is_database_away = True

    def _every(self, pause_s: float) -> Callable[[], float]:
        return lambda: pause_s if self._hung_workers() else math.inf


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False if unknown."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
