"""Provide `ClaimWorker`, `WorkerPool` and the command `queue-claim-worker`, which run jobs.

Its length: apps import both classes and the command here. Code that runs jobs is imported late.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from queue_workflows import config, db, errors, gpu_model_cache, workers
from queue_workflows.model_cache import RequiresModels, adapted
from queue_workflows.runtime import app_loading, entry_point, log_context, signals
from queue_workflows.types import ExitFn
from queue_workflows.worker import guards, shapes

if TYPE_CHECKING:  # It imports everything for executors, so it is imported late.
    from queue_workflows.worker import process

budget_for = guards.budget_for


class _Stoppable:
    """A worker that is created when it runs, and that another thread or a signal can stop."""

    def __init__(
        self,
        host: str | None,
        host_priority: int | None,
        lease_s: float,
        shutdown_timeout_s: float | None,
    ) -> None:
        shapes.check_times(lease_s, shutdown_timeout_s)
        self.host = host or config.host_label()
        self.host_priority = config.host_priority() if host_priority is None else host_priority
        self.lease_s = lease_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._worker: process.Worker | None = None
        self._stopped = False

    @contextmanager
    def _running(
        self, launched: process.Launched | None, served: dict[str, shapes.Shape], **more: Any
    ) -> Generator[process.Worker]:
        """Make the worker, and stop it at once if `stop` was called before."""
        from queue_workflows.worker import process

        self._worker = worker = process.Worker(
            launched,
            served,
            host=self.host,
            newest=self.host_priority < 0,
            lease_s=self.lease_s,
            shutdown_timeout_s=self._shutdown_timeout_s,
            **more,
        )
        if self._stopped:
            worker.stop()
        try:
            yield worker
        finally:
            self._worker = None

    def stop(self) -> None:
        """Claim no further job, and hand back jobs that still run after the shutdown timeout.

        It is safe in a signal handler.
        """
        self._stopped = True
        if self._worker is not None:
            self._worker.stop()

    def stop_now(self) -> None:
        """Return the running jobs to their queues at once and exit."""
        self._stopped = True
        if self._worker is not None:
            self._worker.stop_now()


class ClaimWorker(_Stoppable):
    """A worker of one queue with its own worker id.

    `host` and `host_priority` default to the environment's. `model_cache`: any object with
    `require_model(id)`, on the gpu queue by default the process's own. `batch` is how many claimed
    jobs may wait (docs/batches.md), `slots` how many run at once, with `async_jobs` on one event
    loop. With `inline` or `on_exit`, handlers run in this process, which `on_exit` ends if a guard
    fails a job without `slots`. `shutdown_timeout_s` defaults to the knob. Raises `UnknownQueue`
    and `InvalidConfig`.
    """

    def __init__(
        self,
        *,
        queue: str,
        host: str | None = None,
        host_priority: int | None = None,
        lease_s: float = 600,
        model_cache: RequiresModels | None = None,
        batch: int = 1,
        slots: int | None = None,
        async_jobs: bool = False,
        inline: bool = False,
        shutdown_timeout_s: float | None = None,
        on_exit: ExitFn = os._exit,
    ) -> None:
        config.check_queue(queue)
        super().__init__(host, host_priority, lease_s, shutdown_timeout_s)
        self._shape = _shape(queue, batch, slots, async_jobs=async_jobs, inline=inline)
        self._ends_with_job, self._on_exit, self._batch = slots is None, on_exit, batch
        if slots is None and on_exit is not os._exit:
            self._shape = None
        self.queue = queue
        self.model_cache, self._cache = model_cache, adapted(model_cache)
        self._models: Callable[[], RequiresModels | None] = lambda: model_cache
        if queue == "gpu" and model_cache is None:
            self.model_cache = self._cache = gpu_model_cache.gpu_model_cache()
            self._models = gpu_model_cache.gpu_model_cache  # an executor has its own
        self.heartbeat = Heartbeat(lambda: self._worker)
        self.stops_by_signal = False
        """Whether its handlers may block the main thread, and so its signal handlers."""

    def run_once(self) -> bool:
        """Claim one job, run it and record its outcome; return False if there was none."""
        return self._run_inline(once=True)

    def run_forever(self) -> None:
        """Run jobs until `stop`; continue after an outage of the database.

        Handlers run in forked processes. If this process already has threads or has opened a GPU,
        they run here, and it logs a warning. Raises `LauncherLost` (a RuntimeError) if the process
        that forks them has died.
        """
        if self._shape is not None:
            from queue_workflows.worker import process

            launched = process.launch(lambda: None, self._models)
            if launched is not None:
                served, ends = {self.queue: self._shape}, self._ends_with_job
                with self._running(launched, served, ends_with_job=ends) as worker:
                    worker.run_forever()
                if worker.exit_code:
                    self._on_exit(worker.exit_code)
                return
        self._run_inline(once=False)

    def _run_inline(self, *, once: bool) -> bool:
        from queue_workflows.worker import process

        shape = shapes.Shape(1, self._batch, gpu=self._cache is not None)
        inline = process.Inline(self._on_exit, once, self.stops_by_signal)
        with self._running(None, {self.queue: shape}, inline=inline) as worker:
            return worker.run_inline(self._cache)

    @property
    def worker_id(self) -> str | None:
        """Return the worker id while this worker runs, else None."""
        return None if self._worker is None else self._worker.worker_ids[self.queue]

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running jobs to the front of the queue, uncounted; wait until it is recorded.

        A handler that runs in this process cannot be stopped. Then the worker exits with code 77
        after 10 seconds, unless the caller ends it before.
        """
        if self._worker is not None:
            self._worker.requeue(reason)

    def clear_model(self) -> None:
        """Record that this worker's model is unloaded and that its heartbeat has ended."""
        workers.clear_model(self.host, self.queue)


class Heartbeat:
    """The heartbeat of a worker, with the interface of 0.3.0."""

    def __init__(self, running: Callable[[], process.Worker | None]) -> None:
        self._running = running

    def send(self) -> None:
        """Send a heartbeat soon, if the worker runs."""
        if (worker := self._running()) is not None:
            worker.beat()


def _shape(
    queue: str, batch: int, slots: int | None, *, async_jobs: bool, inline: bool
) -> shapes.Shape | None:
    """Return how executors share the jobs, or None without executors; raise `InvalidConfig`."""
    if inline and slots is not None:
        raise errors.InvalidConfig("inline and slots cannot be used together")
    if async_jobs and slots is None:
        raise errors.InvalidConfig("async_jobs needs slots (how many jobs run at once)")
    if batch < 1:
        raise errors.InvalidConfig(f"batch must be 1 or more, not {batch}")
    if inline:
        return None
    count = 1 if slots is None else slots
    shape = shapes.Shape(count, batch, concurrent=async_jobs, gpu=queue == "gpu")
    shapes.check_shape(queue, shape)
    return shape


class WorkerPool(_Stoppable):
    """A worker of several ingest queues that runs jobs at once in executors (docs/pools.md).

    `workers` is a list such as `[{"queue": "load", "concurrency": 2}]` or its JSON text, by default
    WORKERS_JSON. Its queues are added to `ingest_queues`. For the other arguments see
    `ClaimWorker`. Raises `InvalidConfig` (a ValueError) with a line for each wrong entry.
    """

    def __init__(
        self,
        workers: str | Sequence[Mapping[str, Any]] | None = None,
        *,
        host: str | None = None,
        host_priority: int | None = None,
        lease_s: float = 600,
        shutdown_timeout_s: float | None = None,
    ) -> None:
        super().__init__(host, host_priority, lease_s, shutdown_timeout_s)
        if workers is None:
            entries = shapes.option(None)
        elif isinstance(workers, str):
            entries = shapes.parse(workers, "workers")
        else:
            entries = shapes.check([*workers], "workers")
        shapes.add_queues(entries)
        self._served = shapes.shapes_of(entries)

    def run_forever(self) -> None:
        """Run jobs until `stop`, and until the running ones have ended; call it once.

        Raises `InvalidConfig` if this process must not fork because it has threads.
        """
        from queue_workflows.worker import process

        launched = process.launch(lambda: None, is_pool=True)
        with self._running(launched, self._served) as worker:
            worker.run_forever()


def _inline_worker(options: argparse.Namespace) -> ClaimWorker:
    shapes.check_nodes(options.queue, config.get_config().knows_nodes())
    if options.queue == "gpu":
        config.get_config().builtin_model_registrar()
    return ClaimWorker(
        queue=options.queue,
        lease_s=options.lease_seconds,
        inline=True,
        shutdown_timeout_s=options.shutdown_timeout,
    )


def main(argv: list[str] | None = None) -> int:
    """Run `queue-claim-worker` until SIGTERM or SIGINT; return 2 if its settings are refused."""
    arguments = sys.argv[1:] if argv is None else argv
    options = shapes.options_of(arguments)

    def body() -> int:
        entry_point.start(options)
        entry_point.print_by_lines()
        if options.workers is None:
            log_context.set_for_process(queue=options.queue)
        several = options.cards is not None and "," in options.cards
        if options.supervise or several:
            from queue_workflows.worker import parent

            return parent.supervise(options, arguments)
        if options.inline:
            shapes.limits(options)
        else:
            from queue_workflows.worker import process

            if (code := process.serve(options, _serve)) is not None:
                return code
        app_loading.load_app(options.app)
        return _serve(_inline_worker(options))

    return entry_point.run_main("queue-claim-worker", body, debug=options.debug)


def _serve(worker: ClaimWorker | process.Worker) -> int:
    if isinstance(worker, ClaimWorker):
        worker.stops_by_signal = True
    with signals.StopRequest(on_first=worker.stop, on_second=worker.stop_now) as stop:
        if db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            if not isinstance(worker, ClaimWorker):
                log_context.set_for_process(worker=",".join(worker.worker_ids.values()))
            worker.run_forever()
    db.close_pool()
    return 0 if isinstance(worker, ClaimWorker) else worker.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
