"""Define an app whose handlers kill the worker, sleep or fork.

What `toy_app` has comes with it; handlers add their line to the `journal` of their `folder`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import db, jobs
from tests.support import deaths, toy_app
from tests.support.frequent_schedule import Every

QUEUE = "notes"
EVERY_S = Every.SECONDS
SPARE_MB = 64


def _out_of_memory() -> None:
    """Allocate more memory than the process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (SPARE_MB << 20), before[1]))
    try:
        bytearray(2 * SPARE_MB << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


ENDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: ctypes.string_at(0),
    "left": lambda: os._exit(3),
    "exits": lambda: sys.exit("bye"),
    "starved": _out_of_memory,
}


def end(reason: str, args: dict[str, Any]) -> None:
    """End its process, or try to, in one of these ways."""
    toy_app.journal(Path(args["folder"]), args["how"])
    ENDS[args["how"]]()


def nap(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Sleep whatever the worker requests, with `wait` until `go`; note start and end."""
    folder = Path(args["folder"])
    toy_app.journal(folder, f"start-{args['number']}")
    time.sleep(args["seconds"])
    if args.get("wait"):
        toy_app.await_go(folder, threading.Event())
    toy_app.journal(folder, f"end-{args['number']}")
    return {}


def hog(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Stay in a C call that keeps the GIL for so many seconds: no other thread runs."""
    toy_app.journal(Path(args["folder"]), "hog")
    ctypes.PyDLL(None).usleep(int(args["seconds"] * 1e6))
    return {}


def fork(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Fork children that use the database; return how each ended, and its own session."""
    with db.connection() as conn:
        own = conn.info.backend_pid
    said = Path(args["folder"], "child")
    found: list[tuple[int, int, str]] = []
    for leave in (os._exit, sys.exit):
        child = os.fork()
        if child == 0:
            with db.connection() as conn:
                said.write_text(f"{conn.info.backend_pid} {deaths.id_with_executors('box')}")
            leave(0)
        found.append((child, os.waitpid(child, 0)[1], said.read_text()))
    with db.connection() as conn:
        kept = conn.info.backend_pid
    return {"children": found, "sessions": [own, kept]}


def setup() -> None:
    """Register everything."""
    toy_app.setup()
    for task in (end, nap, hog, fork):
        queue_workflows.register_ingest_task(task.__name__, task)
    queue_workflows.set_ingest_schedule([Every("every", 0, "note", QUEUE)])


def enqueue(task: str, folder: Path, **args: Any) -> str:
    """Queue one of the handlers above; the job's id."""
    setup()
    args["folder"] = str(folder)
    return jobs.enqueue(task_name=task, queue=QUEUE, args=args)
