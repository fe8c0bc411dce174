"""A process whose in-process queue obeys its memory: `python -m tests.support.local_memory_app`.

Its tasks are `fills`, `reads` and `quick`. It starts once the file `begin` exists, adds three
`quick` jobs for a file `more`, and writes its statistics to the file `stats`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from queue_workflows import config, local_queue
from tests.support import slot_app

QUEUE = "threads"
MORE = [f"quick{number}" for number in range(3)]


def quick(**_: Any) -> dict[str, Any]:
    return {"pid": os.getpid()}


def reads(*, path: str, megabytes: int) -> dict[str, Any]:
    """Writes a file and reads it three times, so that its pages are in use as active ones."""
    chunk = os.urandom(slot_app.CHUNK)
    with Path(path).open("wb") as file:
        for _ in range(megabytes):
            file.write(chunk)
        os.fsync(file.fileno())
    for _ in range(3):
        with Path(path).open("rb") as file:
            while file.read(slot_app.CHUNK):
                pass
    return {}


def setup() -> None:
    config.configure(ingest_queues={QUEUE})
    for name, task in (("quick", quick), ("reads", reads), ("fills", slot_app.fills)):
        config.register_ingest_task(name, task)


def _report(folder: Path, manager: local_queue.JobQueueManager) -> dict[str, Any]:
    found = manager.stats() | {"at": time.monotonic()}
    (folder / "stats.new").write_text(json.dumps(found))
    (folder / "stats.new").replace(folder / "stats")
    return found


def main() -> None:
    """`argv`: the folder, and the first job of a plan in memory, as JSON; without it the queue."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    setup()
    folder = Path(sys.argv[1])
    plan: Any = local_queue.IngestPlan(QUEUE)
    if len(sys.argv) > 2:
        plan = local_queue.MemoryPlan([local_queue.Job("first", **json.loads(sys.argv[2]))])
    while not (folder / "begin").exists():
        time.sleep(0.01)
    manager = local_queue.JobQueueManager(
        plan, workers=2, single_job=False, grace_s=0, stagger_s=0, cooldown_s=0, fetch_every_s=0.1
    )
    with manager:
        while not (folder / "end").exists():
            _report(folder, manager)
            if (folder / "more").exists() and isinstance(plan, local_queue.MemoryPlan):
                (folder / "more").unlink()
                for name in MORE:
                    plan.add(local_queue.Job(name, "quick"))
            time.sleep(0.02)
    _report(folder, manager)


if __name__ == "__main__":
    main()
