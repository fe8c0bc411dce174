"""Start processes that end with the benchmark, and read their CPU time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 20.0
APP = "benchmarks.app"

# Becomes the child by exec; the kernel ends it when the benchmark is killed.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def environment(dsn: str) -> dict[str, str]:
    """Return our environment without engine settings, with this database and the checkout."""
    prefixes = ("QUEUE_WORKFLOWS_", "AI_LEADS_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | {"QUEUE_WORKFLOWS_DB_URL": dsn, "PYTHONPATH": path}


class Process:
    """One running process; `with` stops it. Its messages are kept for when something goes wrong."""

    def __init__(self, name: str, argv: Sequence[str], dsn: str, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _TIED, str(os.getpid()), *argv],
                env=environment(dsn),
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """Raise with its last words when it has ended."""
        if self._process.poll() is not None:
            words = self._log.read_text(errors="replace").splitlines()[-8:]
            raise RuntimeError(f"{self.name} ended early: {' / '.join(words)}")

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends by itself; any exit code but 0 is an error."""
        if self._process.wait(timeout_s) != 0:
            self.check()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """Return the CPU time of all its threads, in nanosecond steps."""
        return cpu_s(self.pid)

    def rss_mb(self) -> float:
        """Return the resident memory now, in MB of 1,024 kB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process of this machine, in nanosecond steps."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def module(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def worker(queue: str, *more: str) -> list[str]:
    """Return the command line of a real worker of a queue."""
    return module("queue_workflows.claim_worker", "--queue", queue, "--app", APP, *more)


def orchestrator() -> list[str]:
    """Return the command line of a real orchestrator."""
    return module("queue_workflows.orchestrator", "--app", APP)


def scheduler() -> list[str]:
    """Return the command line of a real scheduler."""
    return module("queue_workflows.scheduler", "--app", APP)


def bare(*arguments: str) -> list[str]:
    """Return the command line of a process of the bare loop."""
    return module("benchmarks.baseline", *arguments)


@contextmanager
def running(dsn: str, folder: Path, *commands: tuple[str, list[str]]) -> Generator[list[Process]]:
    """Start these processes in order; stop all at the end."""
    started: list[Process] = []
    try:
        for name, argv in commands:
            log = folder / f"{len(list(folder.iterdir()))}-{name}.log"
            started.append(Process(name, argv, dsn, log))
        yield started
    finally:
        for process in started:
            process.stop()


def forget_knobs() -> None:
    """Take every knob of the engine out of our own environment, so that all run at the defaults."""
    for name in list(os.environ):
        if name.startswith(("QUEUE_WORKFLOWS_", "AI_LEADS_")):
            del os.environ[name]
