"""Run handlers that are not async one by one, on one thread of an executor for async jobs."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from queue_workflows.runtime import service
from queue_workflows.tasks import handlers

STOP_S: Final = 1.0
Call = Callable[[handlers.Runner], object]


class SyncThread:
    """Run calls one after the other, in the order in which they came; started by the first one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Call]] = deque()
        self._changed = threading.Condition()
        self._pool: service.Pool | None = None
        self._over = False

    def put(self, key: int, call: Call) -> None:
        """Let a call of the job `key` wait for its turn. It must raise nothing.

        Raises RuntimeError if the thread cannot be started.
        """
        with self._changed:
            if self._pool is None:
                pool = service.Pool("executor-sync", 1, lambda _: self._serve())
                pool.start()
                self._pool = pool
            self._waiting.append((key, call))
            self._changed.notify()

    def take_back(self, is_meant: Callable[[int], bool]) -> list[int]:
        """Remove the calls of these jobs that have not begun; return their keys."""
        with self._changed:
            taken = [each for each in self._waiting if is_meant(each[0])]
            for each in taken:
                self._waiting.remove(each)
        return [key for key, _ in taken]

    def _serve(self) -> None:
        # A thread that blocks all signals starts this one. Programs that a handler executes would
        # inherit that, and SIGTERM would not end them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Threads that a handler starts take this over; they are to end before the process does.
        threading.current_thread()._daemonic = False  # pyright: ignore
        runner = handlers.Runner()
        try:
            while (call := self._next()) is not None:
                # Context variables that a handler sets must not reach the next one.
                contextvars.copy_context().run(call, runner)
        finally:
            runner.close()

    def _next(self) -> Call | None:
        with self._changed:
            while not self._waiting and not self._over:
                self._changed.wait()
            return None if self._over else self._waiting.popleft()[1]

    def stop(self) -> None:
        """Let the thread end after the call that runs."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._pool is not None:
            self._pool.stop(STOP_S)
