"""Wait for a connection's socket, and run a query with a deadline of our own."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterable

import psycopg
from psycopg.pq import ExecStatus

from queue_workflows.db import pool


def ask(
    conn: pool.Connection, query: bytes, within_s: float, consume: Callable[[], object]
) -> None:
    """Send a query and wait for the end of the reply, since a frozen peer still acknowledges bytes.

    `consume` reads what has come. Raises `OperationalError`; then the connection is unusable.
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
    """Read what has come, without waiting; return the channels and payloads of notifications."""
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
