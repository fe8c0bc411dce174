"""Extend psycopg's pool by tests of idle connections, reconnects twice a second, and refusals."""

from __future__ import annotations

import math
import select
import time
from typing import Any, Final, TypeVar, cast

import psycopg
from psycopg_pool import ConnectionPool

from queue_workflows import errors
from queue_workflows.types import Row

C = TypeVar("C", bound="psycopg.Connection[Any]")
RETRY_S: Final = 0.5
"""Seconds between two attempts to connect. psycopg_pool doubles its pause with each attempt, so
after an outage of a minute all callers would wait for another half minute."""
TRUSTED_S: Final = 20.0
"""An idle connection is tested again before use after so many seconds."""


class Pooled(psycopg.Connection[Row]):
    """A pooled connection with the time when it was last known to work."""

    seen = -math.inf
    _poller: select.poll | None = None

    def has_news(self) -> bool:
        """Return whether data can be read; an idle connection is then closed by the server."""
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(self.fileno(), select.POLLIN)
        return bool(self._poller.poll(0))


def check(conn: psycopg.Connection[Row]) -> None:
    """Raise if a pooled connection broke while it was idle, so that the pool opens another.

    A poll of the socket finds a connection that the server ended, without a round trip. One that
    was idle longer than TRUSTED_S may have been dropped silently on the way, so it is tested.
    """
    now, pooled = time.monotonic(), cast("Pooled", conn)
    if now - pooled.seen > TRUSTED_S or pooled.has_news():
        ConnectionPool.check_connection(cast("Any", conn))
    pooled.seen = now


class _Attempt:
    """Replaces psycopg_pool's own state of the attempts to open a connection."""

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
    """A pool that connects within RETRY_S after its server is back, even after a long outage."""

    refusal: str | None = None
    """Why the database cannot be used. If `configure` raised that, callers would wait for 30 s."""

    def getconn(self, timeout: float | None = None) -> C:
        """Return a connection; raise `InvalidConfig` if its database cannot be used."""
        conn = super().getconn(timeout)
        if self.refusal is not None:
            self.putconn(conn)
            raise errors.InvalidConfig(self.refusal)
        return conn

    def _add_connection(self, attempt: Any, growing: bool = False) -> None:
        # The pool keeps its attempt from one call to the next, and begins with None.
        super()._add_connection(attempt or _Attempt(self.reconnect_timeout), growing)  # pyright: ignore[reportArgumentType]
