"""Open connections: the pool of apps, the pool of the engine, and dedicated connections."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import select
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import psycopg
from psycopg import conninfo
from psycopg.rows import dict_row

from queue_workflows import config, errors
from queue_workflows.db import loading, statements
from queue_workflows.runtime import entry_point, forking, service
from queue_workflows.types import Row

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

_log = logging.getLogger(__name__)
Connection: TypeAlias = "psycopg.Connection[Row]"
"""A connection whose rows are dicts."""

ENGINE_POOL_MAX = 4
LOCK_TIMEOUT_S = 3.0
IDLE_IN_TRANSACTION_TIMEOUT_S = 10.0
TRUSTED_S = 20.0
"""Seconds after which the keepalives of `_conninfo` have found a half-open connection."""
AWAY_AGAIN_S = 30.0
"""Seconds between two log lines about a wait for the database."""
_REFUSED = re.compile(
    r"authentication failed for user|no password supplied|no pg_hba\.conf entry"
    r"|pg_hba\.conf rejects|is not permitted to log in|permission denied for database"
    r'|(?:role|database) ".*" does not exist'
)
"""Definite replies. A failed connect has no SQLSTATE; after any other words the wait goes on."""
_GOING = ("57P01", "57P02", "57P03", "53300")
"""SQLSTATEs: administrator shutdown, crash shutdown, cannot connect now, too many connections."""
_UNKNOWN_OPTION = re.compile(r'invalid (?:URI query parameter|connection option)[: ]+"(\w+)"')
_SECRET_BEFORE = re.compile(r"pass\w*\s*=|://\w*:\D[^@]*$", re.IGNORECASE)

_lock = threading.Lock()
_pools: dict[str, tuple[str, ConnectionPool[Connection]]] = {}
_of_parent: list[Any] = []


def _forget_parent() -> None:
    """Drop the pools in a forked child: sockets and locks belong to the parent."""
    global _lock
    _lock = threading.Lock()
    # Keep a reference: a collected pool would wait for threads that a fork does not copy.
    _of_parent.extend(_pools.values())
    _pools.clear()


os.register_at_fork(after_in_child=_forget_parent)


def db_url() -> str:
    """Return the DSN in force: the environment's, else the embedded server's if requested.

    Raises `DatabaseUrlMissing`, which names the variable and how to use the embedded server.
    """
    url = config.database_url()
    if url is not None:
        return url
    if config.embedded_wanted():
        from queue_workflows.db import databases

        return databases.url()
    raise errors.DatabaseUrlMissing(
        f"no database: set {' or '.join(config.db_url_variables())} to a PostgreSQL DSN, or ask "
        "for the embedded server with --embedded, configure(embedded=True) or "
        "QUEUE_WORKFLOWS_EMBEDDED=1"
    )


def describe(url: str | None = None) -> str:
    """Return the name of the database without a password: `name at host:port`."""
    parts = _parsed(url or db_url())
    host = parts.get("host") or "the default socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"database {parts.get('dbname') or parts.get('user') or 'default'} at {host}{port}"


def _parsed(url: str) -> dict[str, Any]:
    try:
        parts = dict(conninfo.conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        # The parser's own message would contain the DSN with its password.
        raise _unreadable(url, _unknown_option(url, str(error))) from None
    for port in str(parts.get("port") or "").split(","):
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            # If a password contains a slash, its start is in the place of the port.
            named = "" if "@" in url else f": {port[:20]!r} is not a port"
            raise _unreadable(url, named)
    return parts


def _unknown_option(url: str, message: str) -> str:
    """Return the option that the parser does not know, unless it may be part of the password."""
    found = _UNKNOWN_OPTION.search(message)
    before, name, after = url.rpartition(found[1] if found else url)
    if found is None or not name or "@" in after or _SECRET_BEFORE.search(before):
        return ""
    return f": {found[1]!r} is not an option of PostgreSQL"


def _unreadable(url: str, why: str) -> errors.InvalidConfig:
    variables = [name for name in config.db_url_variables() if os.environ.get(name) == url]
    return errors.InvalidConfig(
        f"the DSN{f' in {variables[0]}' if variables else ''} cannot be read{why}: it should look "
        "like postgresql://user:password@host:5432/name, with %2F for a / in the password and %40 "
        "for an @"
    )


def _conninfo(url: str, **forced: Any) -> str:
    defaults: dict[str, Any] = {
        "connect_timeout": config.DB_CONNECT_TIMEOUT_S.read(),
        "keepalives_idle": 10,
        "keepalives_interval": 3,
        "keepalives_count": 3,
        "tcp_user_timeout": 12000,
        "application_name": "queue_workflows",
    }
    return conninfo.make_conninfo(**(defaults | _parsed(url) | forced))


def _limit(conn: psycopg.Connection[Any], statement_s: float | None = None) -> None:
    """Set the timeouts of an engine connection; an app's connection never has them."""
    loading.install(conn)
    statement_ms = int((statement_s or config.DB_STATEMENT_TIMEOUT_S.read()) * 1000)
    autocommit = conn.autocommit
    conn.autocommit = True
    timeouts = {
        "statement_ms": statement_ms,
        "lock_ms": int(LOCK_TIMEOUT_S * 1000),
        "idle_ms": int(IDLE_IN_TRANSACTION_TIMEOUT_S * 1000),
    }
    conn.execute(statements.sessions.limit, timeouts)
    conn.autocommit = autocommit


def connect(
    *,
    url: str | None = None,
    autocommit: bool = True,
    limited: bool = True,
    timeout_s: float | None = None,
    connect_s: float | None = None,
) -> Connection:
    """Return a dedicated connection of the engine, outside every pool; the caller closes it.

    `limited`: with the engine's timeouts. `timeout_s` replaces that of a statement, `connect_s`
    that of opening the connection, which the DSN and the setting give.
    """
    forced = {} if connect_s is None else {"connect_timeout": math.ceil(connect_s)}
    info = _conninfo(url or db_url(), **forced)
    conn = cast("Connection", psycopg.connect(info, autocommit=autocommit))
    conn.row_factory = dict_row
    if limited:
        try:
            _limit(conn, timeout_s)
        except BaseException:
            conn.close()
            raise
    return conn


class _Pooled(psycopg.Connection[Row]):
    """A pooled connection with the time when it was last known to work."""

    seen = -math.inf
    _poller: select.poll | None = None

    def has_news(self) -> bool:
        """Return whether there is data to read: on an idle connection, that the server ended it."""
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(self.fileno(), select.POLLIN)
        return bool(self._poller.poll(0))


def _check(conn: Connection) -> None:
    """Raise if a pooled connection broke while it was idle, so that the pool opens another.

    A poll of the socket finds a connection that the server ended, without a round trip. One that
    was idle longer than TRUSTED_S may have been dropped silently on the way, so it is tested.
    """
    now, pooled = time.monotonic(), cast("_Pooled", conn)
    if now - pooled.seen > TRUSTED_S or pooled.has_news():
        _ping(conn)
    pooled.seen = now


def _ping(conn: Connection) -> None:
    if conn.autocommit:
        conn.execute("")
        return
    conn.autocommit = True
    try:
        conn.execute("")
    finally:
        if not conn.closed:
            conn.autocommit = False


def _pool(kind: str) -> ConnectionPool[Connection]:
    url = db_url()
    known = _pools.get(kind)
    if known is not None and known[0] == url:
        return known[1]
    return _opened(kind, url)


def _opened(kind: str, url: str) -> ConnectionPool[Connection]:
    from psycopg_pool import ConnectionPool

    with _lock:
        known = _pools.get(kind)
        if known is not None and known[0] == url:
            return known[1]
        pool = ConnectionPool(
            _conninfo(url),
            connection_class=cast("type[Connection]", _Pooled),
            kwargs={"row_factory": dict_row, "autocommit": kind == "engine"},
            min_size=0,
            max_size=max(1, config.DB_POOL_MAX.read()) if kind == "host" else ENGINE_POOL_MAX,
            timeout=30.0,
            check=_check,
            configure=None if kind == "host" else _limit,
            name=f"queue_workflows-{kind}",
            num_workers=1,
            open=False,
        )
        pool.open()
        _pools[kind] = (url, pool)
    if known is not None:
        known[1].close()
    return pool


def get_pool() -> ConnectionPool[Connection]:
    """Return the pool of `connection()`, opened on first use, at most `DB_POOL_MAX` connections."""
    return _pool("host")


def close_pool() -> None:
    """Close every pool of this process; the next use opens new ones."""
    with _lock:
        pools = [pool for _, pool in _pools.values()]
        _pools.clear()
    for pool in pools:
        pool.close()


forking.close_before_fork(close_pool)


@contextmanager
def connection() -> Generator[Connection]:
    """Yield a pooled connection with dict rows and without the engine's timeouts.

    Commits on a clean exit, rolls back on an exception.
    """
    with get_pool().connection() as conn:
        yield conn


@contextmanager
def cursor() -> Generator[psycopg.Cursor[Row]]:
    """Yield a cursor on `connection()`, under the same rules."""
    with connection() as conn, conn.cursor() as cur:
        yield cur


class _Joined:
    """The caller's connection, with dict rows meanwhile.

    A class, as `_Lent` is, since a generator would cost each statement 1 us.
    """

    __slots__ = ("_conn", "_factory")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def __enter__(self) -> Connection:
        conn = self._conn
        self._factory, conn.row_factory = conn.row_factory, dict_row
        return conn

    def __exit__(self, *_: object) -> None:
        self._conn.row_factory = self._factory


class _Lent:
    """A connection of the engine's pool in autocommit."""

    __slots__ = ("_conn", "_pool")

    def __enter__(self) -> Connection:
        # `pool.connection()` would also commit, which autocommit does not need.
        self._pool = _pool("engine")
        self._conn = self._pool.getconn()
        return self._conn

    def __exit__(self, *_: object) -> None:
        self._pool.putconn(self._conn)


@contextmanager
def _own_transaction() -> Generator[Connection]:
    with _pool("engine").connection() as own, own.transaction():
        yield own


def transaction(conn: Connection | None = None) -> AbstractContextManager[Connection]:
    """Return an engine transaction: with timeouts, committed on a clean exit, else rolled back.

    With `conn`, whatever its row factory, the caller's transaction is joined: nothing is opened,
    committed or rolled back.
    """
    return _own_transaction() if conn is None else _Joined(conn)


def statement(conn: Connection | None = None) -> AbstractContextManager[Connection]:
    """Return `transaction` for a single statement, which commits itself: no BEGIN, no COMMIT."""
    return _Lent() if conn is None else _Joined(conn)


def wait_until_reachable(
    *,
    stopped: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = time.sleep,
    timeout_s: float | None = None,
) -> bool:
    """Block until the database replies; log every 30 s that it does not, and once that it does.

    Backs off with jitter from 0.2 s to 5 s. Returns False if `stopped()` came true first. Raises
    `DatabaseUnavailable` after `timeout_s`. With a timeout it also raises at once for a wrong
    password, user or database name. Without one it waits for these too, since the server's side can
    fix them.
    """
    url = db_url()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    delay, log_at, logged = 0.2, -math.inf, False
    while not stopped():
        try:
            connect(url=url, limited=False).close()
        except psycopg.OperationalError as error:
            reason = " ".join(str(error).split())
            refused = _REFUSED.search(reason) is not None
            if deadline is not None and (refused or time.monotonic() >= deadline):
                does = "refuses the connection" if refused else "does not answer"
                raise errors.DatabaseUnavailable(f"{describe(url)} {does}: {reason}") from None
            if time.monotonic() >= log_at:
                _log.warning("%s does not answer, waiting for it: %s", describe(url), reason)
                log_at, logged = time.monotonic() + AWAY_AGAIN_S, True
            pause(delay * random.uniform(0.7, 1.3))  # noqa: S311  jitter
            delay = min(5.0, delay * 1.7)
        else:
            if logged:
                _log.warning("%s answers", describe(url))
            return True
    return False


def _explain(error: Exception) -> errors.QueueWorkflowsError | None:
    """Return the message for a right that the server denied (SQLSTATE 42501)."""
    if not isinstance(error, psycopg.errors.InsufficientPrivilege):
        return None
    text = error.diag.message_primary or str(error)
    try:
        with connect(limited=False) as conn:
            row = conn.execute(statements.sessions.role).fetchone()
    except psycopg.Error:
        row = None
    role, schema = (row["role"], row["schema"]) if row else ("of this connection", "public")
    if denied := re.search(r"for schema (\S+)", text):
        return errors.DatabaseRefused(
            f"user {role} may not use or create tables in schema {denied[1]} of {describe()}: "
            f"GRANT USAGE, CREATE ON SCHEMA {denied[1]} TO {role}, or migrate as the owner"
        )
    return errors.DatabaseRefused(
        f"user {role} lacks a right on {describe()}: {text}: let the owner GRANT SELECT, INSERT, "
        f"UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}, and USAGE ON ALL SEQUENCES IN SCHEMA "
        f"{schema}, TO {role}"
    )


def _outage(error: BaseException) -> str | None:
    """Return what is away if the server is gone, shutting down or absent; None for other errors."""
    if not isinstance(error, psycopg.OperationalError):
        return None
    state = error.sqlstate or ""
    return "the database" if not state or state.startswith("08") or state in _GOING else None


entry_point.explain_by(_explain)
service.name_outages_by(_outage)
