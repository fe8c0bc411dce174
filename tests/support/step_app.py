"""Define an app whose handlers have steps: `--app tests.support.step_app:setup`.

Each step adds a line `<step> <claim>` to the file `journal` of the handler's folder.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import steps

QUEUE = "work"
LARGE = 700 * 1000
"""Characters of a result that no socket takes at once, and that MAX_PAYLOAD_KB allows."""


def write(folder: str, word: str) -> str:
    """Add a line to the journal, in one write, and return the word."""
    claim = queue_workflows.current_job().claim
    fd = os.open(Path(folder, "journal"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{word} {claim}\n".encode())
    finally:
        os.close(fd)
    return word


def lines(folder: Path) -> list[tuple[str, int]]:
    """Return the step and the claim of each line of the journal."""
    path = folder / "journal"
    text = path.read_text() if path.exists() else ""
    return [(line.split()[0], int(line.split()[1])) for line in text.splitlines()]


async def write_async(folder: str, word: str) -> str:
    """Do as `write` does, after a turn of the event loop."""
    await asyncio.sleep(0)
    return write(folder, word)


def _may_end(folder: str) -> None:
    if not Path(folder, "go").exists():
        raise RuntimeError("it may not end yet")


def two(*, folder: str) -> dict[str, Any]:
    """Do two steps, and fail after them until the file `go` is there."""
    found = [steps.step("first", write, folder, "first"), steps.step("second", write, folder, "b")]
    _may_end(folder)
    return {"found": found}


async def two_async(*, folder: str) -> dict[str, Any]:
    """Do two steps at once, and fail after them until the file `go` is there."""
    found = await asyncio.gather(
        steps.step_async("first", write_async, folder, "first"),
        steps.step_async("second", write_async, folder, "b"),
    )
    _may_end(folder)
    return {"found": found}


def in_threads(*, folder: str) -> dict[str, Any]:
    """Do steps on other threads, in the context of this one."""

    async def both() -> list[str]:
        calls = [asyncio.to_thread(steps.step, word, write, folder, word) for word in "ab"]
        return await asyncio.gather(*calls)

    return {"found": asyncio.run(both())}


def large(*, folder: str) -> dict[str, Any]:
    """Return the length of a large result, and fail until the file `go` is there."""
    found = steps.step("large", lambda: "x" * LARGE)
    _may_end(folder)
    return {"length": len(found)}


def many(*, folder: str, count: int, pause_s: float) -> dict[str, Any]:
    """Do so many short steps, or fewer if the file `go` is there."""

    def one(number: int) -> int:
        write(folder, str(number))
        time.sleep(pause_s)
        return number

    for number in range(count):
        if Path(folder, "go").exists():
            break
        steps.step("one", one, number, key=number)
    return {}


def epochs(*, folder: str, count: int) -> dict[str, Any]:
    """Do so many epochs; sleep in the middle, or die there if the file `die` is there."""
    for number in steps.steps("epoch", range(count)):
        write(folder, str(number))
        if number == count // 2 and Path(folder, "die").exists():
            while not Path(folder, "now").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        if number == count // 2:
            steps.sleep(1)
    return {}


async def epochs_async(*, folder: str, count: int) -> dict[str, Any]:
    """Do so many epochs, and sleep in the middle."""
    async for number in steps.steps_async("epoch", range(count)):
        write(folder, str(number))
        if number == count // 2:
            await steps.sleep_async(1)
    return {}


def waits(*, folder: str, key: str) -> dict[str, Any]:
    """Wait for the event `go` of this key, between two steps."""
    steps.step("before", write, folder, "before")
    found = steps.wait_for_event("go", key=key)
    return {"found": found, "after": steps.step("after", write, folder, "after")}


async def waits_async(*, folder: str, key: str) -> dict[str, Any]:
    """Do as `waits` does."""
    await steps.step_async("before", write_async, folder, "before")
    found = await steps.wait_for_event_async("go", key=key)
    return {"found": found, "after": await steps.step_async("after", write_async, folder, "after")}


def naps(*, folder: str, seconds: float = 0.5) -> dict[str, Any]:
    """Sleep between two steps."""
    steps.step("before", write, folder, "before")
    steps.sleep(seconds)
    return {"after": steps.step("after", write, folder, "after")}


async def naps_async(*, folder: str, seconds: float = 0.5) -> dict[str, Any]:
    """Do as `naps` does."""
    await steps.step_async("before", write_async, folder, "before")
    await steps.sleep_async(seconds)
    return {"after": await steps.step_async("after", write_async, folder, "after")}


def dies(*, folder: str) -> None:
    """End the process inside of a step."""
    steps.step("fine", write, folder, "fine")
    steps.step("deadly", os.kill, os.getpid(), 9)


def node_two(folder: str) -> dict[str, Any]:
    """Do as `two` does."""
    return two(folder=folder)


async def node_two_async(folder: str) -> dict[str, Any]:
    """Do as `two_async` does."""
    return await two_async(folder=folder)


def node_waits(folder: str, key: str) -> dict[str, Any]:
    """Do as `waits` does."""
    return waits(folder=folder, key=key)


def node_naps(folder: str, seconds: float = 0.5) -> dict[str, Any]:
    """Do as `naps` does."""
    return naps(folder=folder, seconds=seconds)


TASKS = (
    two, two_async, in_threads, large, many, epochs, epochs_async, waits, waits_async, naps,
    naps_async, dies,
)  # fmt: skip
NODES = (node_two, node_two_async, node_waits, node_naps)


def setup() -> None:
    """Register the tasks and nodes."""
    queue_workflows.configure(ingest_queues={QUEUE})
    for task in TASKS:
        queue_workflows.register_ingest_task(task.__name__, task)
    for node in NODES:
        queue_workflows.register_node(node.__name__, node)
