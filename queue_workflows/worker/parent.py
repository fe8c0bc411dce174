"""Keep the processes of an app running, and hand back at once what a dead worker had claimed.

It is the one parent of `up`, `run`, `demo`, `serve`, `--supervise` and `--cards`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from queue_workflows import config, db
from queue_workflows.runtime import app_loading, child, signals, supervisor
from queue_workflows.worker import command_line, crash_recovery, gpus

ORCHESTRATOR = "queue_workflows.orchestrator"
WORKER = "queue_workflows.claim_worker"


def process(name: str, *words: str) -> supervisor.ChildSpec:
    """Return the spec of a process that runs a module of ours with arguments.

    It uses the embedded server if this process does.
    """
    env = {"QUEUE_WORKFLOWS_EMBEDDED": "1"} if config.database_url() is None else None
    return supervisor.ChildSpec(name, [sys.executable, "-m", *words], env)


class Parent:
    """Processes that are restarted with back-off, and what is recovered of those that die.

    `shutdown_timeout_s`: seconds that a stop gives to jobs; None: SHUTDOWN_TIMEOUT_S. `fail_fast`:
    it ends if one of the processes, rather than all of them, refuses to start.
    """

    def __init__(
        self,
        children: Sequence[supervisor.ChildSpec],
        *,
        shutdown_timeout_s: float | None = None,
        fail_fast: bool = False,
        spawn: supervisor.SpawnFn = child.Child,
    ) -> None:
        self._recovery = crash_recovery.CrashRecovery()
        self._children = supervisor.Supervisor(
            children, on_exit=self._recovery.report, fail_fast=fail_fast, spawn=spawn
        )
        self._deadline_s = None
        if shutdown_timeout_s is not None:
            self._deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S

    def start(self) -> None:
        """Start them now: `run` does it, too, but beside a thread, where they cannot be forked."""
        self._children.start()

    def run(
        self, stop: signals.StopRequest, *, outdated: Callable[[], bool] = lambda: False
    ) -> int:
        """Keep them running until a stop; return 0, or 2 if they refuse to start.

        They die with the thread that calls this. A further request in `stop` hurries them. It also
        ends when `outdated` returns True.
        """
        with self._recovery:
            return self._children.run(stop, deadline_s=self._deadline_s, outdated=outdated)


def supervise(
    children: Mapping[str, Sequence[str]], shutdown_timeout_s: float | None = None
) -> int:
    """Keep a `queue-claim-worker` for each name running until SIGTERM or SIGINT; return 0.

    `children` has their arguments. Returns 2 if all of them refuse to start.
    """
    workers = [process(name, WORKER, *arguments) for name, arguments in children.items()]
    with signals.StopRequest() as stop:
        return Parent(workers, shutdown_timeout_s=shutdown_timeout_s).run(stop)


def supervise_options(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Supervise the worker, or one for each GPU, of `queue-claim-worker`'s options."""
    own = [word for word in arguments if word != "--supervise"]
    shaped = options.slots is not None or options.cards is not None or options.async_jobs
    if options.queue is not None and not (shaped or options.inline):
        options.slots = 1  # an executor is replaced, and the worker continues
        own += ["--slots", "1"]
    command_line.limits(options)
    # The app may set the names of the variables for the database and the host label.
    app_loading.load_app(options.app)
    db.db_url()
    if options.cards is not None:
        workers = {
            f"gpu {card} worker": [*own, "--cards", str(card)] for card in gpus.parse(options.cards)
        }
        return supervise(workers, options.shutdown_timeout)
    name = f"{options.queue} worker" if options.queue else "worker pool"
    return supervise({name: own}, options.shutdown_timeout)
