"""A statement that is sent now and whose rows are awaited later."""

from __future__ import annotations

import select
from collections.abc import Sequence

import psycopg
from psycopg import pq

from queue_workflows.db import pool

LOOK_S = 1.0
"""Signals are served at least this often during a wait."""


class Sent:
    """One statement under way on an autocommit connection, which is the caller's until `rows`.

    The server works on it, and commits, while the caller does something else. Raises
    `psycopg.Error` as `execute` does; what it did is unknown after an `OperationalError`.
    """

    def __init__(self, conn: pool.Connection, query: bytes, values: Sequence[bytes | None]) -> None:
        self._conn = conn
        self._libpq = conn.pgconn
        self._libpq.send_query_params(query, values)
        self._libpq.flush()

    def rows(self) -> list[tuple[bytes | None, ...]]:
        """The rows, each value as the server's text; waits for the server."""
        found: list[tuple[bytes | None, ...]] = []
        failure: psycopg.Error | None = None
        while (result := self._next()) is not None:
            if result.status == pq.ExecStatus.TUPLES_OK:
                columns = range(result.nfields)
                found += (
                    tuple(result.get_value(row, column) for column in columns)
                    for row in range(result.ntuples)
                )
            elif result.status != pq.ExecStatus.COMMAND_OK:
                failure = psycopg.errors.error_from_result(result)
                if self._conn.broken:
                    failure = psycopg.OperationalError(str(failure))
        if failure is not None:
            raise failure
        return found

    def _next(self) -> pq.abc.PGresult | None:
        poller = select.poll()
        poller.register(self._conn.fileno(), select.POLLIN)
        while True:
            unsent = self._libpq.flush()
            if not self._libpq.is_busy():
                return self._libpq.get_result()
            events = select.POLLIN | (select.POLLOUT if unsent else 0)
            poller.modify(self._conn.fileno(), events)
            poller.poll(int(LOOK_S * 1000))
            self._libpq.consume_input()
