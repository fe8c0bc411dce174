"""Wrap every handler of the soak: take time, and write to the journal under its claim."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from tests.soak import journal

BEAT_S = 0.25
KILLED_S = 60.0
"""How long a handler waits for its own end after it has killed its worker or launcher."""
_held: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("held")
"""The row of the job whose handler runs here; a pool runs several side by side."""


def noting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the claimed job while its handler runs, so that the journal can name the claim."""

    def wrapper(job: dict[str, Any], *args: Any, **more: Any) -> Any:
        _held.set(job)
        return run(job, *args, **more)

    return wrapper


def say(word: str, what: str) -> dict[str, Any]:
    """Write a line about the handler that runs here; what its result records of its claim."""
    job = _held.get()
    journal.write(word, job, what)
    return {"by": job["claim_no"]}


def kill(what: str, *, launcher: bool = False) -> None:
    """Kill the worker of the handler that runs here, or its launcher if there is one."""
    say("start", what)
    worker = journal.worker_pid(_held.get())
    parent = launcher and worker != os.getpid()
    os.kill(os.getppid() if parent else worker, signal.SIGKILL)
    time.sleep(KILLED_S)


def last(seconds: float, what: str, cancel: threading.Event | None = None) -> dict[str, Any]:
    """Return a handler that runs for so long by the clock, even if it is stopped meanwhile."""
    say("start", what)
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and not (cancel and cancel.is_set()):
        time.sleep(min(left, BEAT_S))
        if left > BEAT_S:
            say("beat", what)
    return say("end", what)


def stepwise(seconds: float, what: str) -> Generator[float, None, dict[str, Any]]:
    """Return the same as a generator, which reports its progress."""
    say("start", what)
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(left, BEAT_S))
        if left > BEAT_S:
            say("beat", what)
            yield min(1.0, (time.monotonic() - began) / seconds)
    return say("end", what)


async def last_async(seconds: float, what: str) -> dict[str, Any]:
    """Return the same on an event loop, beside others."""
    async for _ in stepwise_async(seconds, what):
        pass
    return say("end", what)


async def stepwise_async(seconds: float, what: str) -> AsyncGenerator[float, None]:
    """Return `last_async` with a yield at each beat; the caller journals its end."""
    say("start", what)
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(left, BEAT_S))
        if left > BEAT_S:
            say("beat", what)
            yield min(1.0, (time.monotonic() - began) / seconds)
