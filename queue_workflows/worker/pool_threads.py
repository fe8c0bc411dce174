"""Run the handlers of a pool: async ones on one event loop, all others on reused threads."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from queue_workflows import config, ingest_executor, tasks
from queue_workflows.engine import outcomes
from queue_workflows.runtime import service
from queue_workflows.tasks import async_handlers
from queue_workflows.worker import current_job, shutdown

STOP_S = 5.0

Ended: TypeAlias = Callable[[current_job.Work, outcomes.Outcome], object]
_Handler: TypeAlias = Callable[[], Coroutine[None, None, None]]


class HandlerThreads:
    """Run one handler for each `start`, then call `ended` on its thread.

    `begin` is called on that thread too, right before the handler.
    """

    def __init__(self, begin: Callable[[current_job.Work], object], ended: Ended) -> None:
        self._begin = begin
        self._ended = ended
        self._pid = os.getpid()
        self._threads = _Threads(self._run)
        self._loop = _EventLoop()

    def start(self, work: current_job.Work) -> None:
        """Start the handler of this job; call it from one thread only."""
        self._pid = os.getpid()
        task = config.get_config().ingest_task_map.get(work.job["task_name"])
        if task is not None and tasks.is_async(task):
            self._loop.spawn(lambda: self._run_async(work))
        else:
            self._threads.submit(work)

    def stop(self) -> None:
        """Let the threads end; no handler may run any more."""
        self._threads.stop()
        self._loop.stop()

    def _run(self, work: current_job.Work, idle: Callable[[], object]) -> None:
        current_job.current.set(work)
        self._begin(work)
        started = time.monotonic()
        try:
            outcome = ingest_executor.run_task(work.job, work)
        except KeyboardInterrupt as error:
            # Python interrupts only the main thread, so the handler raised it itself.
            outcome = _failed(work, error, started)
        shutdown.exit_if_forked(self._pid, outcome)
        idle()
        self._ended(work, outcome)

    async def _run_async(self, work: current_job.Work) -> None:
        started = time.monotonic()
        current_job.current.set(work)
        self._begin(work)
        try:
            outcome = await ingest_executor.run_task_async(work.job, work)
        except KeyboardInterrupt as error:
            outcome = _failed(work, error, started)
        shutdown.exit_if_forked(self._pid, outcome)
        self._ended(work, outcome)


def _failed(work: current_job.Work, error: BaseException, started: float) -> outcomes.Outcome:
    seconds = time.monotonic() - started
    return outcomes.of_error(error, seconds, f"task {work.job['task_name']}")


class _Threads:
    """Reused threads, as many as handlers have run at once; they live as long as the pool."""

    def __init__(self, run: Callable[[current_job.Work, Callable[[], object]], object]) -> None:
        self._run = run
        self._todo: queue.SimpleQueue[current_job.Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._pools: list[service.Pool] = []

    def submit(self, work: current_job.Work) -> None:
        with self._lock:
            grows = self._idle == 0
            self._idle -= not grows
        if grows:
            name = f"worker-handler-{len(self._pools) + 1}"
            self._pools.append(service.Pool(name, 1, lambda _: self._serve()))
            self._pools[-1].start()
        self._todo.put(work)

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            # Context variables that a handler sets must not reach the next one.
            contextvars.copy_context().run(self._run, work, self._is_idle)

    def _is_idle(self) -> None:
        with self._lock:
            self._idle += 1

    def stop(self) -> None:
        for _ in self._pools:
            self._todo.put(None)
        for pool in self._pools:
            pool.stop(STOP_S)


class _EventLoop:
    """One event loop on its own thread, started for the first async handler."""

    def __init__(self) -> None:
        self._pool: service.Pool | None = None
        self._loop: async_handlers.Loop | None = None

    def spawn(self, body: _Handler) -> None:
        if self._loop is None:
            self._loop = loop = async_handlers.Loop()
            self._pool = service.Pool("worker-async", 1, lambda _: loop.serve())
            self._pool.start()
        self._loop.spawn(body)

    def stop(self) -> None:
        if self._pool is not None and self._loop is not None:
            self._loop.end()
            self._pool.stop(STOP_S)
