"""Let a pool of connections reconnect twice a second, and refuse a database that cannot be used."""

from __future__ import annotations

import time
from typing import Any, Final, TypeVar

import psycopg
from psycopg_pool import ConnectionPool

from queue_workflows import errors

C = TypeVar("C", bound="psycopg.Connection[Any]")
RETRY_S: Final = 0.5
"""Seconds between two attempts to connect. Those of psycopg_pool double with each attempt: after an
outage of a minute all callers would wait for another half of one."""


class _Attempt:
    """What psycopg_pool asks about an attempt to connect that may be repeated."""

    def __init__(self, timeout_s: float) -> None:
        self.delay = 0.0
        self._give_up_at = time.monotonic() + timeout_s

    def update_delay(self, now: float) -> None:
        """Set the time until the next attempt."""
        self.delay = max(0.0, min(RETRY_S, self._give_up_at - now))

    def time_to_give_up(self, now: float) -> bool:
        """Return whether there is no next attempt."""
        return now >= self._give_up_at


class ReconnectingPool(ConnectionPool[C]):
    """A pool that connects within RETRY_S after its server is back, however long it was away."""

    refusal: str | None = None
    """Why nothing may use the database; if `configure` raised it, callers would wait for 30 s."""

    def getconn(self, timeout: float | None = None) -> C:
        """Return a connection; raise `InvalidConfig` if nothing may use its database."""
        conn = super().getconn(timeout)
        if self.refusal is not None:
            self.putconn(conn)
            raise errors.InvalidConfig(self.refusal)
        return conn

    def _add_connection(self, attempt: Any, growing: bool = False) -> None:
        # The pool keeps its attempt from one call to the next, and begins with None.
        super()._add_connection(attempt or _Attempt(self.reconnect_timeout), growing)  # pyright: ignore[reportArgumentType]
