"""Keep the processes of an app running, and hand back at once what a dead worker had claimed.

It is the one parent of `up`, `run`, `demo`, `serve`, `--supervise` and `--cards`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

from queue_workflows import config, db, embedded
from queue_workflows.run import launcher, title
from queue_workflows.runtime import app_loading, child, forking, signals, supervisor
from queue_workflows.worker import cards, command_line, crash_recovery

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
    it ends if one of the processes, rather than all of them, refuses to start. `output`: the
    descriptor of what they print; None: stdout and stderr as here.
    """

    def __init__(
        self,
        children: Sequence[supervisor.ChildSpec],
        *,
        shutdown_timeout_s: float | None = None,
        fail_fast: bool = False,
        output: int | None = None,
    ) -> None:
        self._recovery = crash_recovery.CrashRecovery()
        self._forks = False
        self._children = supervisor.Supervisor(
            children,
            on_exit=self._recovery.report,
            fail_fast=fail_fast,
            spawn=functools.partial(self._spawn, output),
        )
        self._deadline_s = None
        if shutdown_timeout_s is not None:
            self._deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Return the names of the processes that refused to start too often."""
        return self._children.gave_up

    def _spawn(
        self, output: int | None, argv: Sequence[str], env: Mapping[str, str] | None
    ) -> child.Child:
        if self._forks and launcher.unsafe() is None:
            return child.Forked(functools.partial(_main, argv[2:]), env, output)
        return child.Child(argv, env, output)

    def begin(self) -> None:
        """Start all before `run` does, on the main thread: fork them if that is safe.

        A forked process has what this one has imported, and starts half a second earlier. They die
        with this thread.
        """
        forking.prepare()
        self._forks = True
        self._children.start()
        self._forks = False

    def run(
        self, stop: signals.StopRequest, *, outdated: Callable[[], bool] = lambda: False
    ) -> int:
        """Keep them running until a stop; return 0, or 2 if they refuse to start.

        They die with the thread that calls this. A further request in `stop` hurries them. It also
        ends when `outdated` returns True.
        """
        with self._recovery:
            return self._children.run(stop, deadline_s=self._deadline_s, outdated=outdated)


def _main(words: Sequence[str]) -> int:
    """Be the process of `python -m MODULE ...` in a forked one."""
    module, *arguments = words
    app_loading.inherit()
    title.set_title(" ".join(words))
    sys.argv = [module, *arguments]
    try:
        return importlib.import_module(module).main(arguments)
    finally:
        embedded.release_all()


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
            f"gpu {card} worker": [*own, "--cards", str(card)]
            for card in cards.parse(options.cards)
        }
        return supervise(workers, options.shutdown_timeout)
    name = f"{options.queue} worker" if options.queue else "worker pool"
    return supervise({name: own}, options.shutdown_timeout)
