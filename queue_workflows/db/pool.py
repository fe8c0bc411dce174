"""Open connections, pooled or single, and transactions on them, for the engine and for apps."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import psycopg
from psycopg import abc, adapt, pq
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from queue_workflows import config, errors
from queue_workflows.db import database_url, statements
from queue_workflows.runtime.stored_json import load_json
from queue_workflows.types import Row

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

Connection: TypeAlias = "psycopg.Connection[Row]"
"""A connection whose rows are dicts."""

TEXT_SETTINGS = {
    "DateStyle": "ISO, MDY", "IntervalStyle": "postgres", "standard_conforming_strings": "on",
    "client_encoding": "UTF8",
}  # fmt: skip
"""Settings of the engine's sessions for converting values; the server reports their changes."""
STATEMENT_TIMEOUT_S = 5.0
"""Longest time of a statement of the engine (invariant 14); connections of apps have no limit."""
LOCK_TIMEOUT_S = 3.0
LOOP_LOCK_S = 0.2
"""Longest wait for a row lock in a loop, which then continues and tries the locked row later."""
IDLE_IN_TRANSACTION_TIMEOUT_S = 10.0
PAGE_CONNECTIONS = 4
"""The most connections of all dashboard pages together."""
PAGE_STATEMENT_S = 2.0
PAGE_WAIT_S = 3.0
"""Longest time in seconds of a page's statement, and of its wait for a connection."""
_USABLE = (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS)
_GOING = ("57P01", "57P02", "57P03", "53300")
"""SQLSTATEs: administrator shutdown, crash shutdown, cannot connect now, too many connections."""
MAX_IDLE_S = 60.0
"""If a connection was not needed for so many seconds, the pool closes one."""

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


def _set_up(
    conn: psycopg.Connection[Any],
    statement_s: float | None = None,
    lock_s: float | None = None,
    *,
    limited: bool = True,
) -> None:
    """Set all settings of an engine connection in one round trip."""
    install_loaders(conn)
    given = settings(statement_s, lock_s, limited=limited)
    given["is_local"] = isinstance(conn, _Sessionless)
    if isinstance(conn, _Sessionless):
        conn.settings = given
        conn.isolation_level, conn.deferrable = psycopg.IsolationLevel.READ_COMMITTED, False
        return
    autocommit = conn.autocommit
    conn.autocommit = True
    statements.sessions.set_up(conn, **given)
    conn.autocommit = autocommit


def settings(
    statement_s: float | None = None, lock_s: float | None = None, *, limited: bool = True
) -> dict[str, Any]:
    """Return the parameters of `statements.sessions.set_up`, which sets the engine's timeouts.

    With POLL_ONLY they apply to one transaction, else to the session.
    """
    scale_ms = 1000 if limited else 0
    return {
        "statement_ms": int((statement_s or STATEMENT_TIMEOUT_S) * scale_ms),
        "lock_ms": int((lock_s or LOCK_TIMEOUT_S) * scale_ms),
        "idle_ms": int(IDLE_IN_TRANSACTION_TIMEOUT_S * scale_ms),
        "is_local": config.POLL_ONLY.read(),
    }


def refusal(encoding: str | None, name: str) -> str | None:
    """Return why the encoding of the database cannot store every text, or None if it can."""
    if encoding in (None, "UTF8"):
        return None
    return (
        f"the encoding of database {name} is {encoding}, which cannot store every text: create "
        f"one by CREATE DATABASE {name}_utf8 ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0, and "
        "name it in the DSN"
    )


def _refusal(conn: psycopg.Connection[Any]) -> str | None:
    return refusal(conn.info.parameter_status("server_encoding"), conn.info.dbname)


def connect(
    *,
    url: str | None = None,
    autocommit: bool = True,
    limited: bool = True,
    bare: bool = False,
    direct: bool = False,
    timeout_s: float | None = None,
    lock_s: float | None = None,
    connect_s: float | None = None,
) -> Connection:
    """Return a dedicated connection of the engine, outside every pool; the caller closes it.

    If `limited`, it has the engine's timeouts, else none. `timeout_s` replaces the timeout of
    statements, `lock_s` of locks, and `connect_s` of opening the connection, which is otherwise set
    by the DSN or our default. A `bare` connection has the server's own settings, which saves a
    round trip. A `direct` one has a session of its own, even with POLL_ONLY.
    Raises `InvalidConfig` if the encoding of the database is not UTF-8.
    """
    forced = {} if connect_s is None else {"connect_timeout": math.ceil(connect_s)}
    info = database_url.conninfo(url or database_url.db_url(), **forced)
    sessionless = config.POLL_ONLY.read() and not direct
    kind = _Sessionless if sessionless else psycopg.Connection[Row]
    conn = kind.connect(info, autocommit=autocommit, row_factory=dict_row)
    try:
        if why := _refusal(conn):
            raise errors.InvalidConfig(why)
        if not bare:
            _set_up(conn, timeout_s, lock_s, limited=limited)
    except BaseException:
        conn.close()
        raise
    return conn


class _Sessionless(psycopg.Connection[Row]):
    """A connection for POLL_ONLY, which neither leaves nor needs state in a session.

    A pooler in transaction mode may run each transaction in another session, which other clients
    use too. So each transaction sets its own settings, and statements are not prepared.
    """

    settings: Mapping[str, Any] | None = None
    """Parameters of `statements.sessions.set_up`, or None for a connection that sets nothing."""

    @classmethod
    def connect(cls, *arguments: Any, **more: Any) -> _Sessionless:
        """Connect; no statement is prepared, since the next one may have another session."""
        return super().connect(*arguments, **{**more, "prepare_threshold": None})

    def execute(self, *arguments: Any, **more: Any) -> psycopg.Cursor[Row]:
        """Execute a statement, in a transaction of its own if none is open."""
        if self.settings is None or self.info.transaction_status != pq.TransactionStatus.IDLE:
            return super().execute(*arguments, **more)
        with self.transaction():
            return super().execute(*arguments, **more)

    @contextmanager
    def transaction(self, *arguments: Any, **more: Any) -> Generator[psycopg.Transaction]:
        """Begin a transaction with all its settings, or a savepoint inside one."""
        is_outer = self.info.transaction_status == pq.TransactionStatus.IDLE
        with super().transaction(*arguments, **more) as block:
            if is_outer and self.settings is not None:
                super().execute(statements.sessions.set_up.text, self.settings)
            yield block


def _pool(kind: str) -> ConnectionPool[Connection]:
    url = database_url.db_url()
    known = _pools.get(kind)
    if known is not None and known[0] == url:
        return known[1]
    return _opened(kind, url)


def _opened(kind: str, url: str) -> ConnectionPool[Connection]:
    from queue_workflows.db import reconnecting_pool
    from queue_workflows.runtime import forking

    class SessionlessPooled(_Sessionless, reconnecting_pool.Pooled):
        pass

    def configure(conn: Connection) -> None:
        pool.refusal = _refusal(conn)
        if kind != "host":
            _set_up(conn)

    with _lock:
        known = _pools.get(kind)
        if known is not None and known[0] == url:
            return known[1]
        own = SessionlessPooled if config.POLL_ONLY.read() else reconnecting_pool.Pooled
        size, wait_s = {
            "host": (max(1, config.DB_POOL_MAX.read()), 30.0),
            "engine": (config.get_config().engine_pool_max, 30.0),
            "pages": (PAGE_CONNECTIONS, PAGE_WAIT_S),
        }[kind]
        pool = reconnecting_pool.ReconnectingPool(
            database_url.conninfo(url),
            connection_class=cast("type[Connection]", own),
            kwargs={"row_factory": dict_row, "autocommit": kind != "host"},
            min_size=0,
            max_size=size,
            max_lifetime=config.get_config().pool_recycle_s,
            max_idle=MAX_IDLE_S,
            timeout=wait_s,
            check=reconnecting_pool.check,
            configure=configure,
            name=f"queue_workflows-{kind}",
            num_workers=1,
            open=False,
        )
        pool.open()
        _pools[kind] = (url, pool)
        forking.close_before_fork(close_pool)
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


def differing(info: Any, *, encoding: bool = True) -> dict[str, str]:
    """Return the settings of an app's session that differ from TEXT_SETTINGS, with its values.

    `info` is the connection's `info` in psycopg or psycopg2. `client_encoding` is only compared if
    `encoding` is true.
    """
    found = {name: info.parameter_status(name) for name in TEXT_SETTINGS}
    return {
        name: value
        for name, value in found.items()
        if value not in (None, TEXT_SETTINGS[name])
        and not (name == "DateStyle" and value.startswith("ISO"))
        and (encoding or name != "client_encoding")
    }


def adopt(conn: Connection, differing: Mapping[str, str]) -> None:
    """Set each `differing` setting to the engine's value; a rollback would undo that."""
    _set_all(conn, {name: TEXT_SETTINGS[name] for name in differing})


def give_back(conn: Connection, info: Any, differing: Mapping[str, str]) -> None:
    """Restore each `differing` setting, unless a rollback must do so."""
    if info.transaction_status in _USABLE:
        _set_all(conn, differing)


def _set_all(conn: Connection, settings: Mapping[str, str], *, is_local: bool = False) -> None:
    statements.sessions.set_all(conn, settings=json.dumps(settings), is_local=is_local)


def set_local(conn: Connection, settings: Mapping[str, str]) -> None:
    """Change settings of the server for the rest of the transaction."""
    _set_all(conn, settings, is_local=True)


class Joined:
    """A context manager that gives the caller's connection dict rows and TEXT_SETTINGS.

    It is a class, as `Lent` is, since a generator would cost each statement 1 us.
    """

    __slots__ = ("_before", "_conn", "_factory")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def __enter__(self) -> Connection:
        conn = self._conn
        self._before = differing(conn.info)
        if self._before:
            adopt(conn, self._before)
        self._factory, conn.row_factory = conn.row_factory, dict_row
        return conn

    def __exit__(self, *_: object) -> None:
        self._conn.row_factory = self._factory
        if self._before:
            give_back(self._conn, self._conn.info, self._before)


class Lent:
    """A context manager that yields a connection of the engine's pool in autocommit mode."""

    __slots__ = ("_conn", "_pool")

    def __enter__(self) -> Connection:
        # `pool.connection()` would also commit, which autocommit does not need.
        self._pool = _pool("engine")
        self._conn = self._pool.getconn()
        return self._conn

    def __exit__(self, *_: object) -> None:
        self._pool.putconn(self._conn)


@contextmanager
def own_transaction() -> Generator[Connection]:
    """Yield a connection of the engine's pool in a transaction."""
    with _pool("engine").connection() as own, own.transaction():
        yield own


@contextmanager
def read_only() -> Generator[Connection]:
    """Yield a connection of the dashboard's own pool, in a read-only transaction.

    A statement that takes longer than PAGE_STATEMENT_S is cancelled (SQLSTATE 57014).
    """
    with _pool("pages").connection() as own, own.transaction():
        limit_ms = f"{PAGE_STATEMENT_S * 1000:.0f}"
        set_local(own, {"transaction_read_only": "on", "statement_timeout": limit_ms})
        yield own


def is_psycopg(conn: Any) -> bool:
    """Return whether `conn` is a psycopg connection, which needs no adapter."""
    return isinstance(conn, psycopg.Connection)


class DedicatedConnection:
    """One autocommit engine connection, opened on first use and reopened after it was closed.

    Only one thread may use it at a time. A forked child opens its own connection.
    """

    def __init__(self, *, lock_s: float | None = None) -> None:
        """For `lock_s` see `connect`."""
        self._lock_s = lock_s
        self._conn: Connection | None = None
        self._pid = os.getpid()
        self._parents: Connection | None = None
        """The parent's connection in a forked child, kept since its collection would warn."""

    def get(self) -> Connection:
        """Return the connection; open it if there is none."""
        if self._pid != os.getpid():
            self._pid, self._parents, self._conn = os.getpid(), self._conn, None
        if self._conn is None or self._conn.closed:
            self.close()
            self._conn = connect(lock_s=self._lock_s)
        return self._conn

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self._conn is not None and self._pid == os.getpid():
            self._conn.close()
            self._conn = None

    @contextmanager
    def using(self) -> Generator[Connection]:
        """Yield the connection; after a database error close it and raise the error."""
        try:
            yield self.get()
        except psycopg.Error:
            self.close()
            raise


_LATEST = datetime.max.replace(tzinfo=timezone.utc)
_EARLIEST = datetime.min.replace(tzinfo=timezone.utc)


def install_loaders(context: abc.AdaptContext) -> None:
    """Register the loaders on this connection or map of adapters: for JSON and timestamptz."""
    set_json_loads(load_json, context)
    context.adapters.register_loader("timestamptz", _Moment)


class _Moment(adapt.Loader):
    """Load a timestamptz; return the nearest `datetime` for a time that Python cannot represent.

    Such times are `infinity`, `-infinity`, and times in years after 9999 or before year 1.
    """

    def __init__(self, oid: int, context: abc.AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        kind = psycopg.adapters.get_loader(oid, pq.Format.TEXT)
        assert kind is not None
        self._load = kind(oid, context).load

    def load(self, data: abc.Buffer) -> Any:
        try:
            return self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return _EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else _LATEST


def _explain(error: Exception) -> errors.QueueWorkflowsError | None:
    """Return the library's error for a privilege that the server denied (SQLSTATE 42501)."""
    if not isinstance(error, psycopg.errors.InsufficientPrivilege):
        return None
    text = error.diag.message_primary or str(error)
    try:
        with connect(bare=True) as conn:
            row = statements.sessions.role(conn)
    except psycopg.Error:
        row = None
    where = database_url.describe()
    role, schema = (row["role"], row["schema"]) if row else ("of this connection", "public")
    if denied := re.search(r"for schema (\S+)", text):
        return errors.DatabaseRefused(
            f"user {role} may not use or create tables in schema {denied[1]} of {where}: "
            f"GRANT USAGE, CREATE ON SCHEMA {denied[1]} TO {role}, or migrate as the owner"
        )
    return errors.DatabaseRefused(
        f"user {role} lacks a right on {where}: {text}: let the owner GRANT SELECT, INSERT, "
        f"UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}, and USAGE ON ALL SEQUENCES IN SCHEMA "
        f"{schema}, TO {role}"
    )


def _outage(error: BaseException) -> str | None:
    """Return "the database" if the error means that it is unavailable, else None."""
    if not isinstance(error, psycopg.OperationalError):
        return None
    state = error.sqlstate or ""
    return "the database" if not state or state.startswith("08") or state in _GOING else None


errors.explain_by(_explain)
errors.name_outages_by(_outage)
