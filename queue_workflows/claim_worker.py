"""Provide `ClaimWorker`, `WorkerPool` and the command `queue-claim-worker`, which run jobs.

Its length: apps import both classes and the command from here. What executors need is imported
late, by `worker.slot_start`: `run_once` and batches have none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from queue_workflows import config, db, errors, gpu_model_cache, model_registry
from queue_workflows.engine import claims, workers
from queue_workflows.model_cache import RequiresModels, adapted
from queue_workflows.runtime import (
    app_loading,
    clock,
    entry_point,
    identity,
    log_context,
    printed_lines,
    signals,
)
from queue_workflows.types import ExitFn
from queue_workflows.worker import (
    command_line,
    executor_shape,
    gpu_runtime,
    job_guards,
    lease_keeper,
    loop,
    settings,
    slot,
)

if TYPE_CHECKING:  # `slot_start`, which has all that executors need, is late.
    from queue_workflows.worker import slot_worker

budget_for = job_guards.budget_for


class ClaimWorker:
    """A worker of one queue under an identity of its own.

    `host` and `host_priority` default to those of the environment. `lease_s`: seconds.
    `model_cache`: any object with `require_model(id)`; default: the cache of the process on the gpu
    queue. `batch`: ingest jobs per claim. `slots`: jobs at once, see docs/workers.md; `async_jobs`:
    on one event loop. `inline`: handlers run in this process; so do those of a `batch`, and of a
    worker with an `on_exit`, which ends the process when a guard fails a job without `slots`.
    `shutdown_timeout_s`: default SHUTDOWN_TIMEOUT_S. Raises `UnknownQueue` and `InvalidConfig`.
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
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        config.check_queue(queue)
        settings.check_times(lease_s, shutdown_timeout_s)
        self._shape = _shape(queue, batch, slots, async_jobs=async_jobs, inline=inline)
        self._ends_with_job, self._on_exit = slots is None, on_exit
        if slots is None and on_exit is not os._exit:
            self._shape = None
        self._worker_id: str | None = None
        self._slot_worker: slot_worker.SlotWorker | None = None
        self._shutdown_timeout_s = shutdown_timeout_s
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self.queue, self.host, self.host_priority, self.lease_s = queue, label, priority, lease_s
        self._pid = os.getpid()
        self._base = claims.Claimant(
            identity.new_worker_id(label),
            label,
            queue,
            lease_s,
            newest=priority < 0,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self.model_cache, self._cache = model_cache, adapted(model_cache)
        self._models: Callable[[], RequiresModels | None] = lambda: model_cache
        if queue == "gpu" and model_cache is None:
            self.model_cache = self._cache = gpu_model_cache.gpu_model_cache()
            self._models = gpu_model_cache.gpu_model_cache  # an executor has its own
        self._metrics = settings.sampler(label, lambda: self._keeper.wake("metrics"))
        own = slot.Slot(self._claimant)
        self._keeper = lease_keeper.LeaseKeeper(
            [own],
            metrics=self._metrics,
            model_cache=self._cache,
            known_models=self._known_models,
            on_exit=on_exit,
        )
        self.heartbeat, self._switch = self._keeper.heartbeat, self._keeper.switches[0]
        if self._cache is not None:
            self._cache.set_publisher(lambda _: self._keeper.wake("beat"))
        self._loop = loop.WorkLoop(
            queue,
            own,
            self._keeper,
            model_cache=self._cache,
            batch_size=1 if queue in config.DAG_QUEUES else batch,
        )

    @property
    def worker_id(self) -> str:
        """Return the identity under which this worker claims; it changes in `run_forever`."""
        return self._worker_id or self._base.worker_id

    def _known_models(self) -> list[str] | None:
        return list(model_registry.known_ids()) or None if self._cache is not None else None

    def _claimant(self) -> claims.Claimant:
        base = self._base
        if base.queue in config.DAG_QUEUES and config.get_config().node_versions:
            base = base._replace(versions=config.node_version_keys())
        if self._cache is None:
            return base
        return gpu_runtime.claimant(base, self._cache.current_model, self._known_models())

    def run_once(self) -> bool:
        """Claim one job, run it and record its outcome; return False if there was none."""
        with self._working():
            return self._loop.run_once()

    def run_forever(self) -> None:
        """Run jobs until `stop`; continue after an outage of the database.

        Handlers run in processes that this forks, but those of batches. If this process has threads
        already, or a GPU open, they run here, and it logs a warning. Raises `LauncherLost` and
        `ForkRefused` (RuntimeErrors) if there are no processes for handlers any more.
        """
        if self._shape is not None:
            from queue_workflows.worker import slot_start

            worker = slot_start.of_queue(
                self._base,
                self._shape,
                self._shutdown_timeout_s,
                models=self._models,
                ends_with_job=self._ends_with_job,
            )
            if worker is not None:
                self._run_slots(worker)
                return
        with self._working(), self._metrics or nullcontext():
            self._loop.run_forever()

    def _run_slots(self, worker: slot_worker.SlotWorker) -> None:
        from queue_workflows.worker import slot_start

        self._slot_worker, self._worker_id = worker, worker.worker_ids[self.queue]
        self.heartbeat, self._switch = worker.keeper.heartbeat, worker.keeper.switches[0]
        if self._loop.stopping:
            worker.stop()
        code = slot_start.run(worker)
        self._worker_id = None
        if code:
            self._on_exit(code)

    @contextmanager
    def _working(self) -> Generator[None]:
        if os.getpid() != self._pid:
            # After a fork: each process needs an identity of its own, or two would share claims.
            self._pid = os.getpid()
            self._base = self._base._replace(worker_id=identity.new_worker_id(self._base.host))
        try:
            with self._keeper.running():
                yield
        finally:
            self._loop.close()

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running jobs to the front of the queue, uncounted; stop policies call it."""
        self._switch.requeue_inflight_for_control(reason)

    def clear_model(self) -> None:
        """Record that this worker's model is unloaded and that its heartbeat has ended."""
        with db.transaction() as conn:
            workers.clear_model(conn, self.host, self.queue, mark_stale=True)

    def stop(self) -> None:
        """Take no further job; one that runs gets the shutdown timeout, then it is given back.

        Safe in a signal handler.
        """
        self._keeper.stop_by(clock.boot_s() + settings.shutdown_s(self._shutdown_timeout_s))
        self._loop.stop()
        if self._slot_worker is not None:
            self._slot_worker.stop()

    def stop_now(self) -> None:
        """Return the running job to the queue at once and exit."""
        self._keeper.stop_by(clock.boot_s())
        self._loop.stop()
        if self._slot_worker is not None:
            self._slot_worker.stop_now()


def _shape(
    queue: str, batch: int, slots: int | None, *, async_jobs: bool, inline: bool
) -> executor_shape.Shape | None:
    """Return how executors share the jobs, or None for none; raise `InvalidConfig`."""
    if inline and slots is not None:
        raise errors.InvalidConfig("inline and slots cannot be used together")
    if async_jobs and slots is None:
        raise errors.InvalidConfig("async_jobs needs slots (how many jobs run at once)")
    if batch < 1 or (batch > 1 and queue in config.DAG_QUEUES and slots is None):
        raise errors.InvalidConfig(
            f"a batch of {batch} on queue {queue} is refused: a batch has at least 1 job, and more "
            "than 1 node only with slots"
        )
    if inline or (batch > 1 and slots is None):
        return None
    count = 1 if slots is None else slots
    shape = executor_shape.Shape(count, batch, concurrent=async_jobs, gpu=queue == "gpu")
    executor_shape.check(queue, shape)
    return shape


class WorkerPool:
    """Several jobs at once of several ingest queues, in executors: see docs/jobs.md.

    `workers`: `[{"queue": "load", "concurrency": 2}]` or its JSON text; default WORKERS_JSON. Its
    queues are added to `ingest_queues`. The other arguments are those of `ClaimWorker`. Raises
    `InvalidConfig` (a ValueError) with a line for each wrong entry.
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
        from queue_workflows.worker import slot_start

        settings.check_times(lease_s, shutdown_timeout_s)
        self._entries = slot_start.pool_entries(workers)
        self._host = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self._newest = priority < 0
        self._lease_s = lease_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._worker: slot_worker.SlotWorker | None = None
        self._stopping = False

    def run_forever(self) -> None:
        """Run jobs until `stop`, and until the running ones have ended; call it once.

        Raises `InvalidConfig` where this process must not fork, as it has threads.
        """
        from queue_workflows.worker import slot_start

        self._worker = worker = slot_start.of_pool(
            self._entries,
            host=self._host,
            newest=self._newest,
            lease_s=self._lease_s,
            shutdown_timeout_s=self._shutdown_timeout_s,
        )
        if self._stopping:
            worker.stop()
        worker.run_forever()

    def stop(self) -> None:
        """Take no further job; those that run get the shutdown timeout, then they are given back.

        Safe in a signal handler.
        """
        self._stopping = True
        if self._worker is not None:
            self._worker.stop()

    def stop_now(self) -> None:
        """Return the running jobs to their queues at once and leave."""
        self._stopping = True
        if self._worker is not None:
            self._worker.stop_now()


def _inline_worker(options: argparse.Namespace) -> ClaimWorker:
    settings.check_nodes(options.queue, config.get_config().knows_nodes())
    if options.queue == "gpu":
        config.get_config().builtin_model_registrar()
    return ClaimWorker(
        queue=options.queue,
        lease_s=options.lease_seconds,
        batch=_batch(options),
        inline=True,
        shutdown_timeout_s=options.shutdown_timeout,
    )


def _batch(options: argparse.Namespace) -> int:
    """Return the batch of a worker whose handlers run in this process: nodes have none."""
    of_slots = options.slots is not None and options.queue in config.DAG_QUEUES
    return 1 if of_slots else options.batch


def main(argv: list[str] | None = None) -> int:
    """Run `queue-claim-worker` until SIGTERM or SIGINT; return 2 for a worker that cannot work."""
    arguments = sys.argv[1:] if argv is None else argv
    options = command_line.parser().parse_args(arguments)

    def body() -> int:
        entry_point.start(options)
        entry_point.print_by_lines()
        log_context.set_for_process(queue=options.queue)
        several = options.cards is not None and "," in options.cards
        if options.supervise or several:
            from queue_workflows.worker import parent

            return parent.supervise_options(options, arguments)
        if command_line.is_inline(options):
            command_line.limits(options)
        else:
            from queue_workflows.worker import slot_start

            if (code := slot_start.serve(options, _serve)) is not None:
                return code
        printed_lines.install()
        app_loading.load_app(options.app)
        try:
            return _serve(_inline_worker(options))
        finally:
            printed_lines.end()

    return entry_point.run_main("queue-claim-worker", body, debug=options.debug)


def _serve(worker: ClaimWorker | slot_worker.SlotWorker) -> int:
    request = signals.StopRequest(
        on_first=worker.stop, on_second=worker.stop_now, signal_thread=True
    )
    with request as stop:
        if db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            plain = isinstance(worker, ClaimWorker)
            names = [worker.worker_id] if plain else [*worker.worker_ids.values()]
            log_context.set_for_process(worker=",".join(names))
            worker.run_forever()
    code = 0
    if not isinstance(worker, ClaimWorker):
        worker.close()
        code = worker.exit_code
    db.close_pool()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
