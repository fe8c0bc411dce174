"""Reuse the server processes of closed connections to the test database.

A new server process reads the catalogs and compiles each trigger function at its first use, which
costs 3 to 20 ms per connection. A connection that a test closes leaves its server process here,
which does what `DISCARD ALL` does and serves the next connection. A worker of this process opens
two, as links of its loop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import AsyncConnection, conninfo, generators, pq, rows

from queue_workflows.db import database_url, link

PARKED = "test-harness-parked"
"""The application name of a server process that waits for its next connection."""
_MAX_PARKED = 16
_RESET_S = 2.0
_RESET = (
    "ROLLBACK; RESET SESSION AUTHORIZATION; RESET ALL; DEALLOCATE ALL; CLOSE ALL; UNLISTEN *;"
    " SELECT pg_advisory_unlock_all(), pg_stat_force_next_flush();"
    " DISCARD TEMP; DISCARD SEQUENCES;"
    f" SET application_name = '{PARKED}'"
).encode()
_GROWN = """
SELECT bool_or(pg_relation_size(oid) > 131072) AS grown
  FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
"""
LINKS = ("_connect", "_close")
"""What opens and closes the connection of a link."""
_OF_THE_CLIENT = ("application_name", "connect_timeout")
_OF_LIBPQ = ("PGOPTIONS", "PGUSER", "PGPASSWORD", "PGTZ", "PGDATESTYLE", "PGCLIENTENCODING")
"""Variables that decide about a session beside the DSN."""


class Reuse:
    """Parks the server processes of one database while a test runs, and hands them out again."""

    def __init__(self) -> None:
        self.database = ""
        """The name of the database; empty: every connection gets a process of its own."""
        self._lock = threading.Lock()
        self._parked: list[tuple[object, pq.abc.PGconn]] = []
        self._planned: Any = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Patch psycopg and the links of workers until this process ends."""
        close, aclose = psycopg.Connection.close, AsyncConnection.close
        reuse = self

        def connect_gen(cls: Any, info: str = "") -> Generator[Any, Any, Any]:
            found = reuse._take(info)
            pgconn = found or (yield from generators.connect(info))
            conn = cls(pgconn)
            if pgconn.db.decode() == reuse.database:
                conn._parameters = _key(info)
            return conn

        def sync_close(conn: Any) -> None:
            if not conn.closed and not _returns(conn):
                reuse._park(conn)
            close(conn)

        async def async_close(conn: Any) -> None:
            if not conn.closed and not _returns(conn):
                reuse._park(conn)
            await aclose(conn)

        psycopg.Connection._connect_gen = classmethod(connect_gen)  # type: ignore[assignment]
        AsyncConnection._connect_gen = classmethod(connect_gen)  # type: ignore[assignment]
        psycopg.Connection.close = sync_close
        AsyncConnection.close = async_close
        self._install_links()

    def _install_links(self) -> None:
        open_link, close_link, reuse = (*(getattr(link.Link, name) for name in LINKS), self)

        def connect(own: Any) -> link.Waits:
            info = database_url.conninfo(own._url or database_url.db_url())
            found = None if own._url else reuse._take(info)
            if found is None:
                yield from open_link(own)
            else:
                own._pg, found.nonblocking = found, 1
                own._prepared.clear()
            own.parameters = None if own._url else _key(info)

        def close(own: Any) -> None:
            pgconn = own._pg
            if pgconn is not None and pgconn.status == pq.ConnStatus.OK:
                own.flow.let_go()
                pgconn.nonblocking = 0
                if pgconn.db.decode() == reuse.database and reuse._keep(
                    getattr(own, "parameters", None), pgconn
                ):
                    own._pg = None
            close_link(own)

        for name, patched in zip(LINKS, (connect, close), strict=True):
            setattr(link.Link, name, patched)

    def planned(self, conn: Any) -> Any:
        """Return a kept connection to the database of `conn` that plans each statement once.

        Returns `conn` itself if it leads to another database than the one whose connections are
        reused, and if tables have grown: those plans are for a few rows.
        """
        if not self.database or conn.info.dbname != self.database or os.getpid() != self._pid:
            return conn
        for _ in range(2):
            if self._planned is None or self._planned.closed:
                self._planned = self._planning(conn)
            # A test may have ended it with all others.
            with contextlib.suppress(psycopg.OperationalError):
                (row,) = self._planned.execute(_GROWN).fetchall()
                return conn if row["grown"] else self._planned
        return conn

    def _planning(self, conn: Any) -> Any:
        made = type(conn).connect(
            conn.info.dsn,
            password=conn.info.password or None,
            application_name=PARKED,
            autocommit=True,
            prepare_threshold=0,
            row_factory=rows.dict_row,
        )
        made.execute("SET plan_cache_mode = force_generic_plan")
        return made

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        """Give every connection of this block a server process of its own, which its end ends."""
        database, self.database = self.database, ""
        try:
            yield
        finally:
            self.database = database

    def stop(self) -> None:
        """End the parked server processes, and give every connection its own again."""
        with self._lock:
            parked, self._parked, self.database = self._parked, [], ""
        if self._planned is not None:
            self._planned.close()
        for _, pgconn in parked:
            pgconn.finish()

    def _take(self, info: str) -> pq.abc.PGconn | None:
        """Return a parked server process for such a connection, or None."""
        if not self.database or os.getpid() != self._pid:
            return None
        key = _key(info)
        while True:
            with self._lock:
                at = [n for n, (of, _) in enumerate(self._parked) if of == key]
                if not at:
                    return None
                _, pgconn = self._parked.pop(at[-1])
            name = _parameters(info)[1].encode()
            quoted = pq.Escaping(pgconn).escape_literal(name)
            # What a living server process sends without a request is nothing.
            silent = not select.select([pgconn.socket], [], [], 0)[0]
            if silent and _done(pgconn, b"SET application_name = " + quoted):
                return pgconn
            pgconn.finish()

    def _park(self, conn: Any) -> None:
        """Reset the connection's server process and keep it; leave it to be closed otherwise."""
        pgconn = conn.pgconn
        if self._keep(getattr(conn, "_parameters", None), pgconn):
            conn.pgconn = _finished()

    def _keep(self, key: object, pgconn: pq.abc.PGconn) -> bool:
        """Reset a server process and keep it for connections with this key, if it is idle."""
        if key is None or not self.database or os.getpid() != self._pid:
            return False
        if pgconn.pipeline_status != pq.PipelineStatus.OFF or pgconn.transaction_status not in (
            pq.TransactionStatus.IDLE,
            pq.TransactionStatus.INTRANS,
            pq.TransactionStatus.INERROR,
        ):
            return False
        pgconn.notice_handler = pgconn.notify_handler = None
        if not _done(pgconn, _RESET):
            return False
        with self._lock:
            self._parked.append((key, pgconn))
            # The oldest may be for connections that no later test opens.
            ended = self._parked.pop(0)[1] if len(self._parked) > _MAX_PARKED else None
        if ended is not None:
            ended.finish()
        return True


def _key(info: str) -> object:
    return _parameters(info)[0], tuple(map(os.environ.get, _OF_LIBPQ))


@functools.lru_cache(maxsize=64)
def _parameters(info: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return what a server process is bound to by this DSN, and the application name."""
    parts = conninfo.conninfo_to_dict(info)
    bound = {name: str(value) for name, value in parts.items() if name not in _OF_THE_CLIENT}
    return tuple(sorted(bound.items())), str(parts.get("application_name") or "")


def _returns(conn: Any) -> bool:
    """Return whether closing it gives it back to its pool."""
    return bool(getattr(getattr(conn, "_pool", None), "close_returns", False))


def _done(pgconn: pq.abc.PGconn, commands: bytes) -> bool:
    """Run the commands; False if one failed, or the server did not answer soon."""
    deadline = time.monotonic() + _RESET_S
    try:
        pgconn.send_query(commands)
        while pgconn.flush():
            select.select([], [pgconn.socket], [], 0.01)
        failed = False
        while True:
            while pgconn.is_busy():
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([pgconn.socket], [], [], left)[0]:
                    return False
                pgconn.consume_input()
            while pgconn.notifies():
                pass
            result = pgconn.get_result()
            if result is None:
                return not failed
            failed = failed or result.status not in (
                pq.ExecStatus.COMMAND_OK,
                pq.ExecStatus.TUPLES_OK,
            )
    except (psycopg.Error, OSError, ValueError):
        return False


def _finished() -> pq.abc.PGconn:
    pgconn = pq.PGconn.connect_start(b"host=/nowhere")
    pgconn.finish()
    return pgconn


shared = Reuse()
