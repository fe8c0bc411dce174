"""The processes under test, each behind a proxy of its own, kept running by a supervisor."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from psycopg import conninfo

from queue_workflows.runtime import signals, supervisor
from queue_workflows.worker import burial
from tests.soak import app, journal
from tests.support import database, proxy, wait

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 6.0
SWEEP_S = 1.0
LONG_S = 2.2 * LEASE_S
"""The longest body: it depends on its renewals, and is seen when it goes on without."""
MAX_CRASHES = 3
KNOBS = {
    "LEASE_RECLAIM_INTERVAL_S": SWEEP_S,
    "CLAIM_POLL_S": 0.5,
    "DISPATCH_POLL_S": 0.5,
    "HEARTBEAT_INTERVAL_S": 2,
    "STALE_WORKER_AFTER_S": 6,
    "DEAD_WORKER_SWEEP_INTERVAL_S": 2,
    "CRASH_BACKOFF_S": 1,
    "MAX_CRASHES": MAX_CRASHES,
    "SHUTDOWN_TIMEOUT_S": 2,
    "SUBMISSION_RECLAIM_S": 6,
    "DB_CONNECT_TIMEOUT_S": 3,
    "DB_PING_INTERVAL_S": 2,
    "WORKER_CONTROL_POLL_S": 2,
}


class Seat(NamedTuple):
    """A place in the fleet. `buried`: the supervisor reports its deaths, as `up` does."""

    name: str
    role: str
    queue: str = ""
    label: str = ""
    buried: bool = False
    options: tuple[str, ...] = ()


SEATS = (
    Seat("orchestrator-1", "orchestrator"),
    Seat("orchestrator-2", "orchestrator"),
    Seat("cpu-1", "worker", "cpu", "box-a", buried=True),
    Seat("cpu-2", "worker", "cpu", "box-a"),
    Seat("cpu-3", "worker", "cpu", "box-b", buried=True),
    Seat("cpu-4", "worker", "cpu", "box-c"),
    Seat("gpu-1", "worker", "gpu", "box-g", buried=True),
    Seat("notes-1", "worker", app.QUEUE, "box-b", buried=True),
    Seat("notes-2", "worker", app.QUEUE, "box-c", options=("--batch", "4")),
    Seat("scheduler-1", "scheduler"),
    Seat("scheduler-2", "scheduler"),
)


class Ended(NamedTuple):
    """A process that the supervisor reaped."""

    at: float
    seat: str
    pid: int
    code: int | None
    signal: int | None


class Fleet:
    """Inside the `with` block the processes run; leaving it ends every one of them."""

    def __init__(self, dsn: str, base: Path, mutant: str | None) -> None:
        self.base = base
        self.journal = base / "journal"
        self.ended: list[Ended] = []
        self.proxies = {seat.name: proxy.Proxy(_named(dsn, seat.name)) for seat in SEATS}
        self._buried = {seat.name: seat.label for seat in SEATS if seat.buried}
        self._burials = {label: burial.Burials(label) for label in set(self._buried.values())}
        self._env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            journal.PATH_ENV: str(self.journal),
            app.LONG_ENV: str(LONG_S),
            app.MUTANT_ENV: mutant or "",
            **{f"QUEUE_WORKFLOWS_{name}": str(value) for name, value in KNOBS.items()},
        }
        self._stop = signals.StopRequest()
        self._supervisor: supervisor.Supervisor | None = None
        self._thread = threading.Thread(target=self._run, name="soak-supervisor", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            for each in self.proxies.values():
                stack.enter_context(each)
            for each in self._burials.values():
                stack.enter_context(each)
            self._supervisor = supervisor.Supervisor(
                [self._spec(seat) for seat in SEATS], on_exit=self._reaped, backoff_max_s=1.0
            )
            stack.callback(self.stop)
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what does not end; all are reaped. Safe to call again."""
        self._stop.request()
        while self._thread.is_alive():
            for pid in self.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._thread.join(0.5)

    def _run(self) -> None:
        assert self._supervisor is not None
        self._supervisor.run(self._stop, deadline_s=6.0)

    def pids(self) -> dict[str, int]:
        """Seat → pid, of those that run."""
        assert self._supervisor is not None
        found = self._supervisor.children()
        return {name: child.pid for name, child in found.items() if child.pid is not None}

    def wait_until_up(self) -> None:
        """Until every process has a connection."""
        everybody = self.proxies.values()
        wait.until(lambda: all(each.connections for each in everybody), timeout_s=60, every_s=0.1)

    def _reaped(self, ended: supervisor.Exit) -> None:
        now = time.monotonic()
        self.ended.append(Ended(now, ended.name, ended.pid, ended.code, ended.signal))
        if (label := self._buried.get(ended.name)) is not None:
            self._burials[label].report(ended)

    def _spec(self, seat: Seat) -> supervisor.ChildSpec:
        log = self.base / f"{seat.name}.log"
        module = "claim_worker" if seat.role == "worker" else seat.role
        options = [f"--app={app.__name__}:setup", "--log-level=warning", *seat.options]
        if seat.role == "worker":
            options += [f"--queue={seat.queue}", f"--lease-seconds={LEASE_S:g}"]
        argv = ["/bin/sh", "-c", 'exec >>"$0" 2>&1 && exec "$@"', str(log)]
        argv += [sys.executable, "-m", f"queue_workflows.{module}", *options]
        own = {
            "QUEUE_WORKFLOWS_DB_URL": self.proxies[seat.name].dsn,
            "QUEUE_WORKFLOWS_HOST_LABEL": seat.label or seat.name,
        }
        return supervisor.ChildSpec(seat.name, argv, self._env | own)


def _named(dsn: str, name: str) -> str:
    return database.url({**conninfo.conninfo_to_dict(dsn), "application_name": name})
