"""Define an app whose handlers do not end: `--app tests.support.hanging_app:setup`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import queue_workflows

LONG_S = 60


def _started(args: dict[str, Any]) -> None:
    Path(args["folder"], "started").write_text(str(os.getpid()))


def deaf(reason: str, args: dict[str, Any]) -> None:
    """Run on in Python, whatever is requested."""
    _started(args)
    ends = time.monotonic() + LONG_S
    while time.monotonic() < ends:
        time.sleep(0.05)


def hog(reason: str, args: dict[str, Any]) -> None:
    """Stay in a C call that keeps the GIL: no other thread of the process runs."""
    _started(args)
    _keep_the_gil(LONG_S)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _keep_the_gil(seconds: float) -> None:
    """Wait in a C call that no signal ends, other than sleep(): for a lock that is taken."""
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    ends = time.time() + seconds  # noqa: TID251  the clock of pthread_mutex_timedlock
    until = _Time(int(ends), int(ends % 1 * 1e9))
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_timedlock(lock, ctypes.byref(until))


def _wait_for_ever(libc: ctypes.CDLL) -> None:
    """Block in a C call that no signal ends, by taking a lock twice. Zeros are an open lock."""
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def stuck(reason: str, args: dict[str, Any]) -> None:
    """Block in C code that has released the GIL: only the main thread is blocked."""
    _started(args)
    _wait_for_ever(ctypes.CDLL(None))


def stuck_with_gil(reason: str, args: dict[str, Any]) -> None:
    """Block in C code that keeps the GIL: every thread is blocked."""
    _started(args)
    _wait_for_ever(ctypes.PyDLL(None))


def sticks(folder: Path) -> None:
    """Block as `stuck_with_gil` does; at the second start return at once."""
    again = (folder / "started").exists()
    _started({"folder": folder})
    if not again:
        _wait_for_ever(ctypes.PyDLL(None))


def hogs_once(reason: str, args: dict[str, Any]) -> None:
    """Keep the GIL at the first start of the job; without a folder do nothing."""
    if "folder" in args:
        hogs(Path(args["folder"]))


def hogs(folder: Path, seconds: float = LONG_S) -> None:
    """Keep the GIL for that long; at the second start return at once."""
    again = (folder / "started").exists()
    _started({"folder": folder})
    if not again:
        _keep_the_gil(seconds)


def beats_then_sticks(folder: Path, status_callback: Callable[..., object]) -> None:
    """Beat once, then do as `sticks` does."""
    status_callback(0.1)
    sticks(folder)


def waits_for_go(folder: Path) -> None:
    """Wait for the file `go`, and end a second later."""
    _started({"folder": folder})
    while not (folder / "go").exists():
        time.sleep(0.05)
    time.sleep(1.0)


def beats_and_waits(folder: Path, status_callback: Callable[..., object]) -> None:
    """Beat once, then do as `waits_for_go` does."""
    status_callback(0.1)
    waits_for_go(folder)


def beats_once(folder: Path, status_callback: Callable[..., object]) -> None:
    """Beat once, then hang."""
    status_callback(0.1)
    deaf("", {"folder": folder})


def silent(folder: Path) -> None:
    """Hang from the start."""
    deaf("", {"folder": folder})


def lingers_once(reason: str, args: dict[str, Any]) -> None:
    """Run on; at the second start return at once."""
    again = Path(args["folder"], "started").exists()
    _started(args)
    if not again:
        deaf(reason, args)


def lingers_thrice(reason: str, args: dict[str, Any]) -> None:
    """Run on for the first three starts, each a line in `starts`; then return at once."""
    with Path(args["folder"], "starts").open("a", encoding="ascii") as starts:
        starts.write(f"{os.getpid()}\n")
    if len(Path(args["folder"], "starts").read_text(encoding="ascii").splitlines()) <= 3:
        ends = time.monotonic() + LONG_S
        while time.monotonic() < ends:
            time.sleep(0.05)


def kills_itself(reason: str, args: dict[str, Any]) -> None:
    """End its process by SIGKILL, after a line in `starts`."""
    with Path(args["folder"], "starts").open("a", encoding="ascii") as starts:
        starts.write(f"{os.getpid()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def kills_ancestor(reason: str, args: dict[str, Any]) -> None:
    """End the process `levels` above this one by SIGKILL, and then sleep."""
    pid = os.getpid()
    for _ in range(args["levels"]):
        pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    with Path(args["folder"], "kills").open("a", encoding="ascii") as kills:
        kills.write(f"{pid}\n")
    os.kill(pid, signal.SIGKILL)
    time.sleep(LONG_S)


async def awaits_once(reason: str, args: dict[str, Any]) -> None:
    """Do as `lingers_once` does, without a thread of its own."""
    again = Path(args["folder"], "started").exists()
    _started(args)
    if not again:
        await asyncio.sleep(LONG_S)


def lasts(reason: str, args: dict[str, Any]) -> None:
    """Sleep for so many seconds and end."""
    _started(args)
    time.sleep(args["seconds"])


def setup() -> None:
    """Register the tasks."""
    queue_workflows.configure(ingest_queues=("work",))
    queue_workflows.register_node("beats_once", beats_once)
    queue_workflows.register_node("waits_for_go", waits_for_go)
    queue_workflows.register_node("beats_and_waits", beats_and_waits)
    queue_workflows.register_node("silent", silent)
    queue_workflows.register_node("hogs", hogs)
    queue_workflows.register_node("sticks", sticks)
    queue_workflows.register_node("beats_then_sticks", beats_then_sticks)
    queue_workflows.register_ingest_task("deaf", deaf)
    queue_workflows.register_ingest_task("hog", hog)
    queue_workflows.register_ingest_task("lasts", lasts)
    queue_workflows.register_ingest_task("stuck", stuck)
    queue_workflows.register_ingest_task("stuck_with_gil", stuck_with_gil)
    queue_workflows.register_ingest_task("hogs_once", hogs_once)
    queue_workflows.register_ingest_task("lingers_once", lingers_once)
    queue_workflows.register_ingest_task("awaits_once", awaits_once)
    queue_workflows.register_ingest_task("lingers_thrice", lingers_thrice)
    queue_workflows.register_ingest_task("kills_itself", kills_itself)
    queue_workflows.register_ingest_task("kills_ancestor", kills_ancestor)
