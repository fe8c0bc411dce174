"""Define an app whose handlers stream: `--app tests.support.stream_app:setup`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import declare, streams

QUEUE = "work"


def _wait(folder: str, word: str) -> None:
    while not Path(folder, word).exists():
        time.sleep(0.01)


def words(*, folder: str, count: int) -> dict[str, Any]:
    """Stream half of the numbers, wait for the file `go`, and stream the others."""
    for number in range(count // 2):
        streams.stream("text", number)
    _wait(folder, "go")
    for number in range(count // 2, count):
        streams.stream("text", number)
    return {"count": count}


async def words_async(*, folder: str, count: int) -> dict[str, Any]:
    """Do as `words` does, on an event loop."""
    for number in range(count // 2):
        await streams.stream_async("text", number)
    while not Path(folder, "go").exists():
        await asyncio.sleep(0.01)
    for number in range(count // 2, count):
        await streams.stream_async("text", number)
    return {"count": count}


def in_turns(*, folder: str) -> dict[str, Any]:
    """Stream a part at once, one that is sent later, and one when the file `go` is there."""
    for number in range(2):
        streams.stream("text", number)
    _wait(folder, "go")
    streams.stream("text", 2)
    return {}


def flood(*, folder: str, least: int) -> dict[str, Any]:
    """Stream as fast as it goes until the file `go` is there; return how many parts there were."""
    count = 0
    while count < least or not Path(folder, "go").exists():
        streams.stream("text", "word")
        count += 1
    return {"count": count}


@declare.node
def talk(folder: str) -> dict[str, Any]:
    """Stream a part, wait for the file `go`, and stream another."""
    return {"word": words(folder=folder, count=2)["count"]}


@declare.workflow
def talking(folder: str) -> Any:
    """One node that streams."""
    return talk(folder)


def setup() -> None:
    """Register the tasks and the workflow."""
    queue_workflows.configure(ingest_queues={QUEUE})
    declare.install(talk, talking)
    for task in (words, words_async, in_turns, flood):
        queue_workflows.register_ingest_task(task.__name__, task)
