"""Start and stop a worker process whose handlers run in executors, with its launcher and loop."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

from queue_workflows import config, errors
from queue_workflows.engine import claims
from queue_workflows.executor import launcher_client, loaded_app, process, protocol
from queue_workflows.model_cache import RequiresModels
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, identity
from queue_workflows.worker import executor_shape, gpu_runtime, settings, slot, slot_models, slots

_log = logging.getLogger("queue_workflows.claim_worker")


class Launched(NamedTuple):
    """A process that has loaded the app and forks executors, and what the app registered."""

    launcher: launcher_client.Launcher
    registered: loaded_app.Registered


def launch(
    load: Callable[[], object],
    model_cache: Callable[[], RequiresModels | None] = lambda: None,
) -> Launched | None:
    """Fork the launcher, let it load the app, and take over the app's settings.

    `model_cache` returns the cache of models of an executor, in which it is called.

    To be called before the first thread or connection. Returns None, with one warning, where that
    is not safe: then handlers run in this process. Raises the errors of loading the app.
    """
    reason = launcher_client.why_not()
    if reason is not None:
        warn_inline(reason)
        return None
    app = process.App(load, model_cache, stop_policies=lambda: stop_policies.BY_NAME)
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


def launch_or_refuse(load: Callable[[], object]) -> Launched:
    """Do as `launch` does; raise `InvalidConfig` where this process must not fork."""
    reason = launcher_client.why_not()
    launched = launch(load) if reason is None else None
    if launched is None:
        raise errors.InvalidConfig(
            f"a pool runs its jobs in processes that it forks, which is not safe here: {reason}; "
            "start it before any thread, or start queue-claim-worker --workers with --app"
        )
    return launched


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
    registered: loaded_app.Registered,
    load: Callable[[], object],
) -> Launched:
    """Take over the app's settings; load the app here too if it has stop policies of its own."""
    loaded_app.apply(registered)
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


class SlotWorker:
    """A worker with slots of some queues, by their shapes; its jobs run in executors.

    The other arguments are those of `ClaimWorker`.
    """

    def __init__(
        self,
        launched: Launched,
        shapes: Mapping[str, executor_shape.Shape],
        *,
        host: str,
        newest: bool,
        lease_s: float,
        shutdown_timeout_s: float | None,
        limits: executor_shape.Limits = executor_shape.NO_LIMITS,
        ends_with_job: bool = False,
    ) -> None:
        """Take over the launcher. Its length: an argument is a line, and so is each part.

        `ends_with_job`: a job that its worker ends before its handler does, also by OFF, ends the
        worker, as the plain command promises. Else only its executor is replaced.
        """
        gpu = any(shape.gpu for shape in shapes.values())
        models = slot_models.ExecutorModels() if gpu else None
        known = sorted(launched.registered.models) or None
        obey = not config.DISABLE_WORKER_CONTROL.read()
        self.worker_ids: dict[str, str] = {}
        """The identity under which each queue is claimed."""
        served: list[tuple[slot.Slot, executor_shape.Shape]] = []
        writing = threading.Lock()
        for queue, shape in shapes.items():
            worker_id = self.worker_ids[queue] = identity.new_worker_id(host, executors=True)
            who = claims.Claimant(
                worker_id, host, queue, lease_s, newest=newest, obey=obey,
                versions=config.node_version_keys() if queue in config.DAG_QUEUES else None,
            )  # fmt: skip
            own = slot.Slot(_claimant(who, models, known), concurrency=shape.slots, writing=writing)
            served.append((own, shape))
        self._shutdown_timeout_s = shutdown_timeout_s
        self._metrics = settings.sampler(host, lambda: self._loop.keeper.wake("metrics"))
        self._loop = slots.SlotLoop(
            served,
            *launched,
            limits=limits,
            metrics=self._metrics,
            models=models,
            ends_with_job=ends_with_job,
        )
        self.keeper = self._loop.keeper

    def run_forever(self) -> None:
        """Run jobs as they come until `stop`; survives the loss of its database."""
        try:
            with self._loop.keeper.running(), self._metrics or nullcontext():
                self._loop.run_forever()
        finally:
            self.close()

    @property
    def exit_code(self) -> int:
        """Return the exit code of a worker that has ended with its job, else 0."""
        return self._loop.keeper.exit_code

    def close(self) -> None:
        """End the launcher and the executors; also of a worker that never ran."""
        self._loop.close()

    def stop(self) -> None:
        """Take no further job; those that run get the shutdown timeout, then they are given back.

        Safe in a signal handler.
        """
        self._loop.keeper.stop_by(clock.boot_s() + settings.shutdown_s(self._shutdown_timeout_s))
        self._loop.stop()

    def stop_now(self) -> None:
        """Give the running jobs back at once and leave."""
        self._loop.keeper.stop_by(clock.boot_s())
        self._loop.stop()


def _claimant(
    who: claims.Claimant, models: slot_models.ExecutorModels | None, known: list[str] | None
) -> Callable[[], claims.Claimant]:
    """Return what returns the claimant; that of a gpu worker names its loaded model."""
    if models is None:
        return lambda: who
    return lambda: gpu_runtime.claimant(who, models.current_model, known)
