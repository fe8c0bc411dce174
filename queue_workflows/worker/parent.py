"""Run a small parent process that restarts workers and hands back the claims of a dead one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from queue_workflows import db
from queue_workflows.runtime import app_loading, signals, supervisor
from queue_workflows.worker import cards, command_line, crash_recovery

MODULE = "queue_workflows.claim_worker"


def supervise(
    children: Mapping[str, Sequence[str]], shutdown_timeout_s: float | None = None
) -> int:
    """Keep a `queue-claim-worker` for each name running until SIGTERM or SIGINT; return 0.

    `children` has their arguments. They are restarted with back-off. The claims of a dead worker
    are handed back at once. A further signal hurries the stop. Returns 2 if all of them refuse to
    start.
    """
    specs = [
        supervisor.ChildSpec(name, [sys.executable, "-m", MODULE, *arguments])
        for name, arguments in children.items()
    ]
    deadline_s = None
    if shutdown_timeout_s is not None:
        deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S
    with signals.StopRequest() as stop, crash_recovery.CrashRecovery() as recovery:
        subject = supervisor.Supervisor(specs, on_exit=recovery.report)
        return subject.run(stop, deadline_s=deadline_s)


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
