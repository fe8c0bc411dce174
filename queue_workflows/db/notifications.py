"""Listen for notifications, reconnect after a lost or half-open connection, poll meanwhile.

`Subscriptions` share one such connection among all waiters of a process on a channel.
"""

from __future__ import annotations

import logging
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from queue_workflows import config
from queue_workflows.db import pool, statements
from queue_workflows.runtime import service


def ask(
    conn: pool.Connection, query: bytes, within_s: float, consume: Callable[[], object]
) -> None:
    """Send a query and wait for the end of the reply, since a frozen peer still acknowledges bytes.

    `consume` reads all that has come. Raises `OperationalError`; then the connection is unusable.
    """
    deadline = time.monotonic() + within_s
    conn.pgconn.send_query(query)
    while True:
        conn.pgconn.flush()
        consume()
        if not conn.pgconn.is_busy():
            result = conn.pgconn.get_result()
            if result is None:
                return
            if result.status == ExecStatus.FATAL_ERROR:
                raise psycopg.OperationalError(result.get_error_message())
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            raise psycopg.OperationalError(f"no answer within {within_s:g} s")
        await_readable([conn], left)


def notified(conn: pool.Connection) -> list[tuple[str, str]]:
    """Read all that has come without waiting; return channels and payloads of notifications."""
    conn.pgconn.consume_input()
    found: list[tuple[str, str]] = []
    while (note := conn.pgconn.notifies()) is not None:
        found.append((note.relname.decode(), note.extra.decode()))
    return found


def await_readable(watched: Iterable[socket.socket | pool.Connection], timeout_s: float) -> None:
    """Wait until one of them is readable, or the time is over."""
    # Not select(): an app's process may have more than 1,024 descriptors open.
    poller = select.poll()
    for item in watched:
        poller.register(item.fileno(), select.POLLIN)
    poller.poll(max(0, math.ceil(timeout_s * 1000)))


_log = logging.getLogger(__name__)
CONNECT_S = 4.0
PING_S = 10.0
"""Seconds between two pings of a listening connection: with ANSWER_S, a half-open one is noticed
within 15 s."""
ANSWER_S = 4.0
"""Longest wait in seconds for a connection and for a reply on it; a service has 5 s to stop."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0


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
        self._channels = channels
        self._poll_s = poll_s if callable(poll_s) else lambda: poll_s
        self._url = url
        self._rope: socket.socket | None = None
        self._woken = False
        self._closed = False
        self._pending: list[tuple[str, str]] = []
        self._conn: pool.Connection | None = None
        self._backoff_s = BACKOFF_FIRST_S
        self._away = False
        connects = bool(channels) and not config.POLL_ONLY.read()
        self._retry_at = 0.0 if connects else math.inf
        self._ping_at = 0.0

    def wake(self) -> None:
        """Make the iteration yield at once, or when it starts; safe in a signal handler."""
        self._woken = True
        rope = self._rope
        if rope is None:
            return
        try:
            rope.send(b"w")
        except OSError:
            return  # full: it wakes anyway; closed: nothing iterates

    def close(self) -> None:
        """End the iteration soon, and every later one at once; safe to repeat."""
        self._closed = True
        self.wake()

    def __iter__(self) -> Iterator[Wake]:
        bell, rope = socket.socketpair()
        bell.setblocking(False)
        rope.setblocking(False)
        self._rope = rope
        try:
            poll_at = time.monotonic() + self._poll_s()
            while not self._closed:
                wake = self._next(bell, poll_at)
                if self._closed:
                    break
                if wake is not None:
                    yield wake
                    due = time.monotonic() + self._poll_s()
                    poll_at = min(poll_at, due) if wake.reason == "notify" else due
        finally:
            self._drop()
            self._rope = None
            rope.close()
            bell.close()

    def _next(self, bell: socket.socket, poll_at: float) -> Wake | None:
        now = time.monotonic()
        if self._conn is None and now >= self._retry_at and self._open():
            return Wake("connected")
        if self._conn is not None and self._conn.broken:
            self._lost(psycopg.OperationalError("the connection broke"))
        if not self._pending and not self._woken:
            due = min(poll_at, self._retry_at if self._conn is None else self._ping_at)
            watched = [bell] if self._conn is None else [bell, self._conn]
            await_readable(watched, due - now)
        _drain(bell)
        if self._woken:
            self._woken = False
            return Wake("wake")
        return self._read(time.monotonic(), poll_at)

    def _read(self, now: float, poll_at: float) -> Wake | None:
        try:
            if self._conn is not None:
                self._pending += notified(self._conn)
                if now >= self._ping_at:
                    self._ask(self._conn, b"")
        except (psycopg.Error, OSError) as error:
            self._lost(error)
        if self._pending and now < poll_at:
            wake = Wake("notify", frozenset(self._pending))
            self._pending.clear()
            return wake
        return Wake("poll") if now >= poll_at else None

    def _open(self) -> bool:
        try:
            self._conn = pool.connect(url=self._url, bare=True, connect_s=CONNECT_S)
            names = [sql.Identifier(channel) for channel in self._channels]
            todo = [sql.SQL("LISTEN {}").format(name) for name in names]
            listens = sql.SQL("; ").join(todo).as_bytes(self._conn)
            self._ask(self._conn, b"; ".join((listens, statements.sessions.stay_idle.text)))
        except (psycopg.Error, OSError) as error:
            self._lost(error)
            return False
        self._backoff_s = BACKOFF_FIRST_S
        if self._away:
            _log.warning("the LISTEN connection is back")
            self._away = False
        return True

    def _ask(self, conn: pool.Connection, query: bytes) -> None:
        def consume() -> None:
            self._pending += notified(conn)

        ask(conn, query, ANSWER_S, consume)
        self._ping_at = time.monotonic() + PING_S

    def _lost(self, error: Exception) -> None:
        self._drop()
        self._retry_at = time.monotonic() + self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        self._backoff_s = min(BACKOFF_MAX_S, self._backoff_s * 2)
        if not self._away:
            self._away = True
            reason = " ".join(str(error).split())
            _log.warning("lost the LISTEN connection, polling until it is back: %s", reason)

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def _drain(bell: socket.socket) -> None:
    try:
        while bell.recv(4096):
            pass
    except BlockingIOError:
        return


def listen(
    *channels: str,
    poll_s: float | Callable[[], float] = 1.0,
    url: str | None = None,
) -> Listener:
    """Return a `Listener` on these channels; `url` defaults to `db_url()`."""
    return Listener(channels, poll_s=poll_s, url=url)


SHARED_POLL_S: Final = 30.0
"""Waiters poll by themselves, so the listener need not wake them."""
_of_parents: Final[list[Any]] = []
"""Objects that a forked child must not close, since their connections belong to the parent."""


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
                listener = listen(self._channel, poll_s=SHARED_POLL_S)
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
