"""Start the processes under test, one of each documented kind, and check that all survive."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.hostile import app, extreme_values, folders
from tests.support import commands, constants, wait

LEASE_S, SWEEP_S = 6.0, 1.0
BOUND_S = 2 * (LEASE_S + SWEEP_S)
"""Within this all normal work has ended (invariant 15); its own work is short."""
KNOBS = {
    "LEASE_RECLAIM_INTERVAL_S": SWEEP_S,
    "CLAIM_POLL_S": 0.5,
    "DL_HEARTBEAT_SEC": 2,
    "STALE_WORKER_AFTER_S": 6,
    "DEAD_WORKER_SWEEP_INTERVAL_S": 2,
    "CRASH_BACKOFF_S": 1,
    "SHUTDOWN_TIMEOUT_S": 2,
}
_APP = ("--app", f"{app.__name__}:setup", "--log-level", "info")
_LEASE = ("--lease-seconds", f"{LEASE_S:g}")
_POOL = json.dumps(
    [{"queue": queue, "concurrency": 3} for queue in (app.FEEDS, app.CALLS, app.OTHER)]
)


class Seat(NamedTuple):
    """One process and the variables that are its own."""

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


_SLOT = ("--slots", "1")
"""A worker without slots promises to end with a job that takes longer than its `timeout_s`."""
SEATS = (
    Seat("orchestrator", ("queue-orchestrator", *_APP)),
    Seat("node worker", ("queue-claim-worker", "--queue", "cpu", *_APP, *_LEASE)),
    Seat(
        "supervised worker",
        ("queue-claim-worker", "--queue", app.SOLO, "--supervise", *_SLOT, *_APP, *_LEASE),
    ),
    Seat(
        "batch worker",
        ("queue-claim-worker", "--queue", app.NOTES, "--batch", "4", *_SLOT, *_APP, *_LEASE),
    ),
    Seat("pool", ("queue-claim-worker", "--workers", _POOL, *_APP, *_LEASE)),
    Seat("scheduler", ("queue-scheduler", *_APP)),
)
_POLL_ONLY = (("QUEUE_WORKFLOWS_POLL_ONLY", "1"),)
MORE = (
    Seat("orchestrator that polls", SEATS[0].argv, _POLL_ONLY),
    Seat("node worker that polls", SEATS[1].argv, _POLL_ONLY),
)
"""The additional processes of the long form."""
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What must never reach a terminal or a log as it is; newline and tab may."""


class Fleet:
    """Running processes; `changed` returns those that were replaced or ended."""

    def __init__(self, started: dict[str, commands.Command]) -> None:
        self._started = started
        self._pids: dict[str, list[int]] = {}
        self._seen = dict.fromkeys(started, 0)

    def settle(self) -> None:
        """Wait until each of them logs that it works, and note its processes."""
        ready = re.compile("dispatches|works on|following|schedule")
        for command in self._started.values():
            wait.until(lambda command=command: ready.search(command.err), timeout_s=60)
        # The worker below a parent logs to the parent's stream.
        self._pids = self._now()

    def _now(self) -> dict[str, list[int]]:
        found = commands.families([*self._started.values()])
        return {
            name: commands.without_wrappers(family, "queue-")
            for name, family in zip(self._started, found, strict=True)
        }

    def changed(self) -> list[str]:
        """Return which processes died or restarted since the fleet settled, and their logs."""
        found: list[str] = []
        for name, now in self._now().items():
            if now != self._pids[name]:
                log = "\n      ".join(self._started[name].err.splitlines()[-12:])
                found.append(f"{name}: processes {self._pids[name]} are now {now}\n      {log}")
        return found

    def logged(self) -> list[str]:
        """Return the lines of their logs since the last call with raw or forged characters."""
        found: list[str] = []
        for name, command in self._started.items():
            fresh = command.err[self._seen[name] :]
            self._seen[name] += len(fresh)
            found += [f"log of {name}: {problem}" for problem in unsafe(fresh)]
        return found


def unsafe(text: str) -> list[str]:
    """Return the parts of a text that a terminal interprets, or that could pass for a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [
        f"{'a forged line' if line.startswith(extreme_values.FORGED_LINE) else 'raw characters'}: "
        f"{line[:200].encode('unicode_escape').decode()}"
        for line in lines
        if line.startswith(extreme_values.FORGED_LINE) or _RAW.search(line)
    ][:5]


@contextmanager
def running(dsn: str, seats: Sequence[Seat] = SEATS) -> Generator[Fleet]:
    """Yield the fleet on this database, settled; kill it at the end."""
    env = {f"QUEUE_WORKFLOWS_{name}": str(value) for name, value in KNOBS.items()}
    env |= constants.env({"input_listener.RECLAIM_S": 6})
    env |= {"QUEUE_WORKFLOWS_DB_URL": dsn, "QUEUE_WORKFLOWS_HOST_LABEL": "normal-machine"}
    env |= {"QUEUE_WORKFLOWS_OUT_ROOTS": str(folders.ROOT), "PYTHONPATH": str(commands.ROOT)}
    # Runs without a folder get one in the root, not in that of the tests around.
    env["QUEUE_WORKFLOWS_OUTPUTS_DIR"] = str(folders.ROOT / "runs")
    with commands.commands(**env) as made:
        # A relative folder that is not refused is created where `folders.touched` finds it.
        where = folders.OUTSIDE
        started = Fleet(
            {seat.name: made.start(*seat.argv, cwd=where, **dict(seat.env)) for seat in seats}
        )
        started.settle()
        yield started
