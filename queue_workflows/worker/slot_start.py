"""Start workers whose handlers run in executors: for Python callers and for the command's options.

`run_once` and batches need none of what this imports, so `claim_worker` imports it late.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from queue_workflows import config, errors, gpu_model_cache, model_cache
from queue_workflows.engine import claims
from queue_workflows.executor import launcher_client
from queue_workflows.runtime import app_loading
from queue_workflows.worker import (
    cards,
    command_line,
    executor_shape,
    pool_config,
    settings,
    slot_worker,
)

_log = logging.getLogger("queue_workflows.claim_worker")


def of_queue(
    who: claims.Claimant,
    shape: executor_shape.Shape,
    shutdown_timeout_s: float | None,
    *,
    models: Callable[[], model_cache.RequiresModels | None],
    ends_with_job: bool,
) -> slot_worker.SlotWorker | None:
    """Return a worker of one queue, or None, with a warning, where this process must not fork."""
    launched = slot_worker.launch(lambda: None, models)
    if launched is None:
        return None
    return slot_worker.SlotWorker(
        launched,
        {who.queue: shape},
        host=who.host,
        newest=who.newest,
        lease_s=who.lease_s,
        shutdown_timeout_s=shutdown_timeout_s,
        ends_with_job=ends_with_job,
    )


def run(worker: slot_worker.SlotWorker) -> int:
    """Run a worker to its end; return its exit code. Raises `LauncherLost` if there is none."""
    try:
        worker.run_forever()
    except launcher_client.LauncherLost:
        if not worker.exit_code:
            raise
    return worker.exit_code


def pool_entries(workers: str | Sequence[Mapping[str, Any]] | None) -> list[pool_config.Entry]:
    """Return the entries of `WorkerPool`'s argument, after adding their queues to the app's."""
    if isinstance(workers, str):
        entries = pool_config.parse(workers, "workers")
    elif workers is not None:
        entries = pool_config.check([*workers], "workers")
    else:
        entries = pool_config.option(None)
    pool_config.add_queues(entries)
    return entries


def of_pool(
    entries: Sequence[pool_config.Entry],
    *,
    host: str,
    newest: bool,
    lease_s: float,
    shutdown_timeout_s: float | None,
) -> slot_worker.SlotWorker:
    """Return the worker of a pool; raise `InvalidConfig` where this process must not fork."""
    return slot_worker.SlotWorker(
        slot_worker.launch_or_refuse(lambda: None),
        pool_config.shapes(entries),
        host=host,
        newest=newest,
        lease_s=lease_s,
        shutdown_timeout_s=shutdown_timeout_s,
    )


def serve(
    options: argparse.Namespace, serve_: Callable[[slot_worker.SlotWorker], int]
) -> int | None:
    """Serve the worker of the command's options with `serve_`; return its exit code.

    Returns None if the handlers have to run in this process.
    """
    limits = command_line.limits(options)
    worker = _of_options(options, limits)
    if worker is None:
        if limits != executor_shape.NO_LIMITS:
            raise errors.InvalidConfig(
                "--max-jobs, --max-rss-mb, --idle-exit and --burst need a process that can fork, "
                "and this one cannot; start queue-claim-worker by itself, with --app"
            )
        return None
    try:
        return serve_(worker)
    except launcher_client.LauncherLost as error:
        _log.error("%s; its jobs are handed back", error)
        return worker.exit_code or 1
    finally:
        worker.close()


def _of_options(
    options: argparse.Namespace, limits: executor_shape.Limits
) -> slot_worker.SlotWorker | None:
    settings.check_times(options.lease_seconds, options.shutdown_timeout)
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
            settings.check_nodes(options.queue, launched.registered.knows_nodes)
        except BaseException:
            launched.launcher.close()
            raise
    return slot_worker.SlotWorker(
        launched,
        shapes,
        host=config.host_label(),
        newest=config.host_priority() < 0,
        lease_s=options.lease_seconds,
        shutdown_timeout_s=options.shutdown_timeout,
        limits=limits,
        ends_with_job=command_line.is_plain(options),
    )


def _launch(app: str | None, shape: executor_shape.Shape) -> slot_worker.Launched | None:
    if not shape.gpu:
        return slot_worker.launch(lambda: app_loading.load_app(app))
    if shape.card is not None:
        # Before the app is loaded: a library may read them only once.
        os.environ.update(cards.environment(shape.card))
    return slot_worker.launch(lambda: _load_with_models(app), gpu_model_cache.gpu_model_cache)


def _load_for_pool(app: str | None, entries: Sequence[pool_config.Entry]) -> None:
    app_loading.load_app(app)
    pool_config.add_queues(entries)


def _load_with_models(app: str | None) -> None:
    app_loading.load_app(app)
    config.get_config().builtin_model_registrar()
