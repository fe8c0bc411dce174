"""What a parent decides in the stead of a worker whose body lets nothing of it run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config, db
from queue_workflows.engine import claims, controls, job_tables
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, identity, service, supervisor
from queue_workflows.telemetry import gpu_health
from queue_workflows.types import NowFn
from queue_workflows.worker import guards, shared_status

_log = logging.getLogger(__name__)
SILENT_S = 2.0
"""A worker that has not judged for so long is judged for; it does every half second."""
SAMPLE_S = 0.5
ASK_S = 1.0
STOP_S = 1.0
OFF = "control"
CANCELLED = "cancel"
STOPPED = "shutdown"
"""What stands for a guard's event where no guard tripped."""
_PROC = Path("/proc")


class Sentence(NamedTuple):
    """Why a worker is killed, and the claim that it is about; None: whatever the process holds."""

    trip: guards.Trip
    host: str
    queue: str
    lease: job_tables.Lease | None = None
    seconds: float = 0.0
    """For how long that job had run."""


class SilencePeriod:
    """How long a worker has been silent before its parent's eyes.

    A parent that did not look for a while was asleep with its machine, or stopped: what it missed
    proves nothing.
    """

    def __init__(self) -> None:
        self._looked = self._awake = -math.inf

    def lasts(self, beat: float, now: float) -> bool:
        """Whether a worker that judged at `beat` counts as silent; ask every second or so."""
        if now - self._looked > guards.FROZEN_S:
            self._awake = now
        self._looked = now
        return now - max(beat, self._awake) >= SILENT_S


class Case:
    """A worker that is silent over a job: its guards, carried on from where it left them.

    Asks about OFF and cancels, samples for the guards; each by one thread alone.
    """

    def __init__(
        self, seen: shared_status.Seen, *, sampler: gpu_health.Sampler | None = None
    ) -> None:
        self.beat, self.job = seen.beat, seen.job
        self.sentence: Sentence | None = None
        record = seen.record
        self.pid: int = record["pid"]
        self._host: str = record["host"]
        self._queues: list[str] = record["queues"] or [record["queue"]]
        self._obeys: bool = record["obey"]
        self._lease: job_tables.Lease | None = None
        self._guards: list[guards.Guard] = []
        self._started = 0.0
        self._seqs = seen.ran
        # A short job may have begun after what the record tells of.
        if record["number"] == seen.job and "lease" in record:
            self._lease = shared_status.lease_of(record)
            self._started = record["started"]
            self._guards = guards.revive(record["guards"])
            for guard in self._guards:
                if seen.heard:
                    guard.beat(seen.heard)
        self._sampler = sampler or gpu_health.Sampler(pid=self.pid, shown=bool(record.get("shown")))

    def is_of(self, seen: shared_status.Seen) -> bool:
        """Whether the silence is still that of the same job."""
        return (self.beat, self.job) == (seen.beat, seen.job)

    def judge(self, now: float) -> None:
        """Let the guards look, at what samples show if they want any.

        Not while the process is stopped: then its body is idle for a reason.
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
        trip = next((trip for guard in self._guards if (trip := guard.check(now))), None)
        if trip is not None:
            self._decide(trip, self._lease, now - self._started)

    def ask(self, conn: db.Connection, grace_s: float) -> None:
        """Look whether it is OFF by policy `hard`, or cancelled for longer than its grace."""
        for queue in self._queues if self._obeys else ():
            policy = controls.off_policy(conn, self._host, queue)
            if policy is not None and stop_policies.handler(policy) is stop_policies.HARD:
                self._decide(guards.Trip(guards.EXIT_CONTROL, OFF, "turned off"), self._lease)
                return
        prefix = identity.process_prefix(self._host, self.pid)
        table = (
            job_tables.NODE_JOBS if self._queues[0] in config.DAG_QUEUES else job_tables.INGEST_JOBS
        )
        since = claims.cancelled_since(conn, table, prefix, seqs=self._seqs)
        over = [asked_s is not None and asked_s >= grace_s for asked_s in since]
        # Of several bodies that run, each is owed its end.
        if over and (all(over) if self._seqs is None else any(over)):
            reason = f"cancelled, and did not end within {grace_s:g} s"
            self._decide(guards.Trip(guards.EXIT_CONTROL, CANCELLED, reason))

    def end(self) -> None:
        """Its parent stops, and the worker does not hear it."""
        if self.sentence is None:
            self._decide(guards.Trip(0, STOPPED, "told to stop, and did not"), self._lease)

    def _decide(
        self, trip: guards.Trip, lease: job_tables.Lease | None = None, seconds: float = 0.0
    ) -> None:
        self.sentence = Sentence(trip, self._host, self._queues[0], lease, seconds)


class _WatchedWorker:
    """A child's board, and its case while it is silent."""

    def __init__(self, own: shared_status.SharedStatus) -> None:
        self.board = own
        self.case: Case | None = None
        self._silence = SilencePeriod()

    def look(self, pid: int, now: float) -> bool:
        """Whether there is a new case."""
        seen = self.board.read()
        silent = self._silence.lasts(seen.beat, now)
        if not (silent and seen.beat and seen.job and seen.record.get("pid") == pid):
            self.case = None
        elif self.case is None or not self.case.is_of(seen):
            self.case = Case(seen)
            return True
        return False


class HangDetector:
    """Looks after workers for the supervisor of their processes.

    `watch` costs microseconds; what it starts over a silent worker has threads of its own, as tools
    and the database may take seconds. There is a connection only then.
    """

    def __init__(self, *, now_fn: NowFn = clock.boot_s) -> None:
        self._now = now_fn
        self._wards: dict[str, _WatchedWorker] = {}
        self._conn = db.DedicatedConnection()
        self._away = False
        self._loops = [
            service.Loop(f"oversight-{name}", [service.Task(name, self._every(pause_s), run)])
            for name, pause_s, run in (
                ("samples", SAMPLE_S, self._judge),
                ("asks", ASK_S, self._ask),
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
        for ward in self._wards.values():
            ward.board.close()

    def equip(self, spec: supervisor.ChildSpec) -> supervisor.ChildSpec:
        """The same child with a board, where there can be one."""
        own = shared_status.make()
        if own is None or own.fd is None:
            return spec
        self._wards[spec.name] = _WatchedWorker(own)
        env = {**(spec.env or {}), shared_status.VARIABLE: str(own.fd)}
        return spec._replace(env=env, fds=[*spec.fds, own.fd])

    def watch(self, name: str, pid: int, due: bool) -> supervisor.Verdict | None:
        """Whether that child must be killed now; a supervisor's `watch`.

        A silent worker that is `due` to be gone neither gives its job back nor leaves by itself.
        """
        ward = self._wards.get(name)
        if ward is None:
            return None
        if ward.look(pid, self._now()):
            for loop in self._loops:
                loop.wake()
        if due and ward.case is not None:
            ward.case.end()
        sentence = ward.case.sentence if ward.case else None
        if sentence is None:
            return None
        return supervisor.Verdict(sentence.trip.code, sentence.trip.reason, sentence)

    def ended(self, name: str, code: int | None = None) -> frozenset[int] | None:
        """That child was reaped with `code`; what its board shows is over. See `board.Seen.ran`.

        Of one that its timer ended for a budget it is the job with that budget alone; of one that
        ended itself as the database was away, none.
        """
        ward = self._wards.get(name)
        if ward is None:
            return None
        seen = ward.board.read()
        ran = seen.ran
        if code == guards.EXIT_BUDGET and ran and seen.due in ran:
            ran = frozenset({seen.due})
        if code == guards.EXIT_LOST and seen.fenced:
            ran = frozenset[int]()
        ward.board.clear()
        ward.case = None
        return ran

    def _cases(self) -> list[Case]:
        found = [ward.case for ward in self._wards.values()]
        return [case for case in found if case is not None and case.sentence is None]

    def _judge(self) -> None:
        for case in self._cases():
            case.judge(self._now())

    def _ask(self) -> None:
        cases = self._cases()
        if not cases:
            self._conn.close()
            return
        grace_s = config.CANCEL_GRACE_S.read()
        try:
            with self._conn.using() as conn:
                for case in cases:
                    case.ask(conn, grace_s)
            self._away = False
        except db.Error as error:
            if not self._away:
                _log.warning("a silent worker's OFF row cannot be read: %s", str(error).strip())
            self._away = True

    def _every(self, pause_s: float) -> Callable[[], float]:
        return lambda: pause_s if self._cases() else math.inf


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False when nothing tells."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
