"""Call blocking functions of the library from the event loop, on a few threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """Threads for calls that wait for the database; they start with the first call.

    A caller that is cancelled goes on at once. Its call is dropped if it has not begun, else its
    result is.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None

    async def run(self, call: Callable[..., T], /, *args: Any, **keywords: Any) -> T:
        """Return what the function returns, and raise what it raises."""
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(self._threads, "service-call")
        loop = asyncio.get_running_loop()
        # The thread has the id of the request, for its log, and the trace.
        context = contextvars.copy_context()
        return await loop.run_in_executor(
            self._executor, functools.partial(context.run, call, *args, **keywords)
        )

    def close(self) -> None:
        """Let the threads end; a later call starts others."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
