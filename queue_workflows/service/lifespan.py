"""Start the workers, the reaper and the pruning with the application, and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import fastapi

from queue_workflows import config, db, errors, history
from queue_workflows.event_export import exporter
from queue_workflows.maintenance import periodic
from queue_workflows.runtime import app_loading, service, signals, supervisor
from queue_workflows.service import process_environment, state
from queue_workflows.worker import parent, shapes

_log = logging.getLogger("queue_workflows.service")
STOP_MARGIN_S: Final = 10.0
"""Seconds beyond SHUTDOWN_TIMEOUT_S after which the stop goes on without the processes."""
WORKERS: Final = "workers"
SCHEMA: Final = "schema"
SCHEMA_RETRY_S: Final = 2.0
"""Seconds between two tries to make the schema, which another process may make meanwhile."""


def of(
    own: state.Service,
) -> Callable[[fastapi.FastAPI], AbstractAsyncContextManager[None]]:
    """Return the lifespan of an application that serves with `own`."""

    @contextlib.asynccontextmanager
    async def run(app: fastapi.FastAPI) -> AsyncGenerator[None]:
        background = Background(own)
        app.state.background = background
        background.start()
        try:
            yield
        finally:
            # On a thread: what still waits for an answer of the service gets it meanwhile.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, own.changes.close)
            await loop.run_in_executor(None, background.stop)
            own.close()

    return run


class Background:
    """The schema, the maintenance, and the workers of the queues that a service has.

    A read-only service without queues changes nothing in its database, so it has none of them.
    """

    def __init__(self, own: state.Service) -> None:
        self._own = own
        self._entries = own.settings.pool
        self._stop = signals.StopRequest()
        self._supervising = service.Pool("service-background", 1, self._run)
        self._loops: list[service.Service] = []
        self._exports = contextlib.ExitStack()

    def start(self) -> None:
        """Load the app that QUEUE_WORKFLOWS_APP names unless one is loaded, and start everything.

        Raises `InvalidConfig` for queues without an app that has tasks.
        """
        settings = self._own.settings
        if config.get_config().app is None and app_loading.load_app(None) is not None:
            process_environment.apply(settings)
        exports = exporter.wanted()
        process_environment.check_app(settings)
        self._exports.enter_context(exporter.running(exports))
        if settings.app_read_only and not self._entries:
            return
        self._own.problems[SCHEMA] = "it is being checked"
        if self._entries:
            self._own.problems[WORKERS] = "they are being started"
        self._supervising.start()

    def request_stop(self) -> None:
        """Let the workers begin to stop; a second call hurries them. Safe in a signal handler."""
        self._stop.request()

    def stop(self) -> None:
        """Stop everything, the workers by SHUTDOWN_TIMEOUT_S."""
        if self._stop.count == 0:
            self._stop.request()
        for loop in self._loops:
            loop.stop()
        self._exports.close()
        limit_s = config.SHUTDOWN_TIMEOUT_S.read() + STOP_MARGIN_S
        if not self._supervising.stop(limit_s):
            _log.error("the workers did not stop within %.0f s", limit_s)

    def _run(self, _: threading.Event) -> None:
        flag = self._stop.requested
        while not self._has_schema():
            if flag.wait(SCHEMA_RETRY_S):
                return
        with contextlib.ExitStack() as stack:
            for loop in self._maintenance(stack):
                self._loops.append(loop)
                stack.enter_context(loop)
            self._own.problems.pop(SCHEMA, None)
            if self._entries:
                self._run_workers()
            else:
                flag.wait()

    def _has_schema(self) -> bool:
        """Make the schema; return False, and note the reason, if that is not possible now."""
        flag = self._stop.requested
        try:
            if not db.wait_until_reachable(stopped=flag.is_set, pause=flag.wait):
                return False
            db.bootstrap(stopped=flag.is_set)
        except (errors.QueueWorkflowsError, db.Error) as error:
            reason = str(error).strip() or type(error).__name__
            if not flag.is_set() and self._own.problems.get(SCHEMA) != reason:
                _log.error("the schema cannot be used: %s", reason)
                self._own.problems[SCHEMA] = reason
            return False
        return True

    def _run_workers(self) -> None:
        self._own.problems.pop(WORKERS, None)
        if parent.Parent([self._spec()]).run(self._stop):
            self._own.problems[WORKERS] = "they refuse to start; the log has the reason"
            _log.error("the workers refuse to start, their own message says why")

    def _maintenance(self, stack: contextlib.ExitStack) -> list[service.Service]:
        settings = self._own.settings
        tasks = periodic.PeriodicTasks(
            check_s=lambda: settings.dl_reaper_period_sec,
            lock_keys_s=settings.dl_claim_backoff_sec,
            plans=False,  # An orchestrator has the hooks that it takes.
        )
        stack.callback(tasks.close)
        prune = service.Task("prune", config.NODE_EVENT_PRUNE_INTERVAL_S.read, history.prune)
        return [tasks.loop(), service.Loop("prune", [prune])]

    def _spec(self) -> supervisor.ChildSpec:
        settings = self._own.settings
        arguments = ["--workers", shapes.as_json(self._entries)]
        arguments += ["--lease-seconds", f"{settings.dl_default_lease_ttl_sec:g}"]
        arguments += ["--log-level", "debug" if settings.debug else "info"]
        arguments += ["--app", config.get_config().app or ""]
        return parent.process(WORKERS, parent.WORKER, *arguments)
