"""Run a worker process: for one queue, one job at a time, or as a pool of queues and jobs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from queue_workflows import config, db, errors, gpu_model_cache, hw_metrics, model_registry
from queue_workflows.engine import claims
from queue_workflows.executor import launcher_client
from queue_workflows.model_cache import RequiresModels, adapted
from queue_workflows.runtime import clock, entry_point, identity, signals
from queue_workflows.types import ExitFn
from queue_workflows.worker import (
    command_line,
    executor_set,
    job_guards,
    lease_keeper,
    loop,
    parent,
    pool,
    pool_config,
    slot,
    slot_worker,
)

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
            self._shape = executor_set.Shape(slots, batch, concurrent=async_jobs)
            slot_worker.check(queue, self._shape, command_line.NO_LIMITS)
        elif async_jobs:
            raise errors.InvalidConfig("async_jobs: with slots, the number of jobs at once")
        self._slot_worker: slot_worker.SlotWorker | None = None
        if batch < 1 or (batch > 1 and queue in config.DAG_QUEUES):
            raise errors.InvalidConfig(
                f"batch of {batch} on queue {queue}: at least 1, and more only on ingest queues"
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
            queue, own, self._keeper, model_cache=self._cache, batch_size=batch
        )

    @property
    def worker_id(self) -> str:
        """Return the identity under which this worker claims."""
        return self._base.worker_id

    def _known_models(self) -> list[str] | None:
        return list(model_registry.known_ids()) or None if self._cache is not None else None

    def _claimant(self) -> claims.Claimant:
        if self._cache is None:
            return self._base
        return self._base._replace(
            model=self._cache.current_model,
            models=self._known_models(),
            policy=config.gpu_claim_policy(),
            grace_s=config.GPU_URGENT_GRACE_S.read(),
            bound_s=config.GPU_MAX_WAIT_S.read(),
        )

    def run_once(self) -> bool:
        """Claim one job, run it and record its outcome; return False if there was none."""
        with self._working():
            return self._loop.run_once()

    def run_forever(self) -> None:
        """Run jobs until `stop`; continue after an outage of the database."""
        launched = slot_worker.launch(lambda: None) if self._shape is not None else None
        if launched is not None and self._shape is not None:
            self._run_slots(launched, self._shape)
            return
        with self._working(), self._metrics or nullcontext():
            self._loop.run_forever()

    def _run_slots(self, launched: slot_worker.Launched, shape: executor_set.Shape) -> None:
        who = self._base
        self._slot_worker = worker = slot_worker.SlotWorker(
            launched,
            queue=who.queue,
            shape=shape,
            host=who.host,
            newest=who.newest,
            lease_s=who.lease_s,
            shutdown_s=lambda: _shutdown_s(self._shutdown_timeout_s),
            limits=command_line.NO_LIMITS,
            metrics=lambda ready: _sampler(who.host, ready),
        )
        self._base = who._replace(worker_id=worker.worker_id)
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
    """Several jobs at once in one process, of several ingest queues: see docs/jobs.md.

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
        on_exit: ExitFn = os._exit,
    ) -> None:
        _check_times(lease_s, shutdown_timeout_s)
        if isinstance(workers, str):
            entries = pool_config.parse(workers, "workers")
        elif workers is not None:
            entries = pool_config.check([*workers], "workers")
        else:
            entries = pool_config.parse(config.WORKERS_JSON.read(), "WORKERS_JSON")
        queues = [entry.queue for entry in entries]
        config.configure(ingest_queues=config.get_config().ingest_queues.union(queues))
        self._shutdown_timeout_s = shutdown_timeout_s
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        obey, writing = not config.DISABLE_WORKER_CONTROL.read(), threading.Lock()
        slots: list[slot.Slot] = []
        for entry in entries:
            who = claims.Claimant(
                identity.new_worker_id(label),
                label,
                entry.queue,
                lease_s,
                newest=priority < 0,
                obey=obey,
            )
            slots.append(
                slot.Slot(
                    lambda who=who: who,
                    concurrency=entry.concurrency,
                    writing=writing,
                    patient=True,
                )
            )
        self._slots = slots
        self._metrics = _sampler(label, lambda: self._keeper.wake("metrics"))
        self._keeper = lease_keeper.LeaseKeeper(slots, metrics=self._metrics, on_exit=on_exit)
        self._loop = pool.PoolLoop(slots, self._keeper)

    @property
    def worker_ids(self) -> dict[str, str]:
        """Return the identity under which each queue is claimed."""
        return {who.queue: who.worker_id for each in self._slots for who in [each.who()]}

    def run_forever(self) -> None:
        """Run jobs until `stop`, and until the running ones have ended; call it once."""
        with self._keeper.running(), self._metrics or nullcontext():
            self._loop.run_forever()

    def stop(self) -> None:
        """Take no further job; those that run get the shutdown timeout, then they are given back.

        Safe in a signal handler.
        """
        self._keeper.stop_by(clock.boot_s() + _shutdown_s(self._shutdown_timeout_s))
        self._loop.stop()

    def stop_now(self) -> None:
        """Return the running jobs to their queues at once and exit."""
        self._keeper.stop_by(clock.boot_s())
        self._loop.stop()


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
    limits = command_line.limits(options)
    if options.slots is None:
        return None
    _check_times(options.lease_seconds, options.shutdown_timeout)
    launched = slot_worker.launch(lambda: config.load_app(options.app))
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
        queue=options.queue,
        shape=command_line.shape(options),
        host=label,
        newest=config.host_priority() < 0,
        lease_s=options.lease_seconds,
        shutdown_s=lambda: _shutdown_s(options.shutdown_timeout),
        limits=limits,
        metrics=lambda ready: _sampler(label, ready),
    )


def _worker(options: argparse.Namespace) -> ClaimWorker | WorkerPool:
    if options.queue is None:
        if options.batch != 1:
            raise errors.InvalidConfig("--batch: with --queue alone; a pool claims what is free")
        return WorkerPool(
            [entry._asdict() for entry in pool_config.option(options.workers)],
            lease_s=options.lease_seconds,
            shutdown_timeout_s=options.shutdown_timeout,
        )
    _check_app(options.queue, config.get_config().knows_nodes())
    if options.queue == "gpu":
        config.get_config().builtin_model_registrar()
    return ClaimWorker(
        queue=options.queue,
        lease_s=options.lease_seconds,
        batch=options.batch,
        shutdown_timeout_s=options.shutdown_timeout,
    )


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
        entry_point.setup_logging(options.log_level)
        entry_point.print_by_lines()
        if options.embedded:
            config.configure(embedded=True)
        if options.supervise:
            return _supervise(options, arguments)
        if (worker := _slot_worker(options)) is not None:
            try:
                return _serve(worker)
            except launcher_client.LauncherLost as error:
                _log.error("%s; its jobs are handed back", error)
                return 1
        config.load_app(options.app)
        return _serve(_worker(options))

    return entry_point.run_main("queue-claim-worker", body, debug=options.debug)


def _supervise(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    # The app may set the names of the variables for the database and the host label.
    config.load_app(options.app)
    db.db_url()
    own = [word for word in arguments if word != "--supervise"]
    if options.slots is None and options.queue not in (None, "gpu") and options.batch == 1:
        own += ["--slots", "1"]  # an executor is replaced, and the worker continues
    name = f"{options.queue} worker" if options.queue else "worker pool"
    return parent.supervise(own, name, options.shutdown_timeout)


def _serve(worker: ClaimWorker | WorkerPool | slot_worker.SlotWorker) -> int:
    request = signals.StopRequest(
        on_first=worker.stop, on_second=worker.stop_now, signal_thread=True
    )
    with request as stop:
        if db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            pooled = isinstance(worker, WorkerPool)
            for name in worker.worker_ids.values() if pooled else [worker.worker_id]:
                _log.info("worker %s works on %s", name, db.describe())
            worker.run_forever()
    if isinstance(worker, slot_worker.SlotWorker):
        worker.close()
    db.close_pool()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
