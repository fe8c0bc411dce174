"""Keep one dedicated connection for an owner, and reopen it when it is lost."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from queue_workflows.db import pool


class DedicatedConnection:
    """One autocommit engine connection, opened on first use and reopened after it was closed.

    For one thread at a time. A forked child opens its own: the parent's session is left alone.
    """

    def __init__(self, *, lock_s: float | None = None) -> None:
        """`lock_s`: as in `connect`."""
        self._lock_s = lock_s
        self._conn: pool.Connection | None = None
        self._pid = os.getpid()
        self._parents: pool.Connection | None = None
        """References that prevent collection, which warns of an open connection."""

    def get(self) -> pool.Connection:
        """Return the connection; open it if there is none."""
        if self._pid != os.getpid():
            self._pid, self._parents, self._conn = os.getpid(), self._conn, None
        if self._conn is None or self._conn.closed:
            self.close()
            self._conn = pool.connect(lock_s=self._lock_s)
        return self._conn

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self._conn is not None and self._pid == os.getpid():
            self._conn.close()
            self._conn = None

    @contextmanager
    def using(self) -> Generator[pool.Connection]:
        """Yield the connection; after a database error close it and raise the error."""
        try:
            yield self.get()
        except psycopg.Error:
            self.close()
            raise
