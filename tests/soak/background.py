"""Run a helper on its own thread beside the fleet, and wait for its end."""

from __future__ import annotations

import abc
import threading

from queue_workflows.runtime import service

END_S = 60.0
"""Longest that one of them may take to end: it may have to undo faults on a busy machine."""


class BackgroundThread(service.Thread):
    """`go(stop)` runs while the block runs; the end of the block sets `stop` and waits for `go`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"soak-{name}", self.go)

    @abc.abstractmethod
    def go(self, stop: threading.Event) -> None:
        """Run on the thread until `stop` is set."""

    def __exit__(self, *_: object) -> None:
        if not self.stop(END_S):
            raise RuntimeError(f"{self.name} has not ended after {END_S:g} s")
