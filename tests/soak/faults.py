"""Inject the planned faults, and undo them."""

from __future__ import annotations

import heapq
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from queue_workflows import db, worker_control
from tests.soak import background, fault_plan, fleet, journal, server
from tests.support.wait import until

RESTART_GAP_S = 30.0
RETRY_S = 0.25
PARENTS = 0.3
"""Share of the kills of a supervised worker that hit its parent instead."""
KILL_PARENT = "kill, parent"
HELD = """
    SELECT 'node' AS family, id, claim_no, node_module = 'long' AS long FROM workflow_node_jobs
     WHERE status = 'running' AND split_part(worker_id, ':', 2) = ANY (%(pids)s)
    UNION ALL SELECT 'ingest', id, claim_no, false FROM ingest_jobs
     WHERE status = 'running' AND split_part(worker_id, ':', 2) = ANY (%(pids)s)
"""


class HeldJob(NamedTuple):
    """A claim of a process that a fault hit; `long`: its handler outlasts the lease."""

    family: str
    id: str
    claim_no: int
    long: bool


@dataclass
class Fault:
    """One that happened; `until` is when it was undone; `pids` none: it hit everybody."""

    kind: str
    seat: str
    at: float
    until: float
    pids: tuple[int, ...] = ()
    held: list[HeldJob] = field(default_factory=list[HeldJob])
    hit_nobody: bool = False
    """What it should hit was not there any more."""

    @property
    def is_kill(self) -> bool:
        """Return whether it was a kill -9, of whichever kind."""
        return self.kind.startswith("kill")

    @property
    def hits_worker(self) -> bool:
        """Return whether it was a kill -9 of a worker, or of its parent."""
        return self.is_kill and self.kind not in fault_plan.OF_EXECUTORS

    def hits(self, pid: int, since: float, until: float) -> bool:
        """Return whether it hit this process between the two instants."""
        return (not self.pids or pid in self.pids) and self.at <= until and self.until >= since


class Faults(background.BackgroundThread):
    """Injects the plan's faults while the block runs; its end undoes those under way."""

    def __init__(
        self,
        running: fleet.Fleet,
        pg: server.Server,
        following: Callable[[], fault_plan.Plan],
        say: Callable[[str], None],
    ) -> None:
        super().__init__("faults")
        self.done: list[Fault] = []
        self.off: list[tuple[str, str, float, float]] = []
        """When a (host, queue) was OFF, acknowledged, in the database's epoch seconds."""
        self.problems: list[str] = []
        self._fleet = running
        self._pg = pg
        self._following = following
        self._say = say
        self._began = time.monotonic()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._busy: dict[str, Fault] = {}
        self._restarted = self._began - 20.0
        self._acts = {
            "kill": self._act_kill, "stop": self._act_stop, "term": self._act_term,
            "terminate": self._act_terminate, "freeze": self._act_freeze, "cut": self._act_cut,
            "off": self._act_off, fault_plan.KILL_EXECUTOR: self._act_executor,
            fault_plan.KILL_LAUNCHER: self._act_launcher,
            fault_plan.STOP_EXECUTOR: self._act_executor,
        }  # fmt: skip

    def go(self, stop: threading.Event) -> None:
        ahead = self._following()
        due = time.monotonic() + ahead.after_s
        while not stop.is_set():
            undo_at = self._undo[0][0] if self._undo else due
            stop.wait(max(0.0, min(due, undo_at) - time.monotonic()))
            now = time.monotonic()
            while self._undo and self._undo[0][0] <= now:
                self._guarded(heapq.heappop(self._undo)[2])
            if now >= due and not stop.is_set():
                if self._guarded(lambda chosen=ahead: self._strike(chosen)):
                    due = time.monotonic() + RETRY_S
                    continue
                ahead = self._following()
                due = time.monotonic() + ahead.after_s
        while self._undo:
            self._guarded(heapq.heappop(self._undo)[2])

    def _guarded(self, act: Callable[[], object]) -> object:
        try:
            return act()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _strike(self, chosen: fault_plan.Plan) -> bool:
        """Do it, or leave it out; true when it waits for a victim."""
        kind = chosen.kind
        if kind == "restart":
            if time.monotonic() - self._restarted < RESTART_GAP_S:
                kind = "kill"
            else:
                self._restart()
                return False
        seat = self._victim(chosen, kind)
        pids = self._fleet.pids()
        if seat is None or seat.name not in pids:
            return chosen.focused
        queue = _drawn(seat, chosen.size)
        # Several processes may go by one label.
        mates = [
            s for s in fleet.SEATS if s == seat or (kind == "off" and _together(s, seat, queue))
        ]
        hit = tuple(pids[mate.name] for mate in mates if mate.name in pids)
        fault = Fault(kind, seat.name, time.monotonic(), time.monotonic(), hit, self._held(hit))
        self._acts[kind](fault, seat, pids[seat.name], chosen.size)
        if not fault.hit_nobody:
            self._note(fault)
        return chosen.focused and fault.hit_nobody

    def _note(self, fault: Fault) -> None:
        self.done.append(fault)
        lasts = f" for {fault.until - fault.at:.1f} s" if fault.until - fault.at > 0.1 else ""
        held = ", ".join(f"{each.family} {each.id[:8]}/{each.claim_no}" for each in fault.held)
        what = f" that held {held}" if held else ""
        at = fault.at - self._began
        self._say(f"{at:7.2f} s  {fault.kind} {fault.seat} {fault.pids or ''}{lasts}{what}")

    def _victim(self, chosen: fault_plan.Plan, kind: str) -> fleet.Seat | None:
        """Draw a seat without another fault, usually one that runs a job; never both of a pair."""
        roles = {"worker"} if kind == "off" else {"worker", "orchestrator", "scheduler"}
        free = [
            seat
            for seat in fleet.SEATS
            if seat.role in roles
            and (seat.has_executors or kind not in fault_plan.OF_EXECUTORS)
            and seat.name not in self._busy
            and not any(_pair(seat, busy) for busy in self._busy)
        ]
        working = [seat for seat in free if seat.role == "worker"]
        if chosen.share < fault_plan.AT_WORK and working:
            pids = self._fleet.pids()
            held = {s: self._held((pids[s.name],)) for s in working if s.name in pids}
            # What takes a process away for a while shows most on a handler that lasts.
            lasting = [s for s, jobs in held.items() if any(job[3] for job in jobs)]
            choice = lasting if kind in ("stop", "freeze") else []
            if chosen.focused and kind in ("stop", "freeze"):
                free = [s for s in lasting if s.care != fleet.DEFAULT]
                return free[0] if free else None
            free = choice or [s for s, jobs in held.items() if jobs] or working
        if kind == "kill" and free:  # by turns, so that each way to recover has its deaths
            killed = Counter(fault.seat for fault in self.done if fault.hits_worker)
            fewest = min(killed[seat.name] for seat in free)
            free = [seat for seat in free if killed[seat.name] == fewest]
        return free[int(chosen.share * 1e6) % len(free)] if free else None

    @staticmethod
    def _held(pids: tuple[int, ...]) -> list[HeldJob]:
        with suppress(db.Error), db.connection() as conn:
            rows = conn.execute(HELD, {"pids": [str(pid) for pid in pids]}).fetchall()
            return [HeldJob(**row) for row in rows]
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
        if seat.care == fleet.SUPERVISED and size < PARENTS:
            fault.kind, fault.pids = KILL_PARENT, self._fleet.kill_parent(seat.name)
            return
        if seat.care:
            fault.kind = f"kill, {seat.care}"
        fault.at = fault.until = time.monotonic()
        _signal(pid, signal.SIGKILL)

    def _act_executor(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        """Stop an executor while its handler runs; kill it, or let it go on later."""
        executors = self._fleet.executors(seat.name)[1:]
        working = [(one, jobs) for one in executors if (jobs := self._stopped_at_work(one, fault))]
        for one, _ in working[1:]:
            _signal(one, signal.SIGCONT)
        if not working:
            fault.hit_nobody = True
            return
        (executor, jobs), *_ = working
        fault.pids, fault.held = (executor,), jobs
        fault.at = fault.until = time.monotonic()
        if fault.kind == fault_plan.KILL_EXECUTOR:
            _signal(executor, signal.SIGKILL)
            return
        seconds = (0.5 + 2.5 * size) * fleet.LEASE_S
        self._later(fault, seconds, lambda: _signal(executor, signal.SIGCONT))

    def _stopped_at_work(self, executor: int, fault: Fault) -> list[HeldJob]:
        """Stop an executor; return its jobs, or let it go on if its handlers have just ended.

        Only what is stopped has the same jobs when it is killed. That of a pool runs several.
        """
        _signal(executor, signal.SIGSTOP)
        with suppress(AssertionError):
            until(lambda: _is_stopped(executor), timeout_s=1.0, every_s=0.002)
            running = journal.running(self._fleet.journal, runs_in=executor)
            # Asked again: it may have got another one since the fault was drawn.
            held = self._held(fault.pids)
            if jobs := [each for each in held if (each.id, each.claim_no) in running]:
                return jobs
        _signal(executor, signal.SIGCONT)
        return []

    def _act_launcher(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        """Kill the process that forks executors: they end with it, and the worker exits."""
        launcher = self._fleet.executors(seat.name)[:1]
        fault.hit_nobody = not launcher
        for each in launcher:
            fault.pids = (each,)
            fault.at = fault.until = time.monotonic()
            _signal(each, signal.SIGKILL)

    def _act_term(self, fault: Fault, seat: fleet.Seat, pid: int, size: float) -> None:
        _signal(self._fleet.parents().get(seat.name, pid), signal.SIGTERM)
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
        """Let requests arrive and replies be lost, then cut the connections."""
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
        where = (seat.label, _drawn(seat, size))
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
    """Repeat until the database, which may be restarting, accepts it."""

    def taken() -> bool:
        with suppress(db.Error):
            act()
            return True
        return False

    until(taken, timeout_s=60, every_s=0.2)


def _database_now() -> float:
    with db.connection() as conn:
        row = conn.execute("SELECT extract(epoch FROM clock_timestamp())::float8 AS t").fetchone()
        assert row is not None
        return row["t"]


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _is_stopped(pid: int) -> bool:
    """Return whether each thread of a process is stopped (proc_pid_stat(5), state T)."""
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    return bool(stats) and all(stat.rpartition(") ")[2][0] == "T" for stat in stats)


def _drawn(seat: fleet.Seat, size: float) -> str:
    """Draw one of its queues: each can be switched OFF by itself."""
    return seat.queues[int(size * 1e6) % len(seat.queues)]


def _together(one: fleet.Seat, other: fleet.Seat, queue: str) -> bool:
    return one.label == other.label and queue in one.queues and one.role == "worker"


def _pair(one: fleet.Seat, busy: str) -> bool:
    """Return the two orchestrators, or the two schedulers: one of them is left alone."""
    return one.role != "worker" and busy.startswith(one.role)
