"""A tiny parent for workers: restarts them, hands their claims back, judges where they cannot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from queue_workflows.runtime import signals, supervisor
from queue_workflows.worker import crash_recovery, hang_detection

MODULE = "queue_workflows.claim_worker"


class SupervisedWorkers:
    """What a supervisor owes the workers among its children; inside the `with` block they run.

    What one held that died goes back at once, with a death certificate; one whose body keeps the
    GIL is judged in its stead.
    """

    def __init__(self) -> None:
        self._burials = crash_recovery.CrashRecovery()
        self._oversight = hang_detection.HangDetector()
        self._stack = ExitStack()

    def supervisor(
        self, specs: Sequence[supervisor.ChildSpec], *, fail_fast: bool = False
    ) -> supervisor.Supervisor:
        """One for these children, of which any may be workers; once."""
        return supervisor.Supervisor(
            [self._oversight.equip(spec) if MODULE in spec.argv else spec for spec in specs],
            on_exit=self._ended,
            watch=self._oversight.watch,
            fail_fast=fail_fast,
        )

    def _ended(self, ended: supervisor.Exit) -> None:
        self._burials.report(ended, self._oversight.ended(ended.name, ended.code))

    def __enter__(self) -> SupervisedWorkers:
        with ExitStack() as stack:
            stack.enter_context(self._burials)
            stack.enter_context(self._oversight)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def supervise(arguments: Sequence[str], name: str, shutdown_timeout_s: float | None = None) -> int:
    """Keep `queue-claim-worker` with these arguments running until SIGTERM or SIGINT.

    It is restarted with back-off; what it held when it died goes back at once, with a death
    certificate. A further signal hurries it. 2 when the worker refuses to start.
    """
    spec = supervisor.ChildSpec(name, [sys.executable, "-m", MODULE, *arguments])
    deadline_s = None
    if shutdown_timeout_s is not None:
        deadline_s = shutdown_timeout_s + supervisor.STOP_MARGIN_S
    with signals.StopRequest() as stop, SupervisedWorkers() as guardian:
        return guardian.supervisor([spec], fail_fast=True).run(stop, deadline_s=deadline_s)
