"""Keep one dedicated connection for an owner, and reopen it when it is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from queue_workflows import config
from queue_workflows.db import pool, socket_io


class StatementRuns(RuntimeError):
    """The connection awaits the reply to a statement, so that no other one can be sent on it."""


class DedicatedConnection:
    """One autocommit engine connection, opened on first use and reopened after it was closed.

    For one thread at a time, except `lend`. `opened` is called with each new connection. A forked
    child opens its own: the parent's session is left alone.
    """

    def __init__(
        self,
        opened: Callable[[pool.Connection], object] = lambda _: None,
        *,
        channel: str | None = None,
        on_notify: Callable[[str], object] = lambda _: None,
        closed: Callable[[], object] = lambda: None,
        lock_s: float | None = None,
    ) -> None:
        """With a `channel` each connection listens there, but for POLL_ONLY.

        `on_notify` gets the payload of each notification, by `read` or while a statement is
        awaited. Those that are sent while no connection is open are lost; `opened` is called after
        LISTEN. `closed` is called after a connection was closed, for whatever reason. `lock_s`: as
        in `connect`.
        """
        self._opened = opened
        self._closed = closed
        self._lock_s = lock_s
        self._channel = channel
        self._on_notify = on_notify
        self._conn: pool.Dedicated | None = None
        self._serves = False
        """Whether a statement runs, and `meanwhile` is called."""
        self._pid = os.getpid()
        self._parents: pool.Connection | None = None
        """References that prevent collection, which warns of an open connection."""
        self._in_use = threading.RLock()
        self._used_since: float | None = None
        self.failure: psycopg.Error | None = None
        """The error of the last `using`, or None if it succeeded."""

    @property
    def waiting_s(self) -> float:
        """Return the seconds for which the present `using` has lasted; 0.0 if there is none."""
        since = self._used_since
        return 0.0 if since is None else time.monotonic() - since

    def _reset_in_child(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._parents, self._conn = os.getpid(), self._conn, None
            self._in_use = threading.RLock()

    def get(self) -> pool.Dedicated:
        """Return the connection; open it if there is none.

        Raises `StatementRuns` in a function that `serving` calls while a statement runs.
        """
        if self._serves:
            raise StatementRuns("a statement runs on this connection")
        self._reset_in_child()
        if self._conn is None or self._conn.closed:
            self.close()
            self._conn = pool.connect(lock_s=self._lock_s)
            try:
                self._listen(self._conn)
                self._opened(self._conn)
            except BaseException:
                self.close()
                raise
        return self._conn

    def _listen(self, conn: pool.Connection) -> None:
        def noted(note: psycopg.Notify) -> None:
            self._on_notify(note.payload)

        if self._channel is not None and not config.POLL_ONLY.read():
            conn.add_notify_handler(noted)
            conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))

    def read(self) -> None:
        """Read notifications, if no statement runs; close the connection if it has ended.

        To be called when the socket is readable.
        """
        conn = self.current
        if conn is None or self._serves:
            return
        try:
            for _, payload in socket_io.notified(conn):
                self._on_notify(payload)
        except psycopg.Error:
            self.close()

    @contextmanager
    def serving(self, meanwhile: Callable[[int], object]) -> Generator[None]:
        """Call `meanwhile` with the socket while a statement of the block waits for its reply.

        It is called again if it returns before the socket is readable, and must not raise: psycopg
        would lose track of the statement.
        """
        conn = self.get()

        def call() -> None:
            self._serves = True
            try:
                meanwhile(conn.fileno())
            finally:
                self._serves = False

        conn.meanwhile = call
        try:
            yield
        finally:
            conn.meanwhile = None

    @property
    def current(self) -> pool.Connection | None:
        """Return the connection, or None."""
        return self._conn if self._pid == os.getpid() else None

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self.current is not None:
            self.current.close()
            self._conn = None
            self._closed()

    @contextmanager
    def using(self) -> Generator[pool.Connection]:
        """Yield the connection; after a database error close it and raise the error."""
        self._reset_in_child()
        with self._in_use:
            outer, self._used_since = self._used_since, time.monotonic()
            try:
                yield self.get()
                self.failure = None
            except psycopg.Error as error:
                self.failure = error.with_traceback(None)
                self.close()
                raise
            finally:
                self._used_since = outer

    @contextmanager
    def lend(self, *, within_s: float, statement_s: float) -> Generator[pool.Connection | None]:
        """Yield the connection for another thread if it is free and replies in time, else None.

        Its statements have the timeout `statement_s`. Afterwards it is closed. For an owner that
        only calls `using`.
        """
        self._reset_in_child()
        deadline = time.monotonic() + within_s
        if not self._in_use.acquire(timeout=within_s):
            yield None
            return
        try:
            yield self._answering(deadline, statement_s)
        finally:
            self.close()
            self._in_use.release()

    def _answering(self, deadline: float, statement_s: float) -> pool.Connection | None:
        conn = self.current
        if conn is None or conn.closed:
            return None
        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
            return None
        limit = b"SET statement_timeout = %d" % (statement_s * 1000)
        try:
            socket_io.ask(conn, limit, deadline - time.monotonic(), conn.pgconn.consume_input)
        except psycopg.Error:
            return None
        return conn
