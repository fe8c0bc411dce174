"""Run parts of an orchestrator in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from queue_workflows import orchestrator
from queue_workflows.maintenance import recovery
from queue_workflows.runtime import signals

if TYPE_CHECKING:
    import pytest

StopRequest = signals.StopRequest
"""What SIGTERM sets in a process."""


@contextmanager
def serving() -> Generator[StopRequest]:
    """Run an orchestrator in a thread, as its command does, until the end of the block."""
    stop = StopRequest()
    thread = threading.Thread(target=orchestrator.serve, args=(stop,), name="serve")
    thread.start()
    try:
        yield stop
    finally:
        stop.request()
        thread.join(15)
        assert not thread.is_alive()


def recover(stop: StopRequest | None = None) -> bool:
    """Recover jobs as an orchestrator does before it starts; return False if it was stopped."""
    asked = (stop or StopRequest()).requested
    return recovery.recover_at_start(asked.wait)


def before_recovery(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call this before each try to recover at a start; what it raises, the try raises."""
    reclaim = recovery.reclaim

    def reclaiming(*sweep: Any, **more: Any) -> None:
        if not sweep:
            call()
        reclaim(*sweep, **more)

    patch.setattr(recovery, "reclaim", reclaiming)
