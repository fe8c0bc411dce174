"""Listen for notifications, reconnect after a lost or half-open connection, and poll meanwhile.

All waiters of a process on a channel share one such connection by `Subscriptions`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from queue_workflows import config
from queue_workflows.db import link, scripts
from queue_workflows.runtime import clock, io_loop, service

_log = logging.getLogger(__name__)
PING_S = 10.0
"""Seconds between two pings of a listening connection. With ANSWER_S, a half-open connection is
noticed within 15 s."""
ANSWER_S = 4.0
"""Seconds to wait for a connection or a reply, as TCP alone does not notice a frozen server."""


class Wake(NamedTuple):
    """Why the listener woke: `notify`, `poll`, `connected` or `wake`, and the notifications."""

    reason: str
    notified: frozenset[tuple[str, str]] = frozenset()
    """(channel, payload) without duplicates; only with reason `notify`."""


class Listener:
    """An iterator of `Wake`s; one thread iterates, any thread may `wake` or `close`.

    Yields on NOTIFY, at each `poll_s` even between notifications, and after each (re)connection,
    since notifications sent meanwhile are lost. Polls continue while the database is unreachable;
    with POLL_ONLY, or without channels, there are only polls and no connection. A
    callable `poll_s` is called after each wake, and can bring the next poll forward.
    """

    def __init__(
        self,
        channels: tuple[str, ...],
        *,
        poll_s: float | Callable[[], float] = 1.0,
        url: str | None = None,
    ) -> None:
        self._channels = () if config.POLL_ONLY.read() else channels
        self._poll_s = poll_s if callable(poll_s) else lambda: poll_s
        self._url = url
        self._rope: socket.socket | None = None
        self._woken = self._closed = self._is_new = self._away = False
        self._notified: set[tuple[str, str]] = set()
        self._loop: io_loop.IoLoop | None = None
        self._link: link.Link | None = None
        self._poll_at = self._ping_at = math.inf

    def wake(self) -> None:
        """Make the iteration yield at once, or when it starts; safe in a signal handler."""
        self._woken = True
        rope = self._rope
        if rope is None:
            return
        try:
            rope.send(b"w")
        except OSError:
            return  # a full socket wakes the iteration anyway; a closed one has no iteration

    def close(self) -> None:
        """End the iteration soon; later iterations end at once. It may be called repeatedly."""
        self._closed = True
        self.wake()

    def __iter__(self) -> Iterator[Wake]:
        bell, self._rope = socket.socketpair()
        with bell, self._rope as rope, contextlib.closing(io_loop.IoLoop()) as loop:
            bell.setblocking(False)
            rope.setblocking(False)
            loop.read(bell.fileno(), lambda: bell.recv(4096))
            self._loop = loop
            try:
                if self._channels:
                    self._link = link.Link(
                        loop, self, channels=self._channels, url=self._url, waits=self._lost,
                        answer_s=ANSWER_S,
                    )  # fmt: skip
                yield from self._wakes(loop)
            finally:
                own, self._link, self._rope = self._link, None, None
                if own is not None:
                    own.close()

    def _wakes(self, loop: io_loop.IoLoop) -> Iterator[Wake]:
        self._poll_at = clock.boot_s() + self._poll_s()
        while not self._closed:
            loop.wake_at(self._poll_at)
            loop.run(self._tick, lambda: self._closed or bool(self._reason()))
            reason = self._reason()
            if self._closed or not reason:
                continue
            notified = frozenset[tuple[str, str]]()
            if reason == "connected":
                self._is_new = False
            elif reason == "wake":
                self._woken = False
            elif reason == "notify":
                notified = frozenset(self._notified)
                self._notified.clear()
            yield Wake(reason, notified)
            due = clock.boot_s() + self._poll_s()
            self._poll_at = min(self._poll_at, due) if reason == "notify" else due

    def _reason(self) -> str:
        """Return why to wake now, or ""."""
        if self._is_new:
            return "connected"
        if self._woken:
            return "wake"
        if clock.boot_s() >= self._poll_at and not self._is_connecting():
            return "poll"
        return "notify" if self._notified else ""

    def _is_connecting(self) -> bool:
        return self._link is not None and self._link.is_open and self._ping_at == math.inf

    def _tick(self, now: float) -> float:
        if self._link is None:
            return self._poll_at
        if now >= self._ping_at:
            self._link.flow.ring()
        due = self._link.tick(now)
        return due if self._is_connecting() else min(self._poll_at, due)

    # --- The source of the link.

    def next(self) -> link.Request | None:
        """Return a ping if one is due."""
        if clock.boot_s() < self._ping_at:
            return None
        self._ping_later()
        return link.Request(_ping(), bool, bool, bool)

    def _ping_later(self) -> None:
        assert self._loop is not None
        self._ping_at = clock.boot_s() + PING_S
        self._loop.wake_at(self._ping_at)

    def notified(self, channel: str, text: str) -> None:
        """Take a notification."""
        self._notified.add((channel, text))

    def connected(self) -> None:
        """Note a new connection."""
        self._is_new = True
        self._ping_later()
        if self._away:
            _log.warning("the LISTEN connection is back")
            self._away = False

    def disconnected(self) -> None:
        """Note that the connection was lost."""
        self._ping_at = math.inf

    def _lost(self, reason: str) -> None:
        if not self._away:
            self._away = True
            _log.warning("lost the LISTEN connection, polling until it is back: %s", reason)


def _ping() -> scripts.Script[Any]:
    return (yield scripts.Statement(b""))


def listen(
    *channels: str,
    poll_s: float | Callable[[], float] = 1.0,
    url: str | None = None,
) -> Listener:
    """Return a `Listener` on these channels; `url` defaults to `db_url()`."""
    return Listener(channels, poll_s=poll_s, url=url)


SHARED_POLL_S: Final = 30.0
"""Seconds between two polls of the shared listener; its waiters poll by themselves."""
_of_parents: Final[list[Any]] = []
"""Objects that a forked child must not close, since their connections belong to the parent."""


class Subscriptions:
    """The waiters on a channel, by the payload that they wait for.

    A thread with a connection runs while there is a waiter. A notification may be lost while that
    connection is opened, so each waiter also polls.
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
            if self._follow is None:
                listener = listen(self._channel, poll_s=SHARED_POLL_S)
                follow = service.Follow(f"listen-{self._channel}", listener, self._on_wake)
                follow.start()  # raises if the account may not start another thread
                self._follow = follow
            self._waiters.setdefault(payload, []).append(wake)

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
