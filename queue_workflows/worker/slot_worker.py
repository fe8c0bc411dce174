"""A worker process whose handlers run in executors: its identity, its launcher, its loop."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

from queue_workflows import config, errors, hw_metrics
from queue_workflows.engine import claims
from queue_workflows.executor import launcher_client, process, protocol, registry
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, identity
from queue_workflows.worker import executor_set, slot, slots

_log = logging.getLogger("queue_workflows.claim_worker")


class Launched(NamedTuple):
    """A process that has loaded the app and forks executors, and what the app registered."""

    launcher: launcher_client.Launcher
    registered: registry.Registered


def launch(load: Callable[[], object]) -> Launched | None:
    """Fork the launcher, let it load the app, and take over the app's settings.

    To be called before the first thread or connection. Returns None, with one warning, where that
    is not safe: then handlers run in this process. Raises the errors of loading the app.
    """
    reason = launcher_client.why_not()
    if reason is not None:
        warn_inline(reason)
        return None
    app = process.App(load, stop_policies=lambda: stop_policies.BY_NAME)
    launcher = launcher_client.Launcher.start(app)
    try:
        registered = launcher.wait_loaded()
        launcher.fork().close()
    except launcher_client.ForkRefused:
        # Loading the app has started threads or opened a GPU: each executor loads it for itself.
        launcher.close()
        return _launch_late(app)
    except BaseException:
        launcher.close()
        raise
    return _launched(launcher, registered, load)


def _launch_late(app: process.App) -> Launched:
    launcher = launcher_client.Launcher.start(app, late=True)
    try:
        first = launcher.fork()
        registered = launcher_client.registered(_loaded(first))
        first.close()
    except BaseException:
        launcher.close()
        raise
    return _launched(launcher, registered, app.load)


def _launched(
    launcher: launcher_client.Launcher,
    registered: registry.Registered,
    load: Callable[[], object],
) -> Launched:
    """Take over the app's settings; load the app here too if it has stop policies of its own."""
    registry.apply(registered)
    if not stop_policies.BY_NAME.keys() >= {*registered.stop_policies}:
        load()
    return Launched(launcher, registered)


def _loaded(first: launcher_client.Executor) -> protocol.Loaded:
    """Wait until an executor has loaded the app; return its message."""
    poller = select.poll()
    poller.register(first.jobs.fileno(), select.POLLIN)
    while True:
        poller.poll()
        for message in first.jobs.receive():
            if isinstance(message, protocol.Loaded):
                return message


def warn_inline(reason: str) -> None:
    """Say why handlers run in this process, one at a time, and what to do."""
    _log.warning(
        "handlers run in this process, one at a time: it cannot fork executors, since %s; start "
        "queue-claim-worker with --app, so that a process without threads loads the app",
        reason,
    )


def check(queue: str, shape: executor_set.Shape, limits: executor_set.Limits) -> None:
    """Raise `InvalidConfig` for slots that cannot work."""
    if queue == "gpu":
        raise errors.InvalidConfig("slots are for cpu and ingest queues: a gpu worker has one job")
    values = (shape.slots, shape.batch, limits.max_jobs, limits.max_rss_mb, limits.idle_exit_s)
    if any(value is not None and not value > 0 for value in values):
        raise errors.InvalidConfig(
            "the number of slots, batch, max jobs, max RSS and idle exit must be positive"
        )
    if shape.concurrent and shape.batch > 1:
        raise errors.InvalidConfig(
            "--async and --batch: leave one out; --async runs jobs at once, --batch one by one"
        )
    if shape.batch > 1 and queue in config.DAG_QUEUES:
        raise errors.InvalidConfig(
            f"--batch is for ingest queues, not for {queue}: leave it out; short nodes are claimed "
            "ahead without it"
        )


class SlotWorker:
    """A worker of one queue with slots; its jobs run in executors.

    The other arguments are those of `ClaimWorker`.
    """

    def __init__(
        self,
        launched: Launched,
        *,
        queue: str,
        shape: executor_set.Shape,
        host: str,
        newest: bool,
        lease_s: float,
        shutdown_s: Callable[[], float],
        limits: executor_set.Limits,
        metrics: Callable[[Callable[[], object]], hw_metrics.Sampler | None] = lambda _: None,
    ) -> None:
        who = claims.Claimant(
            identity.new_worker_id(host),
            host,
            queue,
            lease_s,
            newest=newest,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self.worker_id = who.worker_id
        self._shutdown_s = shutdown_s
        self._launched = launched
        self._metrics = metrics(lambda: self._loop.keeper.wake("metrics"))
        self._loop = slots.SlotLoop(
            slot.Slot(lambda: who, concurrency=shape.slots),
            *launched,
            shape=shape,
            limits=limits,
            metrics=self._metrics,
        )

    def run_forever(self) -> None:
        """Run jobs as they come until `stop`; survives the loss of its database."""
        try:
            with self._loop.keeper.running(), self._metrics or nullcontext():
                self._loop.run_forever()
        finally:
            self.close()

    def close(self) -> None:
        """End the launcher and the executors."""
        self._launched.launcher.close()

    def stop(self) -> None:
        """Take no further job; those that run get the shutdown timeout, then they are given back.

        Safe in a signal handler.
        """
        self._loop.keeper.stop_by(clock.boot_s() + self._shutdown_s())
        self._loop.stop()

    def stop_now(self) -> None:
        """Give the running jobs back at once and leave."""
        self._loop.keeper.stop_by(clock.boot_s())
        self._loop.stop()
