"""Start the processes under test, each behind its own proxy, and restart those that exit."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from psycopg import conninfo

from queue_workflows import config
from queue_workflows.runtime import service, signals, supervisor
from queue_workflows.worker import parent
from tests.hostile import fleet as attacked
from tests.hostile import folders
from tests.soak import app, journal, mutated_worker, tasks
from tests.support import constants, database, proxy, wait

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 6.0
SWEEP_S = 1.0
LONG_S = 2.2 * LEASE_S
"""The longest handler: it depends on its renewals, and is seen when it goes on without."""
MAX_CRASHES, MAX_LAPSES = 3, 10
KNOBS = {
    "LEASE_RECLAIM_INTERVAL_S": SWEEP_S,
    "CLAIM_POLL_S": 0.5,
    "DL_HEARTBEAT_SEC": 2,
    "STALE_WORKER_AFTER_S": 6,
    "DEAD_WORKER_SWEEP_INTERVAL_S": 2,
    "CRASH_BACKOFF_S": 1,
    "SHUTDOWN_TIMEOUT_S": 2,
    "WORKER_CONTROL_POLL_S": 2,
}
OLDER_KNOBS = {
    "DISPATCH_POLL_S": 0.5, "HEARTBEAT_INTERVAL_S": 2, "SUBMISSION_RECLAIM_S": 6,
    "DB_CONNECT_TIMEOUT_S": 3, "DB_PING_INTERVAL_S": 2, "SUPERVISOR_BACKOFF_MAX_S": 1,
    "RESUME_ON_HOST_S": 1,
}  # fmt: skip
"""Settings that only older versions have."""
BACKOFF_S = 1
CONSTANTS = {
    "input_listener.RECLAIM_S": 6,
    "db.database_url.CONNECT_TIMEOUT_S": 3,
    "db.notifications.PING_S": 2,
    "runtime.supervisor.BACKOFF_MAX_S": BACKOFF_S,
    "claim.job_steps.RESUME_ON_HOST_S": 1,
}


DEADLINE_S = 12.0
"""To end in good order; the seat with default knobs may drain for 8 s."""
SUPERVISED, REAPED, UNSEEN, DEFAULT = "supervised", "reaped", "unseen", "default knobs"
"""Who cares for a worker that dies: a parent of its own (`--supervise`), the fleet's supervisor as
in `up`, nobody, and nobody with every knob and the lease (600 s) at their defaults."""


POLLS, POOLED, STEPS, OLDER, LATIN1 = "polls", "pooled", "steps", "older", "latin1"
"""It listens to nothing and polls; the same through PgBouncer in transaction mode; its wall clock
is stepped; it runs another version; its environment names another encoding, style of dates and time
zone."""


class Seat(NamedTuple):
    """A place in the fleet; `care`: who learns that its worker died.

    `pool`: the queues of a pool, and how many jobs of each run at once.
    """

    name: str
    role: str
    queue: str = ""
    label: str = ""
    care: str = ""
    options: tuple[str, ...] = ()
    pool: tuple[tuple[str, int], ...] = ()
    slots: int = 0
    """How many jobs it runs at once, each in an executor; 0: as its other options say."""
    odd: str = ""
    """What makes it differ from the others, `POLLS` for example."""

    @property
    def queues(self) -> tuple[str, ...]:
        """Return the queues that it serves."""
        return tuple(queue for queue, _ in self.pool) or (self.queue,)

    @property
    def has_executors(self) -> bool:
        """Return whether its handlers run in other processes than the worker itself."""
        inline = "--inline" in self.options or self.odd == OLDER
        return self.role == "worker" and not inline


SEATS = (
    Seat("orchestrator-1", "orchestrator"),
    Seat("orchestrator-2", "orchestrator", odd=POLLS),
    Seat("cpu-1", "worker", "cpu", "box-a", REAPED, slots=1),
    Seat("cpu-2", "worker", "cpu", "box-a", UNSEEN, odd=OLDER),
    Seat("cpu-3", "worker", "cpu", "box-b", SUPERVISED),
    Seat("cpu-4", "worker", "cpu", "box-c", DEFAULT, ("--inline",)),
    Seat("cpu-5", "worker", "cpu", "box-d", UNSEEN, odd=STEPS),
    Seat("cpu-6", "worker", "cpu", "box-e", UNSEEN, slots=3),
    Seat("gpu-1", "worker", "gpu", "box-g", REAPED, slots=1),
    Seat("gpu-2", "worker", "gpu", "box-h", UNSEEN, ("--inline",)),
    Seat("notes-1", "worker", tasks.NOTES, "box-b", SUPERVISED, ("--batch", "4")),
    Seat("notes-2", "worker", tasks.NOTES, "box-c", UNSEEN, ("--batch", "4"), odd=POOLED),
    Seat("notes-3", "worker", tasks.NOTES, "box-d", UNSEEN, slots=4, odd=LATIN1),
    Seat("pool-1", "worker", "", "box-p", SUPERVISED, (), ((tasks.FEEDS, 4), (tasks.CALLS, 4))),
    Seat(
        "pool-2", "worker", "", "box-q", UNSEEN, (),
        ((tasks.FEEDS, 3), (tasks.CALLS, 3), (tasks.NOTES, 1)), odd=POOLED,
    ),
    Seat("scheduler-1", "scheduler"),
    Seat("scheduler-2", "scheduler"),
)  # fmt: skip


class Ended(NamedTuple):
    """A process that the supervisor reaped."""

    at: float
    seat: str
    pid: int
    code: int | None
    signal: int | None


class Fleet:
    """The processes run inside the `with` block; its end stops all of them.

    `pooled`: the DSN through the pooler.
    """

    def __init__(
        self,
        dsn: str,
        base: Path,
        mutant: str | None,
        odd: Mapping[str, Mapping[str, str]],
        pooled: str,
    ) -> None:
        self.base = base
        self._odd = odd
        self.journal = base / "journal"
        self.ended: list[Ended] = []
        self.proxies = {
            seat.name: proxy.Proxy(_named(pooled if seat.odd == POOLED else dsn, seat.name))
            for seat in SEATS
        }
        self._reaped_label = {seat.name: seat.label for seat in SEATS if seat.care == REAPED}
        self._crash_recoveries = {
            label: parent.CrashRecovery(label) for label in set(self._reaped_label.values())
        }
        self._orphans: list[int] = []
        self._env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            journal.PATH_ENV: str(self.journal),
            tasks.LONG_ENV: str(LONG_S),
            app.MUTANT_ENV: mutant or "",
            "QUEUE_WORKFLOWS_OUT_ROOTS": str(folders.ROOT),
        }
        self._stop = signals.StopRequest()
        self._supervisor: supervisor.Supervisor | None = None
        self._side = service.Thread("soak-supervisor", lambda _: self._run())
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            for each in self.proxies.values():
                stack.enter_context(each)
            for each in self._crash_recoveries.values():
                stack.enter_context(each)
            supervisor.BACKOFF_MAX_S = BACKOFF_S
            self._supervisor = supervisor.Supervisor(
                [self._spec(seat) for seat in SEATS],
                on_exit=self._reaped,
            )
            stack.callback(self.stop)
            self._side.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stop(self) -> None:
        """Stop all by SIGTERM, then by SIGKILL, and reap them. Safe to call again."""
        self._stop.request()
        while self._side.alive:
            for pid in self.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._side.stop(0.5)
        while self._orphans:
            _wait_for(self._orphans.pop())

    def _run(self) -> None:
        assert self._supervisor is not None
        self._supervisor.run(self._stop, deadline_s=DEADLINE_S)

    def pids(self) -> dict[str, int]:
        """Return the pid of the working process of each running seat."""
        found = self.parents()
        for seat in SEATS:
            if seat.care == SUPERVISED and seat.name in found:
                children = _children(found.pop(seat.name))
                if children:
                    found[seat.name] = children[0]
        return found

    def executors(self, name: str) -> list[int]:
        """Return the pids of the launcher of a seat's worker and, after it, of its executors."""
        worker = self.pids().get(name)
        launchers = _children(worker) if worker is not None else []
        return launchers[:1] + [pid for each in launchers[:1] for pid in _children(each)]

    def parents(self) -> dict[str, int]:
        """Return the pid of the process that the supervisor started, by seat."""
        assert self._supervisor is not None
        return self._supervisor.children()

    def unsafe(self) -> list[str]:
        """Return the lines of their logs that a terminal would obey, or that a row has forged."""
        return [
            f"log of {seat.name}: {problem}"
            for seat in SEATS
            if (log := self.base / f"{seat.name}.log").exists()
            for problem in attacked.unsafe(log.read_text(errors="replace"))
        ]

    def kill_parent(self, name: str) -> tuple[int, ...]:
        """Kill -9 a `--supervise` parent; it and the worker that is to end by itself."""
        parent = self.parents().get(name)
        if parent is None:
            return ()
        children = _children(parent)
        with suppress(ProcessLookupError):
            self._orphans += [os.pidfd_open(pid) for pid in children]
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
        return (parent, *children)

    def wait_until_up(self) -> None:
        """Wait until every process has a connection."""
        everybody = self.proxies.values()
        wait.until(lambda: all(each.connections for each in everybody), timeout_s=60, every_s=0.1)

    def _reaped(self, ended: supervisor.Exit) -> None:
        now = time.monotonic()
        self.ended.append(Ended(now, ended.name, ended.pid, ended.code, ended.signal))
        if (label := self._reaped_label.get(ended.name)) is not None:
            self._crash_recoveries[label].report(ended)

    def _spec(self, seat: Seat) -> supervisor.ChildSpec:
        log = self.base / f"{seat.name}.log"
        module = "claim_worker" if seat.role == "worker" else seat.role
        options = [f"--app={app.__name__}:setup", "--log-level=warning", *seat.options]
        if seat.pool:
            entries = [{"queue": queue, "concurrency": most} for queue, most in seat.pool]
            options.append(f"--workers={json.dumps(entries)}")
        elif seat.role == "worker":
            options.append(f"--queue={seat.queue}")
        if seat.slots:
            options.append(f"--slots={seat.slots}")
        if seat.care == SUPERVISED:
            options.append("--supervise")
        if seat.care and seat.care != DEFAULT:
            options.append(f"--lease-seconds={LEASE_S:g}")
        # Elsewhere than in the checkout, whose package would come before another version's, and
        # where a relative folder that nobody refuses is seen.
        argv = [
            "/bin/sh",
            "-c",
            'exec >>"$0" 2>&1 && cd "$1" && shift && exec "$@"',
            str(log),
            str(folders.OUTSIDE),
        ]
        # A worker with executors loads no app, which switches a mutant on in the others.
        mutated = seat.has_executors and self._env[app.MUTANT_ENV]
        start = [mutated_worker.__name__] if mutated else [f"queue_workflows.{module}"]
        argv += [sys.executable, "-m", *start, *options]
        own = {
            "QUEUE_WORKFLOWS_DB_URL": self.proxies[seat.name].dsn,
            "QUEUE_WORKFLOWS_HOST_LABEL": seat.label or seat.name,
        }
        default = seat.care == DEFAULT
        if not default:
            own |= constants.env(CONSTANTS)
        for name, value in KNOBS.items():
            own[f"QUEUE_WORKFLOWS_{name}"] = str(config.KNOBS[name].default if default else value)
        env = self._env | own | {**self._odd.get(seat.odd, {})}
        return supervisor.ChildSpec(seat.name, argv, constants.for_children(env))


def _children(pid: int) -> list[int]:
    """Return the child processes of this process."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _wait_for(pidfd: int) -> None:
    """Wait until this process, not our child, has ended; kill it if that takes too long."""
    if not select.select([pidfd], [], [], DEADLINE_S)[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], DEADLINE_S)
    os.close(pidfd)


def _named(dsn: str, name: str) -> str:
    return database.url({**conninfo.conninfo_to_dict(dsn), "application_name": name})
