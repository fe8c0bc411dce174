"""LISTEN that survives the loss of its connection, notices a half-open one, and polls meanwhile."""

from __future__ import annotations

import logging
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from queue_workflows import config
from queue_workflows.db import pool

_log = logging.getLogger(__name__)
PING_DEADLINE_S = 4.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0


class Wake(NamedTuple):
    """Why the listener woke: `notify`, `poll`, `connected` or `wake`, and what was notified."""

    reason: str
    notified: frozenset[tuple[str, str]] = frozenset()
    """(channel, payload), equal ones folded; only with reason `notify`."""


class Listener:
    """An iterator of `Wake`s; one thread iterates, any thread may `wake` or `close`.

    Yields on NOTIFY, when nothing came for `poll_s`, and after each (re)connection, since what was
    notified meanwhile is lost. While the database is away it goes on yielding polls.
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
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)
        self._closed = False
        self._pending: list[psycopg.Notify] = []
        self._conn: pool.Connection | None = None
        self._backoff_s = BACKOFF_FIRST_S
        self._away = False
        self._retry_at = 0.0
        self._ping_at = 0.0

    def wake(self) -> None:
        """Make the iteration yield at once; safe in a signal handler."""
        try:
            self._writer.send(b"w")
        except OSError:
            return

    def close(self) -> None:
        """End the iteration, soon; idempotent."""
        self._closed = True
        self.wake()

    def __iter__(self) -> Iterator[Wake]:
        try:
            poll_at = time.monotonic() + self._poll_s()
            while not self._closed:
                wake = self._next(poll_at)
                if self._closed:
                    break
                if wake is not None:
                    yield wake
                    poll_at = time.monotonic() + self._poll_s()
        finally:
            self._drop()
            self._reader.close()
            self._writer.close()

    def _next(self, poll_at: float) -> Wake | None:
        now = time.monotonic()
        if self._conn is None and now >= self._retry_at and self._open():
            return Wake("connected")
        due = min(poll_at, self._retry_at if self._conn is None else self._ping_at)
        watched: list[Any] = [self._reader]
        if self._conn is not None:
            watched.append(self._conn.fileno())
        if not self._pending:
            readable = select.select(watched, [], [], max(0.0, due - now))[0]
            if self._reader in readable:
                self._drain_wakes()
                return Wake("wake")
        return self._read(time.monotonic(), poll_at)

    def _read(self, now: float, poll_at: float) -> Wake | None:
        try:
            if self._conn is not None:
                self._consume(self._conn)
                if now >= self._ping_at:
                    self._ping(self._conn)
        except (psycopg.Error, OSError) as error:
            self._lost(error)
        if self._pending:
            notified = frozenset((n.channel, n.payload) for n in self._pending)
            self._pending.clear()
            return Wake("notify", notified)
        return Wake("poll") if now >= poll_at else None

    def _drain_wakes(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def _open(self) -> bool:
        try:
            conn = pool.connect(url=self._url, limited=False)
            conn.add_notify_handler(self._pending.append)
            self._conn = conn
            for channel in self._channels:
                conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        except (psycopg.Error, OSError) as error:
            self._lost(error)
            return False
        self._backoff_s = BACKOFF_FIRST_S
        if self._away:
            _log.warning("the LISTEN connection is back")
            self._away = False
        self._ping_at = time.monotonic() + config.DB_PING_INTERVAL_S.read()
        return True

    def _consume(self, conn: pool.Connection) -> None:
        conn.pgconn.consume_input()
        while (note := conn.pgconn.notifies()) is not None:
            self._pending.append(
                psycopg.Notify(note.relname.decode(), note.extra.decode(), note.be_pid)
            )

    def _ping(self, conn: pool.Connection) -> None:
        """One empty query with a deadline of our own: a frozen peer acknowledges bytes for ever."""
        deadline = time.monotonic() + PING_DEADLINE_S
        conn.pgconn.send_query(b"")
        while True:
            conn.pgconn.flush()
            self._consume(conn)
            if not conn.pgconn.is_busy():
                result = conn.pgconn.get_result()
                if result is None:
                    break
                if result.status == ExecStatus.FATAL_ERROR:
                    raise psycopg.OperationalError("the listening connection failed its ping")
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([conn.fileno()], [], [], left)[0]:
                raise psycopg.OperationalError(f"no answer to a ping within {PING_DEADLINE_S} s")
        self._ping_at = time.monotonic() + config.DB_PING_INTERVAL_S.read()

    def _lost(self, error: Exception) -> None:
        self._drop()
        self._retry_at = time.monotonic() + self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        _log.warning("lost the LISTEN connection, polling until it is back: %s", str(error).strip())
        self._backoff_s = min(BACKOFF_MAX_S, self._backoff_s * 2)

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def listen(
    *channels: str, poll_s: float | Callable[[], float] = 1.0, url: str | None = None
) -> Listener:
    """A `Listener` on these channels; `url` defaults to `db_url()`."""
    return Listener(channels, poll_s=poll_s, url=url)
