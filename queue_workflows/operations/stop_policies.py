"""Define what a worker does with its job when it is turned OFF."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from queue_workflows import db
from queue_workflows.types import ExitFn

_log = logging.getLogger(__name__)
EXIT_HARD = 79
"""The exit code of a worker that was turned OFF by policy `hard` (the contract's figure)."""


class StoppableWorker(Protocol):
    """What a stop policy may read of a worker and call on it."""

    host: str
    queue: str

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running job to the front of its queue, counting nothing."""
        ...

    def clear_model(self) -> None:
        """Report that this host's model is unloaded."""
        ...


class StopPolicy(Protocol):
    """Stops a worker that was turned OFF."""

    def __call__(self, worker: Any, *, on_exit: ExitFn) -> None:
        """Stop `worker` (a `StoppableWorker`); `on_exit` leaves the process."""
        ...


def _hard(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Requeue the job, clear the model and exit; no other stop is sure to free RAM and VRAM."""
    try:
        worker.requeue_inflight_for_control()
        worker.clear_model()
    except db.Error as error:
        _log.warning("stopping without bookkeeping, the lease brings the job back: %s", error)
    on_exit(EXIT_HARD)


def _finish(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Let the running job finish: while the row is OFF, nothing else is claimed."""
    del worker, on_exit


HARD: StopPolicy = _hard
_OURS = (_hard, _finish)
BY_NAME: dict[str, StopPolicy] = {"hard": _hard, "drain": _finish, "pause": _finish}
"""Policy name → handler(worker, *, on_exit); an app may add its own. `pause` keeps a model warm."""


def of_app() -> dict[str, StopPolicy]:
    """Return the policies that the app has added, or put in the place of one of ours."""
    return {name: found for name, found in BY_NAME.items() if found not in _OURS}


def handler(policy: str) -> StopPolicy:
    """Return the handler of a policy; `hard`, with an error logged, for one not registered."""
    found = BY_NAME.get(policy)
    if found is None:
        _log.error("stop policy %r is not registered; stopping hard", policy)
    return found or _hard
