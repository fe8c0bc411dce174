"""Listen for notifications, reconnect after a lost or half-open connection, poll meanwhile."""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import config
from queue_workflows.db import pool, socket_io, statements

_log = logging.getLogger(__name__)
CONNECT_S = 4.0
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
    with POLL_ONLY, or without channels and locks, there are only polls and no connection. A
    callable `poll_s` is called after each wake, and can bring the next poll forward.
    """

    def __init__(
        self,
        channels: tuple[str, ...],
        *,
        poll_s: float | Callable[[], float] = 1.0,
        url: str | None = None,
        locks: Sequence[str] = (),
    ) -> None:
        self._channels = channels
        self._locks = locks
        self._poll_s = poll_s if callable(poll_s) else lambda: poll_s
        self._url = url
        self._rope: socket.socket | None = None
        self._woken = False
        self._closed = False
        self._pending: list[tuple[str, str]] = []
        self._conn: pool.Connection | None = None
        self._backoff_s = BACKOFF_FIRST_S
        self._away = False
        connects = bool(channels or locks) and not config.POLL_ONLY.read()
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
            socket_io.await_readable(watched, due - now)
        _drain(bell)
        if self._woken:
            self._woken = False
            return Wake("wake")
        return self._read(time.monotonic(), poll_at)

    def _read(self, now: float, poll_at: float) -> Wake | None:
        try:
            if self._conn is not None:
                self._pending += socket_io.notified(self._conn)
                if now >= self._ping_at:
                    self._ask(self._conn, b"")
        except (psycopg.Error, OSError) as error:
            self._lost(error)
        if self._pending and now < poll_at:
            notified = frozenset(self._pending)
            self._pending.clear()
            return Wake("notify", notified)
        return Wake("poll") if now >= poll_at else None

    def _open(self) -> bool:
        try:
            self._conn = pool.connect(url=self._url, bare=True, connect_s=CONNECT_S)
            names = [sql.Identifier(channel) for channel in self._channels]
            todo = [sql.SQL("LISTEN {}").format(name) for name in names]
            # Shared: the server may still have an earlier session of this worker with them.
            hold = sql.SQL("SELECT pg_advisory_lock_shared(hashtextextended({}, 0))")
            todo += [hold.format(sql.Literal(name)) for name in self._locks]
            listens = sql.SQL("; ").join(todo).as_bytes(self._conn)
            # A lost session would say that the process which holds its locks is gone.
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
            self._pending += socket_io.notified(conn)

        socket_io.ask(conn, query, ANSWER_S, consume)
        self._ping_at = time.monotonic() + config.DB_PING_INTERVAL_S.read()

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
    locks: Sequence[str] = (),
) -> Listener:
    """Return a `Listener` on these channels; `url` defaults to `db_url()`.

    `locks`: names whose advisory locks the connection holds for as long as it lives.
    """
    return Listener(channels, poll_s=poll_s, url=url, locks=locks)
