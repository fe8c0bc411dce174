"""Start workers whose handlers run in executors: for Python callers and for the command's options.

An inline worker needs none of what this imports, so `claim_worker` imports it late.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from queue_workflows import config, errors, gpu_model_cache, model_cache
from queue_workflows.operations import stop_policies
from queue_workflows.run import launcher, loaded_app
from queue_workflows.runtime import app_loading, forking
from queue_workflows.worker import command_line, gpus, pool_config, process, shapes

_log = logging.getLogger("queue_workflows.claim_worker")
Launched: TypeAlias = "tuple[launcher.Launcher, loaded_app.Registered]"


def launch(
    load: Callable[[], object],
    models: Callable[[], model_cache.RequiresModels | None] = lambda: None,
) -> Launched | None:
    """Fork the launcher, let it load the app, and take over the app's settings.

    `models` returns the cache of models of an executor, in which it is called.

    To be called before the first thread or connection. Returns None, with one warning, where that
    is not safe: then handlers run in this process. Raises the errors of loading the app.
    """
    app = loaded_app.App(load, models, stop_policies=stop_policies.of_app)
    try:
        found, registered = launcher.Launcher.load(app)
    except launcher.ForkRefused as refused:
        _log.warning(
            "handlers run in this process, one at a time: it cannot fork executors, since %s; start"
            " queue-claim-worker with --app, so that a process without threads loads the app",
            refused,
        )
        return None
    loaded_app.apply(registered)
    return found, registered


def launch_or_refuse(load: Callable[[], object]) -> Launched:
    """Do as `launch` does; raise `InvalidConfig` where this process must not fork."""
    reason = forking.unsafe()
    launched = launch(load) if reason is None else None
    if launched is None:
        raise errors.InvalidConfig(
            f"a pool runs its jobs in processes that it forks, which is not safe here: {reason}; "
            "start it before any thread, or start queue-claim-worker --workers with --app"
        )
    return launched


def serve(options: argparse.Namespace, serve_: Callable[[process.Worker], int]) -> int | None:
    """Serve the worker of the command's options with `serve_`; return its exit code.

    Returns None if the handlers have to run in this process.
    """
    limits = command_line.limits(options)
    worker = _of_options(options, limits)
    if worker is None:
        if limits != shapes.NO_LIMITS:
            raise errors.InvalidConfig(
                "--max-jobs, --max-rss-mb, --idle-exit and --burst need a process that can fork, "
                "and this one cannot; start queue-claim-worker by itself, with --app"
            )
        return None
    try:
        return serve_(worker)
    except launcher.LauncherLost:
        return worker.exit_code or 1
    finally:
        worker.close()


def _of_options(options: argparse.Namespace, limits: shapes.Limits) -> process.Worker | None:
    shapes.check_times(options.lease_seconds, options.shutdown_timeout)
    served: dict[str, shapes.Shape] = {}
    if options.queue is not None:
        served[options.queue] = command_line.shape(options)
    if options.workers is not None:
        entries = pool_config.option(options.workers)
        served |= pool_config.shapes_of(entries)
        launched = launch_or_refuse(lambda: _load_for_pool(options.app, entries))
    else:
        launched = _launch(options.app, command_line.shape(options))
        if launched is None:
            return None
    if options.queue is not None:
        try:
            shapes.check_nodes(options.queue, launched[1].knows_nodes)
        except BaseException:
            launched[0].close()
            raise
    return process.Worker(
        launched,
        served,
        host=config.host_label(),
        newest=config.host_priority() < 0,
        lease_s=options.lease_seconds,
        shutdown_timeout_s=options.shutdown_timeout,
        limits=limits,
        ends_with_job=command_line.is_plain(options),
    )


def _launch(app: str | None, shape: shapes.Shape) -> Launched | None:
    if not shape.gpu:
        return launch(lambda: app_loading.load_app(app))
    if shape.card is not None:
        # Before the app is loaded: a library may read them only once.
        os.environ.update(gpus.environment(shape.card))
    return launch(lambda: _load_with_models(app), gpu_model_cache.gpu_model_cache)


def _load_for_pool(app: str | None, entries: Sequence[pool_config.Entry]) -> None:
    app_loading.load_app(app)
    pool_config.add_queues(entries)


def _load_with_models(app: str | None) -> None:
    app_loading.load_app(app)
    config.get_config().builtin_model_registrar()
