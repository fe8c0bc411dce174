"""Call handlers of tasks as an executor does, for a worker that may interrupt them."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Generator
from typing import Any

from queue_workflows.dag import payload, typed_values
from queue_workflows.tasks import control, handlers, registry

Interrupted, is_async = control.Interrupted, handlers.is_async
taken, refuse_dropped = typed_values.taken, registry.refuse_dropped


class Script:
    """A worker's side that interrupts after the n-th yield, or on request."""

    def __init__(self, after: int | None = None) -> None:
        self.heard: list[Any] = []
        """The progress that was reported."""
        self.interrupted: str | None = None
        self.cancel_requested = False
        self._after = after
        self._call: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def report_progress(self, value: Any) -> None:
        self.heard.append(value)
        if len(self.heard) - 1 == self._after:
            self.interrupt()

    def interrupt(self, reason: str = "cancelled") -> None:
        """Let the handler end."""
        with self._lock:
            self.interrupted = reason
            if self._call is not None:
                self._call()

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        with self._lock:
            self._call = call
            if call is not None and self.interrupted:
                call()


@contextlib.contextmanager
def runner() -> Generator[handlers.Runner]:
    """Yield what runs handlers one after the other on the calling thread."""
    with contextlib.closing(handlers.Runner()) as made:
        yield made


def run(value: Any, script: Script | None = None) -> Any:
    """Run what a handler has returned to its end; return its result."""
    with runner() as made:
        return made.run(value, script or Script())


def called(task: Any, args: Any, reason: str = "boot") -> Any:
    """Call a task with the args of its job; return what it returns."""
    return registry.caller_of(task).call(task, reason, args, "t")


def bound(given: Any, *names: str) -> Any:
    """Return what keyword-only parameters of these names get of a job's args."""
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return typed_values.Keywords(parameters, {}).bound(given, "args")


def stored(value: Any) -> Any:
    """Return a value as it is read back from the database."""
    return json.loads(payload.encode(value, "it"))
