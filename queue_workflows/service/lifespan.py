"""Start the workers, the reaper and the pruning with the application, and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from typing import Final

from queue_workflows import config, db, errors, history
from queue_workflows.event_export import exporter
from queue_workflows.maintenance import periodic
from queue_workflows.runtime import app_loading, service, signals, supervisor
from queue_workflows.service import settings as service_settings
from queue_workflows.service import state
from queue_workflows.worker import parent, shapes

_log = logging.getLogger("queue_workflows.service")
STOP_MARGIN_S: Final = 10.0
"""Seconds beyond SHUTDOWN_TIMEOUT_S after which the stop goes on without the processes."""
WORKERS: Final = "workers"
SCHEMA: Final = "schema"
SCHEMA_RETRY_S: Final = 2.0
"""Seconds between two tries to make the schema, which another process may make meanwhile."""


@contextlib.asynccontextmanager
async def running(own: state.Service) -> AsyncGenerator[None]:
    """Run what the service needs besides its requests, from the start of the block to its end."""
    background = Background(own)
    background.start()
    try:
        yield
    finally:
        # On a thread: what still waits for an answer of the service gets it meanwhile.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, own.changes.close)
        await loop.run_in_executor(None, background.stop)
        own.calls.close()


class Background:
    """The schema, the maintenance, and the workers of the queues that a service has.

    A read-only service without queues changes nothing in its database, so it has none of them.
    """

    def __init__(self, own: state.Service) -> None:
        self._own = own
        self._entries = own.settings.pool
        self._stop = own.stopping = signals.StopRequest()
        self._supervising = service.Pool("service-background", 1, self._run)
        self._loops: list[service.Service] = []
        self._exports = contextlib.ExitStack()

    def start(self) -> None:
        """Load the app that QUEUE_WORKFLOWS_APP names unless one is loaded, and start everything.

        Raises `InvalidConfig` for queues without an app that has tasks.
        """
        settings = self._own.settings
        if config.get_config().app is None and app_loading.load_app(None) is not None:
            service_settings.apply(settings)
        exports = exporter.wanted()
        service_settings.check_app(settings)
        self._exports.enter_context(exporter.running(exports))
        if settings.app_read_only and not self._entries:
            return
        self._own.problems[SCHEMA] = "it is being checked"
        if self._entries:
            self._own.problems[WORKERS] = "they are being started"
        self._supervising.start()

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
        while not self._has_schema():
            if self._stop.requested.wait(SCHEMA_RETRY_S):
                return
        settings, problems = self._own.settings, self._own.problems
        tasks = periodic.PeriodicTasks(
            check_s=lambda: settings.dl_reaper_period_sec,
            lock_keys_s=settings.dl_claim_backoff_sec,
            plans=False,  # An orchestrator has the hooks that it takes.
        )
        prune = service.Task("prune", config.NODE_EVENT_PRUNE_INTERVAL_S.read, history.prune)
        self._loops = [tasks.loop(), service.Loop("prune", [prune])]
        with contextlib.ExitStack() as stack:
            stack.callback(tasks.close)
            for loop in self._loops:
                stack.enter_context(loop)
            problems.pop(SCHEMA, None)
            problems.pop(WORKERS, None)
            if not self._entries:
                self._stop.requested.wait()
            elif parent.Parent([self._worker()]).run(self._stop):
                problems[WORKERS] = "they refuse to start; the log has the reason"
                _log.error("the workers refuse to start, their own message says why")

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

    def _worker(self) -> supervisor.ChildSpec:
        settings = self._own.settings
        return parent.process(
            WORKERS, parent.WORKER,
            "--workers", shapes.as_json(self._entries),
            "--lease-seconds", f"{settings.dl_default_lease_ttl_sec:g}",
            "--log-level", "debug" if settings.debug else "info",
            "--app", config.get_config().app or "",
        )  # fmt: skip
