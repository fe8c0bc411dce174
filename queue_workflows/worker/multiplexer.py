"""Wait for messages and deaths of a worker's executors, for all of its queues at once."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Generator

from queue_workflows.executor import launcher_client, protocol, streams


class Multiplexer:
    """The launcher of a worker, the selector that waits for all executors, and what they print.

    For one thread.
    """

    def __init__(self, launcher: launcher_client.Launcher) -> None:
        self.launcher = launcher
        self.selector = selectors.DefaultSelector()
        """Its keys have the function to call as data."""
        self.printed = {number: streams.Forward(number) for number in (1, 2)}
        self.ready: set[int] = set()
        """The descriptors that the last `select` found readable."""
        self._on_died: list[Callable[[protocol.Died], object]] = []

    def start(self) -> None:
        """Wait for the launcher's messages too."""
        self.selector.register(self.launcher, selectors.EVENT_READ, self._on_launcher)

    def follow(self, on_died: Callable[[protocol.Died], object]) -> None:
        """Call this function with each executor that has ended, also with those of others."""
        self._on_died.append(on_died)

    def select(self, timeout_s: float) -> None:
        """Wait for what executors send and how they end, and act on it."""
        found = [key for key, _ in self.selector.select(timeout_s)]
        self.ready = {key.fd for key in found}
        for key in found:
            key.data()
        self.ready.clear()
        if self.launcher.pending:
            self._on_launcher()
        for each in self.printed.values():
            each.flush()

    @contextlib.contextmanager
    def watching(self, fd: int) -> Generator[list[int]]:
        """Let `select` wait for this descriptor too; yield a list that gets it once readable."""
        readable: list[int] = []
        self.selector.register(fd, selectors.EVENT_READ, lambda: readable.append(fd))
        try:
            yield readable
        finally:
            self.selector.unregister(fd)

    def print(self, number: int, data: bytes) -> None:
        """Print on the worker's own stdout (1) or stderr (2)."""
        if data:
            self.printed[number].add(data)

    def forget(self, source: object) -> None:
        """Wait no longer for this descriptor or channel."""
        try:
            self.selector.unregister(source)  # pyright: ignore[reportArgumentType]
        except (KeyError, ValueError):
            return

    @property
    def unheard(self) -> bool:
        """Return whether deaths are known that `select` would not wake up for."""
        return self.launcher.pending

    @property
    def unprinted(self) -> bool:
        """Return whether a reader of the worker's own output is too slow."""
        return any(each.pending for each in self.printed.values())

    def _on_launcher(self) -> None:
        for died in self.launcher.receive():
            for act in self._on_died:
                act(died)
