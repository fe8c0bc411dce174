"""Report which handler blocks the event loop of an executor, and with it all other jobs."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from queue_workflows.runtime import service

BLOCKED_S: Final = 1.0
"""Seconds without a turn of the loop after which its handler is named."""
CHECK_S: Final = 0.25


class LoopWatch:
    """Ask the event loop for a turn again and again while jobs run, on a thread of its own.

    `warn` is called on that thread with the job whose task runs, or None if it is unknown, the
    seconds, and the place in the code; once for each time that the loop is blocked.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        job: contextvars.ContextVar[int],
        warn: Callable[[int | None, float, str], object],
        is_busy: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._job = job
        self._warn = warn
        self._is_busy = is_busy
        self._asked_at: float | None = None
        self._warned = False
        self._thread = threading.get_ident()
        self._jobs = weakref.WeakKeyDictionary[Any, int]()
        """The jobs of tasks: no version of Python below 3.12 shows the context of a task."""
        self._watch = service.Loop(
            "executor-watch", [service.Task("watch", self._pause, self._check)]
        )
        self._make: Any = loop.get_task_factory()
        loop.set_task_factory(self._create)

    def start(self) -> None:
        """Watch from now on; the calling thread runs the loop."""
        self._thread = threading.get_ident()
        self._watch.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._watch.stop()

    def wake(self) -> None:
        """Note that a job runs."""
        self._watch.wake("watch")

    def note(self, key: int) -> None:
        """Note that the running task is one of this job."""
        self._jobs[asyncio.current_task()] = key

    def _create(
        self, loop: asyncio.AbstractEventLoop, handler: Any, **more: Any
    ) -> asyncio.Task[Any]:
        task = self._make(loop, handler, **more)
        context: contextvars.Context | None = more.get("context")
        key = self._job.get() if context is None else context.get(self._job, 0)
        if key:
            self._jobs[task] = key
        return task

    def _pause(self) -> float:
        return CHECK_S if self._is_busy() else 3600.0

    def _check(self) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            if self._is_busy():
                self._asked_at, self._warned = time.monotonic(), False
                self._loop.call_soon_threadsafe(self._answer)
            return
        blocked_s = time.monotonic() - asked_at
        if blocked_s >= BLOCKED_S and not self._warned:
            self._warned = True
            task = asyncio.current_task(self._loop)
            key = None if task is None else self._jobs.get(task)
            self._warn(key, blocked_s, self._place())

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _answer(self) -> None:
        self._asked_at = None
