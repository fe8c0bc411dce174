"""Run parts of an orchestrator in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from queue_workflows import db, node_pool, orchestrator
from queue_workflows.maintenance import sweeps
from queue_workflows.runtime import signals
from tests.support import counting_cursor

if TYPE_CHECKING:
    import pytest


def stop(*, requested: bool) -> signals.StopRequest:
    """Return what a signal sets in a process, `requested` if it has come already."""
    made = signals.StopRequest()
    if requested:
        made.request()
    return made


@contextmanager
def serving() -> Generator[None]:
    """Run an orchestrator in a thread, as its command does, until the end of the block."""
    asked = stop(requested=False)
    thread = threading.Thread(target=orchestrator.serve, args=(asked,), name="serve")
    thread.start()
    try:
        yield
    finally:
        asked.request()
        thread.join(15)
        assert not thread.is_alive()


def poll_s(pool: node_pool.NodePool) -> float:
    """Return in how many seconds a pool checks again if nothing is notified."""
    return pool._poll_s()


def notify(pool: node_pool.NodePool, kind: str) -> None:
    """Let a pool without threads act on a notification: a `run`, a `delayed` one, an `event`."""
    pool._act(db.Wake("notify", frozenset({("orchestrator_work", kind)})))


def counter(pool: node_pool.NodePool) -> counting_cursor.Counter:
    """Count what a pool executes on its own connection from now on."""
    return counting_cursor.Counter(pool._kept.get())


def recover(*, stopped: bool = False) -> bool:
    """Recover jobs as an orchestrator does before it starts; return False if it was stopped."""
    return sweeps.recover_at_start(stop(requested=stopped).requested.wait)


def before_recovery(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call this before each try to recover at a start; what it raises, the try raises."""
    reclaim = sweeps.reclaim_all_lapsed

    def reclaiming(*sweep: Any, **more: Any) -> None:
        if len(sweep) == 1:
            call()
        reclaim(*sweep, **more)

    patch.setattr(sweeps, "reclaim_all_lapsed", reclaiming)
