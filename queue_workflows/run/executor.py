"""Describe one executor of a worker: its process, its channel and its jobs, and how it ended."""

from __future__ import annotations

import math
import signal
import socket
from pathlib import Path
from typing import Any, Final, NamedTuple

from queue_workflows.run import job_output, launcher, wire
from queue_workflows.runtime import clock, logs
from queue_workflows.telemetry import pressure
from queue_workflows.types import JsonDict

GROWN_MB: Final = 32.0
"""When memory is full, an idle executor is ended if it has grown by so many MB since its fork.

Imports and caches take less than that."""
UNKNOWN: Final[dict[str, Any]] = {
    "code": None, "signal": None, "core": False, "max_rss_mb": 0, "by_deadline": False,
    "oom_kills": None, "begun": None,
}  # fmt: skip
"""What is known of an end that the launcher has not seen."""


class Death(NamedTuple):
    """How an executor ended: one line, and the detail of the `death` event."""

    evidence: str
    detail: JsonDict
    by_deadline: bool
    """Whether the launcher has killed it since the worker was silent."""
    killed_for: str
    """Why this worker has killed it; empty if it has not."""


class Executor:
    """One executor of this worker: its process, its channel, and its jobs."""

    def __init__(
        self,
        number: int,
        ends: tuple[socket.socket, socket.socket],
        pipes: tuple[int, int],
        *,
        shared: bool,
    ) -> None:
        """`pipes`: where its stdout and stderr are read. `shared`: it runs many jobs at once."""
        self.number, self.pid = number, 0
        """The pid is 0 until the launcher has forked it."""
        self.shared = shared
        self.channel, self.requests = ends
        for each in ends:
            each.setblocking(False)
        self.frames = wire.Frames()
        self.unsent = bytearray()
        self.out = job_output.Output(*pipes)
        self.jobs: dict[int, Any] = {}
        """Its jobs by key, until their outcomes are here; the first one runs."""
        self.count = 0
        """How many jobs it has been sent."""
        self.announcing = 0
        """How many completed jobs it keeps the value of, for the app's hook."""
        self.changing = False
        """Whether it loads or unloads a model on request."""
        self.full = False
        """Whether it gets no further job."""
        self.let_go_at = math.inf
        """When it was told to end by itself; inf: it was not."""
        self.idle_since = clock.boot_s()
        self.lost = ""
        """Why its channel cannot be used any more."""
        self.lost_at = math.inf
        self.packet: dict[str, Any] | None = None
        """What the launcher says of its end."""
        self.signals: set[int] = set()
        """The signals that it was sent to end."""
        self.killed_for = ""
        self.drains = 0
        """How often it waited until its output was read."""
        self.tail = b""
        """The last output of the job that runs."""
        self.ready = False
        """Whether it runs jobs; before that it loads the app, for instance."""
        self.queues = False
        """Whether a job may wait in it, behind the others that it has."""
        self.mb_before = 0.0
        """Its memory when it was forked."""
        self.lines: logs.Pipes | None = None
        """The lines that it prints, if they are to be printed as JSON."""

    @property
    def job(self) -> Any:
        """Return the job that runs in it, or None."""
        return next(iter(self.jobs.values()), None)

    @property
    def ends(self) -> bool:
        """Return whether it is about to end."""
        return bool(self.full or self.signals or self.lost)

    @property
    def usable(self) -> bool:
        """Return whether it may get a job now, or as soon as one has ended."""
        busy = self.changing or (self.announcing and not self.shared)
        return not (self.ends or busy or self.packet is not None)

    def memory_mb(self, *parts: bytes) -> float:
        """Return its memory in MB, by default that in RAM and that on swap; 0.0 if it has ended."""
        found = pressure.numbers(
            Path(f"/proc/{self.pid}/status"), *(parts or (b"VmRSS", b"VmSwap"))
        )
        return sum(each or 0 for each in found) / 1024

    def has_grown(self) -> bool:
        """Return whether it keeps memory of jobs that have all ended."""
        if not self.usable or self.jobs or not self.count:
            return False
        return self.memory_mb() - self.mb_before >= GROWN_MB

    def close(self) -> None:
        """Close the descriptors. A process that still runs ends when its channel closes."""
        for each in (self.channel, self.requests, self.out):
            each.close()

    def death(self, packet: dict[str, Any], others: int) -> Death:
        """Return how it has ended, which ran a job, and `others` as well."""
        how = _how(packet)
        detail: JsonDict = {"exit_code": packet["code"], "executor": self.pid}
        detail |= {name: packet[name] for name in ("signal", "core", "max_rss_mb", "oom_kills")}
        if packet["signal"] == signal.SIGKILL and packet["oom_kills"]:
            how = f"out of memory: {how}"
        if packet["max_rss_mb"]:
            how = f"{how}, peak memory {packet['max_rss_mb']} MB"
        if self.lost and packet["signal"] in self.signals:
            how = f"the channel to its executor was lost: {self.lost}"
        if others:
            how = f"{how}; it ran {others} other jobs at the same time"
            detail["other_jobs"] = others
        tail = self.tail.decode("utf-8", "replace")
        detail["last_lines"] = tail.replace("\0", "\N{REPLACEMENT CHARACTER}").splitlines()[-5:]
        return Death(how, detail, packet["by_deadline"], self.killed_for)


def _how(packet: dict[str, Any]) -> str:
    code, signum = packet["code"], packet["signal"]
    if packet.get("launcher"):
        name = launcher.signal_name(packet["launcher"])
        return f"ended with its launcher, which was killed by {name}"
    if signum is not None:
        core = " (core dumped)" if packet["core"] else ""
        return f"killed by {launcher.signal_name(signum)}{core}"
    if code is None:
        return "ended for an unknown reason"
    closed = ": its channel to the worker was closed in it" if code == wire.LOST else ""
    return f"ended with exit code {code}{closed}"
