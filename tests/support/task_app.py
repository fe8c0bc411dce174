"""Define an app with tasks of every kind: `--app tests.support.task_app:setup`.

Each adds lines to `<folder>/journal`, works until the file `<folder>/go` is there, and says when it
tidies up. `KINDS` are their names.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import queue_workflows

KINDS = ("function", "generator", "async", "async_generator")
ENDS_BY_ITSELF = KINDS[1:]
"""Those that a worker can end without exiting."""
QUEUE = "work"
PAUSE_S = 0.01


def journal(folder: str, word: str) -> None:
    """Add a line, in one write."""
    fd = os.open(Path(folder) / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{word}\n".encode())
    finally:
        os.close(fd)


def lines(folder: Path) -> list[str]:
    """Return the lines of the journal."""
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def _may_end(folder: str) -> bool:
    return (Path(folder) / "go").exists()


def function(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    journal(args["folder"], "function begins")
    while not _may_end(args["folder"]):
        time.sleep(PAUSE_S)
    return {"kind": "function"}


def generator(*, folder: str) -> Generator[Any, None, dict[str, Any]]:
    journal(folder, "generator begins")
    try:
        while not _may_end(folder):
            yield "at work"
            time.sleep(PAUSE_S)
    finally:
        journal(folder, "generator tidies")
    return {"kind": "generator"}


async def coroutine(args: dict[str, Any]) -> dict[str, Any]:
    journal(args["folder"], "async begins")
    try:
        while not _may_end(args["folder"]):
            queue_workflows.current_job().report("at work")
            await asyncio.sleep(PAUSE_S)
    finally:
        await asyncio.sleep(0)
        journal(args["folder"], "async tidies")
    return {"kind": "async"}


async def async_generator(*, folder: str) -> AsyncGenerator[Any, None]:
    journal(folder, "async_generator begins")
    try:
        while not _may_end(folder):
            yield "at work"
            await asyncio.sleep(PAUSE_S)
    finally:
        await asyncio.sleep(0)
        journal(folder, "async_generator tidies")
    queue_workflows.current_job().set_result({"kind": "async_generator"})


async def named(*, folder: str) -> dict[str, Any]:
    """Return the id of the job that runs here, once the file `go` is there."""
    journal(folder, "named begins")
    while not _may_end(folder):
        await asyncio.sleep(PAUSE_S)
    return {"job": queue_workflows.current_job().id}


def setup() -> None:
    """Register the tasks."""
    queue_workflows.configure(ingest_queues={QUEUE})
    for kind, task in zip(KINDS, (function, generator, coroutine, async_generator), strict=True):
        queue_workflows.register_ingest_task(kind, task)
    queue_workflows.register_ingest_task("named", named)
