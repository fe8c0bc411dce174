"""The faults: a seeded plan of what happens when, and its execution."""

from __future__ import annotations

import heapq
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from queue_workflows import db, worker_control
from tests.soak import fleet, server

WEIGHTS = {
    "kill": 5, "stop": 5, "term": 2, "terminate": 3, "freeze": 4, "cut": 3, "off": 2, "restart": 1,
}  # fmt: skip
RESTART_GAP_S = 30.0
HELD = """
    SELECT 'node' AS family, id, claim_no, node_module = 'long' AS long FROM workflow_node_jobs
     WHERE status = 'running' AND split_part(worker_id, ':', 2) = ANY (%(pids)s)
    UNION ALL SELECT 'ingest', id, claim_no, false FROM ingest_jobs
     WHERE status = 'running' AND split_part(worker_id, ':', 2) = ANY (%(pids)s)
"""


class Held(NamedTuple):
    """A claim that a process held when it was hit; `long`: its body lasts longer than the lease."""

    family: str
    id: str
    claim_no: int
    long: bool


class Plan(NamedTuple):
    """One planned fault: `share` picks the victim, `size` its length between least and most."""

    after_s: float
    kind: str
    share: float
    size: float


def plan(seed: int, gap_s: float, focus: str | None = None) -> Callable[[], Plan]:
    """The endless plan of a seed; half of it of the kind `focus`, if there is one."""
    rng = random.Random(seed)

    def following() -> Plan:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if focus is not None and rng.random() < 0.5:
            kind = focus
        return Plan(rng.uniform(0.5, 1.5) * gap_s, kind, rng.random(), rng.random())

    return following


@dataclass
class Fault:
    """One that happened; `until` is when it was undone; `pids` none: it hit everybody."""

    kind: str
    seat: str
    at: float
    until: float
    pids: tuple[int, ...] = ()
    held: list[Held] = field(default_factory=list[Held])

    def hits(self, pid: int, since: float, until: float) -> bool:
        """Whether it hit this process somewhere between the two instants."""
        return (not self.pids or pid in self.pids) and self.at <= until and self.until >= since


class Faults:
    """Runs the plan in a thread of its own; leaving the block undoes what is under way."""

    def __init__(
        self,
        running: fleet.Fleet,
        pg: server.Server,
        following: Callable[[], Plan],
        say: Callable[[str], None],
    ) -> None:
        self.done: list[Fault] = []
        self.off: list[tuple[str, str, float, float]] = []
        """When a (host, queue) was OFF, acknowledged, in the database's epoch seconds."""
        self.problems: list[str] = []
        self._fleet = running
        self._pg = pg
        self._next = following
        self._say = say
        self._began = time.monotonic()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._busy: dict[str, Fault] = {}
        self._restarted = self._began - 20.0
        self._acts = {
            "kill": self._act_kill, "stop": self._act_stop, "term": self._act_term,
            "terminate": self._act_terminate, "freeze": self._act_freeze, "cut": self._act_cut,
            "off": self._act_off,
        }  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-faults", daemon=True)

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ahead = self._next()
        due = time.monotonic() + ahead.after_s
        while not self._stop.is_set():
            undo_at = self._undo[0][0] if self._undo else due
            self._stop.wait(max(0.0, min(due, undo_at) - time.monotonic()))
            now = time.monotonic()
            while self._undo and self._undo[0][0] <= now:
                self._guarded(heapq.heappop(self._undo)[2])
            if now >= due and not self._stop.is_set():
                chosen = ahead
                self._guarded(lambda chosen=chosen: self._strike(chosen))
                ahead = self._next()
                due = time.monotonic() + ahead.after_s
        while self._undo:
            self._guarded(heapq.heappop(self._undo)[2])

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _strike(self, chosen: Plan) -> None:
        kind = chosen.kind
        if kind == "restart":
            if time.monotonic() - self._restarted < RESTART_GAP_S:
                kind = "kill"
            else:
                self._restart()
                return
        seat = self._victim(chosen, kind)
        pids = self._fleet.pids()
        if seat is None or seat.name not in pids:
            return
        # Several processes may go by one label.
        mates = [s for s in fleet.SEATS if s == seat or (kind == "off" and _together(s, seat))]
        hit = tuple(pids[mate.name] for mate in mates if mate.name in pids)
        fault = Fault(kind, seat.name, time.monotonic(), time.monotonic(), hit, self._held(hit))
        self._acts[kind](fault, seat, pids[seat.name], chosen.size)
        self._note(fault)

    def _note(self, fault: Fault) -> None:
        self.done.append(fault)
        lasts = f" for {fault.until - fault.at:.1f} s" if fault.until - fault.at > 0.1 else ""
        held = ", ".join(f"{each.family} {each.id[:8]}/{each.claim_no}" for each in fault.held)
        what = f" that held {held}" if held else ""
        at = fault.at - self._began
        self._say(f"{at:7.2f} s  {fault.kind} {fault.seat} {fault.pids or ''}{lasts}{what}")

    def _victim(self, chosen: Plan, kind: str) -> fleet.Seat | None:
        """A seat that is under no other fault; mostly one that runs a job. Never both of a pair."""
        roles = {"worker"} if kind == "off" else {"worker", "orchestrator", "scheduler"}
        free = [
            seat
            for seat in fleet.SEATS
            if seat.role in roles
            and seat.name not in self._busy
            and not any(_pair(seat, busy) for busy in self._busy)
        ]
        working = [seat for seat in free if seat.role == "worker"]
        if chosen.share < 0.7 and working:
            pids = self._fleet.pids()
            held = {s: self._held((pids[s.name],)) for s in working if s.name in pids}
            # What takes a process away for a while shows most on a body that lasts.
            lasting = [s for s, jobs in held.items() if any(job[3] for job in jobs)]
            choice = lasting if kind in ("stop", "freeze") else []
            free = choice or [s for s, jobs in held.items() if jobs] or working
        return free[int(chosen.share * 1e6) % len(free)] if free else None

    @staticmethod
    def _held(pids: tuple[int, ...]) -> list[Held]:
        with suppress(db.Error), db.connection() as conn:
            rows = conn.execute(HELD, {"pids": [str(pid) for pid in pids]}).fetchall()
            return [Held(**row) for row in rows]
        return []

    def _later(self, fault: Fault, seconds: float, undo: Callable[[], None]) -> None:
        fault.until = fault.at + seconds
        self._busy[fault.seat] = fault

        def finish() -> None:
            try:
                undo()
            finally:
                fault.until = time.monotonic()
                self._busy.pop(fault.seat, None)

        heapq.heappush(self._undo, (fault.until, id(fault), finish))

    def _act_kill(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        if not seat.buried and seat.role == "worker":
            fault.kind = "kill, unreported"
        _signal(pid, signal.SIGKILL)

    def _act_term(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        _signal(pid, signal.SIGTERM)
        fault.until = fault.at + 3

    def _act_stop(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        _signal(pid, signal.SIGSTOP)
        seconds = (0.5 + 2.5 * size) * fleet.LEASE_S
        self._later(fault, seconds, lambda: _signal(pid, signal.SIGCONT))

    def _act_freeze(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        way = self._fleet.proxies[seat.name]
        way.freeze()
        self._later(fault, (0.5 + 2.0 * size) * fleet.LEASE_S, way.thaw)

    def _act_cut(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        """What it says arrives, no answer comes back, then the connections are gone."""
        way = self._fleet.proxies[seat.name]
        way.mute()

        def undo() -> None:
            way.cut()
            way.thaw()

        self._later(fault, 0.3 + 1.5 * size, undo)

    def _act_terminate(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        with db.connection() as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = %s",
                (seat.name,),
            )

    def _act_off(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        where = (seat.label, seat.queue)
        worker_control.set_worker_control(*where, desired_state="off", requested_by="soak")
        since = _database_now()

        def undo() -> None:
            until = _database_now()
            self.off.append((*where, since, until))
            worker_control.set_worker_control(*where, desired_state="on", requested_by="soak")

        self._later(fault, 1.0 + 4.0 * size, lambda: _insist(undo))

    def _restart(self) -> None:
        self._restarted = time.monotonic()
        everybody = tuple(self._fleet.pids().values())
        fault = Fault("restart", "server", time.monotonic(), 0.0, (), self._held(everybody))
        self._pg.restart()
        fault.until = time.monotonic()
        self._note(fault)


def _insist(act: Callable[[], Any]) -> None:
    """Until the database, which may just be restarted, takes it."""
    for _ in range(50):
        with suppress(db.Error):
            act()
            return
        time.sleep(0.2)


def _database_now() -> float:
    with db.connection() as conn:
        row = conn.execute("SELECT extract(epoch FROM clock_timestamp())::float8 AS t").fetchone()
        assert row is not None
        return row["t"]


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _together(one: fleet.Seat, other: fleet.Seat) -> bool:
    return (one.label, one.queue) == (other.label, other.queue) and one.role == "worker"


def _pair(one: fleet.Seat, busy: str) -> bool:
    """Two orchestrators, or two schedulers: one of them is left alone."""
    return one.role != "worker" and busy.startswith(one.role)
