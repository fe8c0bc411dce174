"""A dedicated connection that its owner keeps and replaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

import psycopg

from queue_workflows.db import pool


class Kept:
    """One autocommit engine connection, opened on first use and again after it was dropped.

    For one thread at a time. `opened` is called with each new connection. In a forked child it is
    another one: the parent's session is left alone.
    """

    def __init__(self, opened: Callable[[pool.Connection], object] = lambda _: None) -> None:
        self._opened = opened
        self._conn: pool.Connection | None = None
        self._pid = os.getpid()
        self._parents: pool.Connection | None = None
        """Kept from collection: what closes a connection tells the server so."""

    def get(self) -> pool.Connection:
        """The connection, opened when there is none."""
        if self._pid != os.getpid():
            self._pid, self._parents, self._conn = os.getpid(), self._conn, None
        if self._conn is None or self._conn.closed:
            self._conn = pool.connect()
            try:
                self._opened(self._conn)
            except BaseException:
                self.close()
                raise
        return self._conn

    @property
    def current(self) -> pool.Connection | None:
        """The connection, if there is one."""
        return self._conn if self._pid == os.getpid() else None

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self.current is not None:
            self.current.close()
            self._conn = None

    @contextmanager
    def using(self) -> Generator[pool.Connection]:
        """The connection; after a database error it is closed, and the error passes."""
        try:
            yield self.get()
        except psycopg.Error:
            self.close()
            raise
