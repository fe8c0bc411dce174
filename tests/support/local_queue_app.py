"""A process that serves an ingest queue with threads: `python -m tests.support.local_queue_app`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from queue_workflows import config, local_queue
from queue_workflows.telemetry import pressure

QUEUE = "threads"


def note(*, folder: str, name: str, stay: bool = False) -> dict[str, Any]:
    """Write one line per start to a file of this name; `stay`: go on until the file `go` exists."""
    with Path(folder, name).open("a", encoding="ascii") as starts:
        starts.write(f"{os.getpid()}\n")
    ends = time.monotonic() + 60
    while stay and not Path(folder, "go").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    return {"pid": os.getpid()}


def setup() -> None:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("note", note)


def manager(plan: Any, execute: Any = None, **more: Any) -> local_queue.JobQueueManager:
    """A manager without the pauses of the defaults."""
    given = {"workers": 4, "single_job": False, "grace_s": 0.0, "stagger_s": 0.0, "cooldown_s": 0.0}
    quiet = pressure.Throttle(pressure.Reading)
    return local_queue.JobQueueManager(plan, execute, throttle=quiet, **{**given, **more})


def main() -> None:
    setup()
    lease_s = json.loads(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with manager(local_queue.IngestPlan(QUEUE, lease_s=lease_s)):
        print("ready", flush=True)
        stopped.wait(120)


if __name__ == "__main__":
    main()
