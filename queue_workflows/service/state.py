"""Hold what a service's requests share: settings, call threads, change feed and schema check."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request

from queue_workflows import db
from queue_workflows.runtime import signals
from queue_workflows.service import changes
from queue_workflows.service import settings as service_settings

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


class Service:
    """The settings, the threads for blocking calls, and the changes that requests wait for."""

    def __init__(self, settings: service_settings.Settings) -> None:
        self.settings = settings
        self.calls = Calls(settings.pg_pool_size + settings.pg_max_overflow)
        self.changes = changes.Changes()
        self.started_at = time.monotonic()
        self.stopping = signals.StopRequest()
        """Ends the workers; a second request hurries them."""
        self.problems: dict[str, str] = {}
        """What is wrong with the processes that the lifespan started, by name."""
        self.open_connections: Callable[[], int] = int
        """Return the number of open connections; 0 if the server of an app counts them."""
        self._schema_check: asyncio.Task[int] | None = None

    def schema_check(self) -> Awaitable[int]:
        """Wait until the database has replied that it has the schema; raise if it has not.

        Requests that wait at the same time share one check. Anybody may ask, without a token, and
        must not take the threads of those who have one.
        """
        if self._schema_check is None or self._schema_check.done():
            check = self.calls.run(db.wait_for_schema, db.REQUIRED_VERSION, timeout_s=0)
            self._schema_check = asyncio.ensure_future(check)
        return asyncio.shield(self._schema_check)


def of(request: Request) -> Service:
    """Return the service that serves this request."""
    return request.app.state.service
