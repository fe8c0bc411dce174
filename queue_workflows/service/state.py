"""Hold what requests share, and run the schema, the workers and the upkeep of a service."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

from starlette.requests import Request

from queue_workflows import config, db, errors, history
from queue_workflows.event_export import exporter
from queue_workflows.maintenance import periodic
from queue_workflows.runtime import app_loading, service, signals
from queue_workflows.service import changes
from queue_workflows.service import settings as service_settings
from queue_workflows.worker import parent, shapes

T = TypeVar("T")
STOP_MARGIN_S: Final = 10.0
"""Seconds beyond SHUTDOWN_TIMEOUT_S after which the stop goes on without the processes."""
WORKERS: Final = "workers"
SCHEMA: Final = "schema"
RENDERS: Final = 2
"""Pages that are rendered at once; more would only share the interpreter."""
SCHEMA_RETRY_S: Final = 2.0
"""Seconds between two tries to make the schema, which another process may make meanwhile."""
_log = logging.getLogger("queue_workflows.service")


class Calls:
    """Threads for calls that wait for the database; they start with the first call.

    A caller that is cancelled goes on at once. Its call is dropped if it has not begun, else its
    result is.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None

    async def run(self, call: Callable[..., T], /, *args: Any, **keywords: Any) -> T:
        """Return the result of the function, and raise its errors."""
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
    """The settings, the threads for blocking calls, and the changes that requests wait for.

    While it runs it has the schema, the maintenance, and the workers of its queues. A read-only
    service without queues changes nothing in its database, so it has none of them. If `upkeep` is
    false, other processes do the maintenance.
    """

    def __init__(self, settings: service_settings.Settings, *, upkeep: bool = True) -> None:
        self.settings = settings
        self._upkeep = upkeep and not settings.app_read_only
        self.calls = Calls(settings.pg_pool_size + settings.pg_max_overflow)
        self.reads = Calls(db.PAGE_CONNECTIONS)
        """Threads for the reads of pages."""
        self.renders = Calls(RENDERS)
        """Threads that render pages, for which no database is needed."""
        self.changes = changes.Changes()
        self.started_at = time.monotonic()
        self.stopping = signals.StopRequest()
        """Ends the workers; a second request hurries them."""
        self.problems: dict[str, str] = {}
        """The faults of the processes that it started, by name."""
        self.open_connections: Callable[[], int] = int
        """Return the number of open connections; 0 if the server of an app counts them."""
        self._schema_check: asyncio.Task[int] | None = None
        self._loops: list[service.Service] = []

    def schema_check(self) -> Awaitable[int]:
        """Wait until the database has replied that it has the schema; raise if it has not.

        Requests that wait at the same time share one check. It needs no token, so requests without
        a token must not use up the threads for the others.
        """
        if self._schema_check is None or self._schema_check.done():
            check = self.calls.run(db.wait_for_schema, db.REQUIRED_VERSION, timeout_s=0)
            self._schema_check = asyncio.ensure_future(check)
        return asyncio.shield(self._schema_check)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Load the app that QUEUE_WORKFLOWS_APP names unless one is loaded; run everything.

        Raises `InvalidConfig` for queues without an app that has tasks.
        """
        if config.get_config().app is None and app_loading.load_app(None) is not None:
            service_settings.apply(self.settings)
        service_settings.check_app(self.settings)
        exports = exporter.wanted()
        self.stopping, self.changes = signals.StopRequest(), changes.Changes()
        supervising = service.Thread("service-background", self._supervise)
        running = contextlib.ExitStack()
        running.enter_context(exporter.running(exports))
        running.callback(self._stop, supervising)
        if self.settings.pool or self._upkeep:
            self.problems[SCHEMA] = "the schema is being checked"
            if self.settings.pool:
                self.problems[WORKERS] = "the workers are being started"
            supervising.start()
        try:
            yield
        finally:
            # On a thread, so that clients which still wait for an answer get it meanwhile.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self.changes.close)
            await loop.run_in_executor(None, running.close)
            self.calls.close()
            self.reads.close()
            self.renders.close()

    def _stop(self, supervising: service.Service) -> None:
        if self.stopping.count == 0:
            self.stopping.request()
        for loop in self._loops:
            loop.stop()
        limit_s = config.SHUTDOWN_TIMEOUT_S.read() + STOP_MARGIN_S
        if not supervising.stop(limit_s):
            _log.error("the workers did not stop within %.0f s", limit_s)

    def _supervise(self, _: threading.Event) -> None:
        while not self._has_schema():
            if self.stopping.requested.wait(SCHEMA_RETRY_S):
                return
        settings, app = self.settings, config.get_config().app
        tasks = periodic.PeriodicTasks(
            check_s=lambda: settings.dl_reaper_period_sec,
            lock_keys_s=settings.dl_claim_backoff_sec,
            plans=False,  # An orchestrator has the hooks that it takes.
        )
        prune = service.Task("prune", config.NODE_EVENT_PRUNE_INTERVAL_S.read, history.prune)
        self._loops = [tasks.loop(), service.Loop("prune", [prune])]
        workers = parent.process(
            WORKERS, parent.WORKER,
            "--workers", shapes.as_json(settings.pool),
            "--lease-seconds", f"{settings.dl_default_lease_ttl_sec:g}",
            "--log-level", "debug" if settings.debug else "info",
            "--app", app or "",
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.callback(tasks.close)
            for loop in self._loops:
                stack.enter_context(loop)
            self.problems.pop(SCHEMA, None)
            self.problems.pop(WORKERS, None)
            if not settings.pool:
                self.stopping.requested.wait()
            elif parent.Parent([workers]).run(self.stopping):
                self.problems[WORKERS] = "they refuse to start; the log has the reason"
                _log.error("the workers refuse to start, their own message says why")

    def _has_schema(self) -> bool:
        """Make the schema; return False, and note the reason, if that is not possible now."""
        flag = self.stopping.requested
        try:
            if not db.wait_until_reachable(stopped=flag.is_set, pause=flag.wait):
                return False
            db.bootstrap(stopped=flag.is_set)
        except (errors.QueueWorkflowsError, db.Error) as error:
            reason = str(error).strip() or type(error).__name__
            if not flag.is_set() and self.problems.get(SCHEMA) != reason:
                _log.error("the schema cannot be used: %s", reason)
                self.problems[SCHEMA] = reason
            return False
        return True


def of(request: Request) -> Service:
    """Return the service that serves this request."""
    return request.app.state.service
