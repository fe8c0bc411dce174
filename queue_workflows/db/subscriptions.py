"""Share one LISTEN connection among all waiters of this process on a channel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from queue_workflows.db.listen import Wake, listen
from queue_workflows.runtime import service

POLL_S: Final = 30.0
"""Waiters poll by themselves, so the listener need not wake them."""
_of_parents: Final[list[Any]] = []
"""What a forked child must not close: its connections belong to the parent."""


class Subscriptions:
    """The waiters on a channel, by the payload that they wait for.

    There is a thread with a connection while somebody waits. A notification may be lost while that
    connection is opened, so each waiter reads again after a pause too.
    """

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._begin()
        os.register_at_fork(after_in_child=self._forget_parent)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, list[Callable[[], object]]] = {}
        self._follow: service.Follow[Wake] | None = None

    def _forget_parent(self) -> None:
        _of_parents.append(self._follow)
        self._begin()

    @contextmanager
    def waking(self, payload: str, wake: Callable[[], object]) -> Generator[None]:
        """Call `wake` in the block for each notification of this payload, on another thread.

        It is also called whenever notifications may have been lost. It must not block.
        """
        self._add(payload, wake)
        try:
            yield
        finally:
            self._remove(payload, wake)

    def _add(self, payload: str, wake: Callable[[], object]) -> None:
        with self._lock:
            self._waiters.setdefault(payload, []).append(wake)
            if self._follow is None:
                listener = listen(self._channel, poll_s=POLL_S)
                self._follow = service.Follow(f"listen-{self._channel}", listener, self._on_wake)
                self._follow.start()

    def _remove(self, payload: str, wake: Callable[[], object]) -> None:
        follow = None
        with self._lock:
            mine = [each for each in self._waiters.get(payload, []) if each is not wake]
            self._waiters[payload] = mine
            if not mine:
                del self._waiters[payload]
            if not self._waiters:
                follow, self._follow = self._follow, None
        if follow is not None:
            follow.stop()

    def _on_wake(self, wake: Wake) -> None:
        with self._lock:
            lost = not wake.notified
            payloads = set(self._waiters) if lost else {text for _, text in wake.notified}
            calls = [call for text in payloads for call in self._waiters.get(text, [])]
        for call in calls:
            call()
