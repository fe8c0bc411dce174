"""Run a small parent process that restarts workers, recovers their claims and detects hangs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from queue_workflows import db
from queue_workflows.runtime import app_loading, signals, supervisor
from queue_workflows.worker import cards, command_line, crash_recovery, hang_detection

MODULE = "queue_workflows.claim_worker"


class SupervisedWorkers:
    """Crash recovery and hang detection for the workers among a supervisor's children.

    They run inside the `with` block.
    """

    def __init__(self) -> None:
        self._crash_recovery = crash_recovery.CrashRecovery()
        self._hang_detector = hang_detection.HangDetector()
        self._stack = ExitStack()

    def supervisor(
        self, specs: Sequence[supervisor.ChildSpec], *, fail_fast: bool = False
    ) -> supervisor.Supervisor:
        """Return the supervisor of these children, any of which may be workers; call it once."""
        return supervisor.Supervisor(
            [
                self._hang_detector.attach_status(spec) if MODULE in spec.argv else spec
                for spec in specs
            ],
            on_exit=self._ended,
            watch=self._hang_detector.watch,
            fail_fast=fail_fast,
        )

    def _ended(self, ended: supervisor.Exit) -> None:
        self._crash_recovery.report(ended, self._hang_detector.ended(ended.name, ended.code))

    def __enter__(self) -> SupervisedWorkers:
        with ExitStack() as stack:
            stack.enter_context(self._crash_recovery)
            stack.enter_context(self._hang_detector)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def supervise(
    children: Mapping[str, Sequence[str]], shutdown_timeout_s: float | None = None
) -> int:
    """Keep a `queue-claim-worker` for each name running until SIGTERM or SIGINT; return 0.

    `children` has their arguments. They are restarted with back-off. The claims of a dead worker
    are handed back at once, with a `death` event. A further signal hurries the stop. Returns 2 if
    all of them refuse to start.
    """
    specs = [
        supervisor.ChildSpec(name, [sys.executable, "-m", MODULE, *arguments])
        for name, arguments in children.items()
    ]
    deadline_s = None
    if shutdown_timeout_s is not None:
        deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S
    with signals.StopRequest() as stop, SupervisedWorkers() as workers:
        return workers.supervisor(specs).run(stop, deadline_s=deadline_s)


def supervise_options(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Supervise the worker, or one for each GPU, of `queue-claim-worker`'s options; return 0."""
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
        return supervise(workers, options.shutdown_timeout)
    if options.slots is None and options.queue not in (None, "gpu") and options.batch == 1:
        own += ["--slots", "1"]  # an executor is replaced, and the worker continues
    name = f"{options.queue} worker" if options.queue else "worker pool"
    return supervise({name: own}, options.shutdown_timeout)
