"""Run a worker process: for one queue, or as a pool of several."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from queue_workflows import config, db, errors, gpu_model_cache, hw_metrics, model_registry
from queue_workflows.engine import claims
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
    cards,
    command_line,
    gpu_runtime,
    job_guards,
    lease_keeper,
    loop,
    slot,
)

if TYPE_CHECKING:  # A plain worker needs none of them: what uses one imports it.
    from queue_workflows.worker import executor_set, pool_config, slot_worker

_log = logging.getLogger("queue_workflows.claim_worker")
budget_for = job_guards.budget_for
MAX_LEASE_S = 30 * 86400.0
"""A longer lease would keep a dead worker's job for a month."""


class ClaimWorker:
    """A worker of one queue under an identity of its own.

    `host` and `host_priority` default to those of the environment. `lease_s`: seconds.
    `model_cache`: any object with `require_model(id)`; default: the cache of the process on the gpu
    queue. `batch`: ingest jobs per claim. `slots`: jobs at once, see docs/workers.md; `async_jobs`:
    on one event loop. `shutdown_timeout_s` defaults to SHUTDOWN_TIMEOUT_S.
    `on_exit` ends the process when a guard fails a job. Raises `UnknownQueue` and `InvalidConfig`
    (both ValueErrors).
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
        shutdown_timeout_s: float | None = None,
        on_exit: ExitFn = os._exit,
    ) -> None:
        config.check_queue(queue)
        _check_times(lease_s, shutdown_timeout_s)
        self._shape: executor_set.Shape | None = None
        if slots is not None:
            from queue_workflows.worker import executor_set, slot_worker

            self._shape = executor_set.Shape(slots, batch, concurrent=async_jobs)
            slot_worker.check(queue, self._shape)
        elif async_jobs:
            raise errors.InvalidConfig("async_jobs: with slots, the number of jobs at once")
        self._slot_worker: slot_worker.SlotWorker | None = None
        if batch < 1 or (batch > 1 and queue in config.DAG_QUEUES and slots is None):
            raise errors.InvalidConfig(
                f"batch of {batch} on queue {queue}: at least 1; more for nodes only with slots"
            )
        self._shutdown_timeout_s = shutdown_timeout_s
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self._pid = os.getpid()
        self._base = claims.Claimant(
            identity.new_worker_id(label),
            label,
            queue,
            lease_s,
            newest=priority < 0,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self._cache = adapted(model_cache)
        if queue == "gpu" and model_cache is None:
            self._cache = gpu_model_cache.gpu_model_cache()
        self._metrics = _sampler(label, lambda: self._keeper.wake("metrics"))
        own = slot.Slot(self._claimant)
        self._keeper = lease_keeper.LeaseKeeper(
            [own],
            metrics=self._metrics,
            model_cache=self._cache,
            known_models=self._known_models,
            on_exit=on_exit,
        )
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
        """Return the identity under which this worker claims."""
        return self._base.worker_id

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
        """Run jobs until `stop`; continue after an outage of the database."""
        if self._shape is not None:
            from queue_workflows.worker import slot_worker

            if (launched := slot_worker.launch(lambda: None)) is not None:
                self._run_slots(launched, self._shape)
                return
        with self._working(), self._metrics or nullcontext():
            self._loop.run_forever()

    def _run_slots(self, launched: slot_worker.Launched, shape: executor_set.Shape) -> None:
        from queue_workflows.worker import slot_worker

        who = self._base
        self._slot_worker = worker = slot_worker.SlotWorker(
            launched,
            {who.queue: shape},
            host=who.host,
            newest=who.newest,
            lease_s=who.lease_s,
            shutdown_s=lambda: _shutdown_s(self._shutdown_timeout_s),
            metrics=lambda ready: _sampler(who.host, ready),
        )
        self._base = who._replace(worker_id=worker.worker_ids[who.queue])
        if self._loop.stopping:
            worker.stop()
        worker.run_forever()

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

    def stop(self) -> None:
        """Take no further job; one that runs gets the shutdown timeout, then it is given back.

        Safe in a signal handler.
        """
        self._keeper.stop_by(clock.boot_s() + _shutdown_s(self._shutdown_timeout_s))
        self._loop.stop()
        if self._slot_worker is not None:
            self._slot_worker.stop()

    def stop_now(self) -> None:
        """Return the running job to the queue at once and exit."""
        self._keeper.stop_by(clock.boot_s())
        self._loop.stop()
        if self._slot_worker is not None:
            self._slot_worker.stop_now()


def _sampler(host: str, ready: Callable[[], object]) -> hw_metrics.Sampler | None:
    """Return the sampler of the machine, or None if samples are switched off."""
    return None if config.DISABLE_HW_METRICS.read() else hw_metrics.Sampler(host, ready=ready)


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
        from queue_workflows.worker import pool_config

        _check_times(lease_s, shutdown_timeout_s)
        if isinstance(workers, str):
            entries = pool_config.parse(workers, "workers")
        elif workers is not None:
            entries = pool_config.check([*workers], "workers")
        else:
            entries = pool_config.parse(config.WORKERS_JSON.read(), "WORKERS_JSON")
        pool_config.add_queues(entries)
        self._entries = entries
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
        from queue_workflows.worker import pool_config, slot_worker

        launched = slot_worker.launch_or_refuse(lambda: None)
        self._worker = worker = slot_worker.SlotWorker(
            launched,
            pool_config.shapes(self._entries),
            host=self._host,
            newest=self._newest,
            lease_s=self._lease_s,
            shutdown_s=lambda: _shutdown_s(self._shutdown_timeout_s),
            metrics=lambda ready: _sampler(self._host, ready),
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


def _check_times(lease_s: float, shutdown_timeout_s: float | None) -> None:
    if not 0 < lease_s <= MAX_LEASE_S:
        raise errors.InvalidConfig(
            f"lease of {lease_s} s: it must be positive and at most {MAX_LEASE_S:g}"
        )
    if shutdown_timeout_s is not None and not 0 <= shutdown_timeout_s <= MAX_LEASE_S:
        raise errors.InvalidConfig(
            f"shutdown timeout of {shutdown_timeout_s} s: it must not be negative"
        )


def _shutdown_s(timeout_s: float | None) -> float:
    return config.SHUTDOWN_TIMEOUT_S.read() if timeout_s is None else timeout_s


def _slot_worker(options: argparse.Namespace) -> slot_worker.SlotWorker | None:
    """Return a worker with slots, or None if its handlers have to run in this process."""
    if command_line.is_plain(options):
        return None
    from queue_workflows.worker import pool_config, slot_worker

    limits = command_line.limits(options)
    if options.queue is not None and options.slots is None and options.cards is None:
        return None
    _check_times(options.lease_seconds, options.shutdown_timeout)
    if options.queue is None:
        entries = pool_config.option(options.workers)
        shapes = pool_config.shapes(entries)
        launched = slot_worker.launch_or_refuse(lambda: _load_for_pool(options.app, entries))
    else:
        shape = command_line.shape(options)
        shapes = {options.queue: shape}
        launched = _launch(options.app, shape)
        if launched is None:
            return None
        try:
            _check_app(options.queue, launched.registered.knows_nodes)
        except BaseException:
            launched.launcher.close()
            raise
    label = config.host_label()
    return slot_worker.SlotWorker(
        launched,
        shapes,
        host=label,
        newest=config.host_priority() < 0,
        lease_s=options.lease_seconds,
        shutdown_s=lambda: _shutdown_s(options.shutdown_timeout),
        limits=limits,
        metrics=lambda ready: _sampler(label, ready),
    )


def _launch(app: str | None, shape: executor_set.Shape) -> slot_worker.Launched | None:
    from queue_workflows.worker import slot_worker

    if shape.card is None:
        return slot_worker.launch(lambda: app_loading.load_app(app))
    # Before the app is loaded: a library may read them only once.
    os.environ.update(cards.environment(shape.card))
    return slot_worker.launch(lambda: _load_with_models(app), gpu_model_cache.gpu_model_cache)


def _load_for_pool(app: str | None, entries: Sequence[pool_config.Entry]) -> None:
    from queue_workflows.worker import pool_config

    app_loading.load_app(app)
    pool_config.add_queues(entries)


def _load_with_models(app: str | None) -> None:
    app_loading.load_app(app)
    config.get_config().builtin_model_registrar()


def _worker(options: argparse.Namespace) -> ClaimWorker:
    _check_app(options.queue, config.get_config().knows_nodes())
    if options.queue == "gpu":
        config.get_config().builtin_model_registrar()
    return ClaimWorker(
        queue=options.queue,
        lease_s=options.lease_seconds,
        batch=_batch(options),
        shutdown_timeout_s=options.shutdown_timeout,
    )


def _batch(options: argparse.Namespace) -> int:
    """Return the batch of a worker whose handlers run in this process: nodes have none."""
    of_slots = options.slots is not None and options.queue in config.DAG_QUEUES
    return 1 if of_slots else options.batch


def _check_app(queue: str, knows_nodes: bool) -> None:
    config.check_queue(queue)
    if queue in config.DAG_QUEUES and not knows_nodes:
        raise errors.InvalidConfig(
            f"a {queue} worker that knows no node would fail every job: name the app with "
            "--app or QUEUE_WORKFLOWS_APP; it sets a node package or resolver, or registers nodes"
        )


def main(argv: list[str] | None = None) -> int:
    """Run `queue-claim-worker` until SIGTERM or SIGINT; return 2 for a worker that cannot work."""
    arguments = sys.argv[1:] if argv is None else argv
    options = command_line.parser().parse_args(arguments)

    def body() -> int:
        entry_point.setup_logging(options.log_level, options.log_format)
        entry_point.print_by_lines()
        log_context.set_for_process(queue=options.queue)
        if options.embedded:
            config.configure(embedded=True)
        several = options.cards is not None and "," in options.cards
        if options.supervise or several:
            return _supervise(options, arguments)
        if (worker := _slot_worker(options)) is not None:
            from queue_workflows.executor import launcher_client

            try:
                return _serve(worker)
            except launcher_client.LauncherLost as error:
                _log.error("%s; its jobs are handed back", error)
                return 1
        printed_lines.install()
        app_loading.load_app(options.app)
        try:
            return _serve(_worker(options))
        finally:
            printed_lines.end()

    return entry_point.run_main("queue-claim-worker", body, debug=options.debug)


def _supervise(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from queue_workflows.worker import parent

    command_line.limits(options)
    # The app may set the names of the variables for the database and the host label.
    app_loading.load_app(options.app)
    db.db_url()
    own = [word for word in arguments if word != "--supervise"]
    if options.cards is not None:
        workers = {
            f"gpu {card} worker": [*own, "--cards", str(card)]
            for card in cards.parse(options.cards)
        }
        return parent.supervise(workers, options.shutdown_timeout)
    if options.slots is None and options.queue not in (None, "gpu") and options.batch == 1:
        own += ["--slots", "1"]  # an executor is replaced, and the worker continues
    name = f"{options.queue} worker" if options.queue else "worker pool"
    return parent.supervise({name: own}, options.shutdown_timeout)


def _serve(worker: ClaimWorker | slot_worker.SlotWorker) -> int:
    request = signals.StopRequest(
        on_first=worker.stop, on_second=worker.stop_now, signal_thread=True
    )
    with request as stop:
        if db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            plain = isinstance(worker, ClaimWorker)
            names = [worker.worker_id] if plain else [*worker.worker_ids.values()]
            log_context.set_for_process(worker=",".join(names))
            for name in names:
                _log.info("worker %s works on %s", name, db.describe())
            worker.run_forever()
    if not isinstance(worker, ClaimWorker):
        worker.close()
    db.close_pool()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
