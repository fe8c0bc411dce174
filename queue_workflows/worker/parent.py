"""A tiny parent for one worker: restarts it, hands its claims back, and records how it died."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from queue_workflows.runtime import signals, supervisor
from queue_workflows.worker import burial

MODULE = "queue_workflows.claim_worker"


def supervise(arguments: Sequence[str], name: str, shutdown_timeout_s: float | None = None) -> int:
    """Keep `queue-claim-worker` with these arguments running until SIGTERM or SIGINT.

    It is restarted with back-off; what it held when it died goes back at once, with a death
    certificate. A further signal hurries it. 2 when the worker refuses to start.
    """
    spec = supervisor.ChildSpec(name, [sys.executable, "-m", MODULE, *arguments])
    deadline_s = None
    if shutdown_timeout_s is not None:
        deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S
    with signals.StopRequest() as stop, burial.Burials() as burials:
        seat = supervisor.Supervisor([spec], on_exit=burials.report, fail_fast=True)
        return seat.run(stop, deadline_s=deadline_s)
