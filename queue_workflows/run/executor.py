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
"""When memory is full, idle executors that have grown by more MB than this are ended.

Imports and caches take less."""
UNKNOWN: Final[dict[str, Any]] = {
    "code": None, "signal": None, "core": False, "max_rss_mb": 0, "by_deadline": False,
    "oom_kills": None, "begun": None,
}  # fmt: skip
"""The packet about the end of an executor that the launcher has not seen."""


class Death(NamedTuple):
    """How an executor ended, as one line and as the detail of the `death` event."""

    evidence: str
    detail: JsonDict
    by_deadline: bool
    """Whether the launcher killed it because the worker was silent past its deadline."""
    killed_for: str
    """Why its jobs go back uncounted, as this worker has killed it; empty if it has not."""


class Executor:
    """One executor of this worker, with its process, its channel and its jobs."""

    def __init__(
        self,
        number: int,
        ends: tuple[socket.socket, socket.socket],
        pipes: tuple[int, int],
        *,
        shared: bool,
    ) -> None:
        """Read its stdout and stderr from `pipes`; with `shared` it runs many jobs at once."""
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
        """Its jobs by key, until their outcomes are received; the first one runs."""
        self.count = 0
        """How many jobs were sent to it."""
        self.announcing = 0
        """How many values of completed jobs it keeps for the app's hook."""
        self.changing = False
        """Whether it loads or unloads a model on request."""
        self.full = False
        """Whether it gets no further job."""
        self.let_go_at = math.inf
        """When it was asked to end by itself; inf if it was not."""
        self.idle_since = clock.boot_s()
        self.lost = ""
        """Why its channel cannot be used any more."""
        self.lost_at = math.inf
        self.packet: dict[str, Any] | None = None
        """The launcher's packet about its end, or None."""
        self.signals: set[int] = set()
        """The signals to end it that were requested."""
        self.unsent_signals: list[int] = []
        """Requested signals that the launcher has not got yet, as before it forks this executor."""
        self.killed_for = ""
        self.drains = 0
        """How often it asked the worker to read its output."""
        self.ready = False
        """Whether it can run jobs; before that it may have to load the app."""
        self.queues = False
        """Whether a further job may wait in it behind the others."""
        self.mb_before = 0.0
        """Its memory when it was forked."""
        self.lines: logs.Pipes | None = None
        """Cuts its output into lines, if they have to be printed as JSON."""

    @property
    def job(self) -> Any:
        """Return the job that runs in it, or None."""
        return next(iter(self.jobs.values()), None)

    @property
    def ends(self) -> bool:
        """Return whether it ends soon."""
        return bool(self.full or self.signals or self.lost)

    @property
    def usable(self) -> bool:
        """Return whether it may get a job now, or once one of its jobs has ended."""
        busy = self.changing or (self.announcing and not self.shared)
        return not (self.ends or busy or self.packet is not None)

    def memory_mb(self, *parts: bytes) -> float:
        """Return its memory in MB, by default RAM and swap together; 0.0 if it has ended."""
        found = pressure.numbers(
            Path(f"/proc/{self.pid}/status"), *(parts or (b"VmRSS", b"VmSwap"))
        )
        return sum(each or 0 for each in found) / 1024

    def has_grown(self) -> bool:
        """Return whether it is idle and still keeps memory of its earlier jobs."""
        if not self.usable or self.jobs or not self.count:
            return False
        return self.memory_mb() - self.mb_before >= GROWN_MB

    def close(self) -> None:
        """Close the descriptors. A process that still runs ends when its channel closes."""
        for each in (self.channel, self.requests, self.out):
            each.close()

    def death(self, packet: dict[str, Any], others: int) -> Death:
        """Return how it has ended while it ran a job, and `others` besides."""
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
