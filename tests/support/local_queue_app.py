"""A process that serves an ingest queue with threads: `python -m tests.support.local_queue_app`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

from queue_workflows import config, local_queue
from tests.support import clocks, memory_reports

QUEUE = "threads"


def note(*, folder: str, name: str, stay: bool = False) -> dict[str, Any]:
    """Write one line per start to a file of this name; `stay`: go on until the file `go` exists."""
    with Path(folder, name).open("a", encoding="ascii") as starts:
        starts.write(f"{os.getpid()}\n")
    ends = time.monotonic() + 60
    while stay and not Path(folder, "go").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    return {"pid": os.getpid()}


def journal(
    *, folder: str, name: str, pause_s: float = 0.0
) -> Generator[None, None, dict[str, Any]]:
    """Yield until the file `go` exists and `pause_s` are over; note its start and its end."""
    began = clocks.boot_s()
    _note(folder, name, "start", began)
    try:
        while not Path(folder, "go").exists() or clocks.boot_s() - began < pause_s:
            yield
            time.sleep(0.01)
    finally:
        _note(folder, name, "end", clocks.boot_s())
    return {"pid": os.getpid()}


def _note(folder: str, name: str, what: str, at: float) -> None:
    with Path(folder, name).open("a", encoding="ascii") as file:
        file.write(f"{what} {os.getpid()} {at:.4f}\n")


class Span(NamedTuple):
    """When a handler ran, by the clock of all processes; inf: it has noted no end."""

    pid: int
    began: float
    ended: float


def spans(folder: Path, name: str) -> list[Span]:
    """The runs of a job's handler that the journal has, in the order of their starts."""
    path, found = Path(folder, name), list[Span]()
    for what, pid, at in map(str.split, path.read_text().splitlines() if path.exists() else ()):
        if what == "start":
            found.append(Span(int(pid), float(at), math.inf))
        else:
            place = max(n for n, each in enumerate(found) if each.pid == int(pid))
            found[place] = found[place]._replace(ended=float(at))
    return found


def setup() -> None:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("note", note)
    config.register_ingest_task("journal", journal)


def manager(plan: Any, execute: Any = None, **more: Any) -> local_queue.JobQueueManager:
    """A manager without the pauses of the defaults."""
    given = {"workers": 4, "single_job": False, "grace_s": 0.0, "stagger_s": 0.0, "cooldown_s": 0.0}
    given |= {"throttle": memory_reports.throttle()}
    return local_queue.JobQueueManager(plan, execute, **{**given, **more})


def main() -> None:
    setup()
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    plan = local_queue.IngestPlan(QUEUE, **{"lease_s": 60.0, **given.get("plan", {})})
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    serving = manager(plan, workers=given.get("workers", 4))
    serving.start()
    print("ready", flush=True)
    stopped.wait(120)
    serving.stop(given.get("stop_s", 30.0))


if __name__ == "__main__":
    main()
