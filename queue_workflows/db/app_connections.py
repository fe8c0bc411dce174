"""Run the engine's statements on a connection of the app, inside the app's transaction.

It accepts connections of psycopg, SQLAlchemy (with any driver) and Django, and asynchronous ones of
psycopg and SQLAlchemy. It recognises a connection by the name of its class, so that it imports no
framework; it uses the modules that the app has imported. Its length: both kinds share the adapters,
and each refuses a connection of the other kind by name.
"""

from __future__ import annotations

import abc
import asyncio
import re
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from queue_workflows import errors
from queue_workflows.db import pool
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row

R = TypeVar("R")
T = TypeVar("T")
_Params: TypeAlias = "Sequence[Any] | Mapping[str, Any]"
_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%s|%%|:")
_JSONB_OID = 3802
"""The type of the columns that Django, and SQLAlchemy 2.0 with asyncpg, return as JSON text."""
_ASYNC_TWIN = "the function whose name ends in _async"


class _Result:
    """The rows of a statement, with the methods of a psycopg cursor."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def fetchone(self) -> Row | None:
        """Return the first row, or None."""
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Row]:
        """Return all rows."""
        return self._rows


class _Adapter(abc.ABC):
    """The part of a psycopg connection that the engine uses, on top of another connection."""

    def __init__(self, conn: Any, kind: str = "postgresql") -> None:
        if kind != "postgresql":
            raise errors.UnknownConnection(f"conn= leads to {kind}, not to PostgreSQL")
        self._conn = conn

    def execute(
        self,
        query: str | bytes | sql.Composed,
        params: _Params = (),
        *,
        prepare: bool | None = None,  # noqa: ARG002  the driver of the app decides
    ) -> _Result:
        """Execute one statement, which has placeholders of psycopg."""
        text = query.as_string(None) if isinstance(query, sql.Composed) else query
        text = text.decode() if isinstance(text, bytes) else text
        return _Result(self._rows(text, params))

    @abc.abstractmethod
    def transaction(self) -> AbstractContextManager[Any]:
        """Return a savepoint in the app's transaction, or a transaction if none is open."""

    @contextmanager
    def settled(self) -> Generator[pool.Connection]:
        """Yield this object, with `pool.TEXT_SETTINGS` in force if the driver reports differences.

        The encoding is only changed on psycopg, since psycopg2 would not notice that.
        """
        own, driver = cast("pool.Connection", self), self._driver()
        before: dict[str, str] = {}
        if hasattr(driver, "info"):
            is_ours = isinstance(driver, (psycopg.Connection, psycopg.AsyncConnection))
            before = pool.differing(driver.info, encoding=is_ours)
        if not before:
            yield own
            return
        pool.adopt(own, before)
        try:
            yield own
        finally:
            pool.give_back(own, driver.info, before)

    @abc.abstractmethod
    def _driver(self) -> Any:
        """Return the driver's own connection."""

    @abc.abstractmethod
    def _rows(self, query: str, params: _Params) -> list[Row]:
        """Execute the statement and return its rows."""


def _loaded(rows: list[Row], columns: Iterable[Any]) -> list[Row]:
    """Load the JSON in rows with these columns of a cursor's description; return the rows."""
    for name in (column[0] for column in columns if column[1] == _JSONB_OID):
        for row in rows:
            if isinstance(row[name], str):
                row[name] = stored_json.load_json(row[name])
    return rows


class _SqlAlchemy(_Adapter):
    def __init__(self, conn: Any) -> None:
        super().__init__(conn, conn.dialect.name)

    def _rows(self, query: str, params: _Params) -> list[Row]:
        sqlalchemy = sys.modules["sqlalchemy"]
        text, values = _as_text(query, params)
        found = self._conn.execute(sqlalchemy.text(text), values)
        if not found.returns_rows:
            return []
        release = tuple(map(int, sqlalchemy.__version__.split(".")[:2]))
        is_text = self._conn.dialect.driver == "asyncpg" and release < (2, 1)
        columns = found.cursor.description if is_text else ()
        return _loaded([dict(row) for row in found.mappings()], columns)

    def transaction(self) -> AbstractContextManager[Any]:
        return self._conn.begin_nested()

    def _driver(self) -> Any:
        return self._conn.connection.driver_connection


def _as_text(query: str, params: _Params) -> tuple[str, dict[str, Any]]:
    """Return the statement with `:name` parameters for SQLAlchemy's `text()`, and their values."""
    values = dict(params) if isinstance(params, Mapping) else {}
    positional = iter([] if isinstance(params, Mapping) else params)

    def placed(match: re.Match[str]) -> str:
        if match[1]:
            return f":{match[1]}"
        if match[0] == "%s":
            name = f"p{len(values)}"
            values[name] = next(positional)
            return f":{name}"
        return {"%%": "%", ":": r"\:"}[match[0]]

    return _PLACEHOLDER.sub(placed, query), values


class _Django(_Adapter):
    def __init__(self, conn: Any) -> None:
        super().__init__(conn, conn.vendor)

    def _rows(self, query: str, params: _Params) -> list[Row]:
        with self._conn.cursor() as cursor:
            cursor.execute(query, params)
            columns = cursor.description or ()
            names = [column[0] for column in columns]
            rows = [dict(zip(names, row, strict=True)) for row in cursor] if names else []
        return _loaded(rows, columns)

    def transaction(self) -> AbstractContextManager[Any]:
        return sys.modules["django.db.transaction"].atomic(using=self._conn.alias)

    def _driver(self) -> Any:
        self._conn.ensure_connection()
        return self._conn.connection


_BLOCKING: dict[str, Callable[[Any], _Adapter]] = {
    "sqlalchemy.engine.base.Connection": _SqlAlchemy,
    # SQLModel and others replace the session's own execute(), so its connection is used.
    "sqlalchemy.orm.session.Session": lambda session: _SqlAlchemy(session.connection()),
    "sqlalchemy.orm.scoping.scoped_session": lambda session: _SqlAlchemy(session.connection()),
    "django.db.backends.base.base.BaseDatabaseWrapper": _Django,
    "django.utils.connection.ConnectionProxy": _Django,
}


def adapted(conn: Any, async_twin: str) -> AbstractContextManager[pool.Connection]:
    """Return an adapter of an app's connection that is not psycopg's, for `db.transaction`."""
    if isinstance(conn, _Adapter):
        return conn.settled()
    adapt = _by_class(conn, _BLOCKING)
    if adapt is None:
        instead = f"; it takes {async_twin or _ASYNC_TWIN}" if _by_class(conn, _ASYNC) else ""
        raise errors.UnknownConnection(
            "conn= takes a connection of psycopg, SQLAlchemy (a Session too) or Django, not a "
            f"{_class_name(conn)}{instead}"
        )
    return adapt(conn).settled()


def _by_class(conn: Any, table: Mapping[str, T]) -> T | None:
    """Return the entry for the connection's class or its nearest base; None if there is none."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(conn).__mro__)
    return next((table[name] for name in names if name in table), None)


def _class_name(conn: Any) -> str:
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


async def call_async(function: Callable[..., R], conn: Any, *args: Any, **keywords: Any) -> R:
    """Call a function that takes `conn=`, without blocking the event loop; return its result.

    `conn` is an asynchronous connection whose transaction the call joins. None stands for a
    connection of the engine in another thread, where a cancelled call may still take effect.
    """
    if conn is None:
        return await asyncio.to_thread(function, *args, **keywords)
    run = _runner(conn, f"{function.__module__.rpartition('.')[2]}.{function.__name__}")
    return await run(conn, lambda own: function(*args, conn=own, **keywords))


async def fetch_async(conn: Any, query: bytes, params: _Params, *, blocking_twin: str) -> list[Row]:
    """Return the rows of one statement on an asynchronous connection of the app.

    Raises `UnknownConnection`, which recommends `blocking_twin` for a synchronous connection.
    """
    run = _runner(conn, blocking_twin)
    if isinstance(conn, psycopg.AsyncConnection) and not pool.differing(conn.info):
        # This needs no thread, unlike `call_async`. A loop has few, and all of them could wait for
        # a transaction with the same idempotency key, which may need one to end.
        return await _fetch(cast("psycopg.AsyncConnection[Any]", conn), query, params)

    def fetch(own: _Adapter) -> list[Row]:
        with own.settled() as settled:
            return settled.execute(query, params).fetchall()

    return await run(conn, fetch)


def _runner(conn: Any, blocking_twin: str) -> _Runner:
    run = _by_class(conn, _ASYNC)
    if run is None:
        blocks = pool.is_psycopg(conn) or _by_class(conn, _BLOCKING) is not None
        raise errors.UnknownConnection(
            "conn= takes an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession, not a "
            f"{_class_name(conn)}{f'; one that blocks takes {blocking_twin}()' if blocks else ''}"
        )
    return run


_Operation: TypeAlias = "Callable[[_Adapter], Any]"
_Runner: TypeAlias = "Callable[[Any, _Operation], Coroutine[Any, Any, Any]]"
"""Runs an operation on an asynchronous connection, in the transaction that is open on it."""


async def _fetch(conn: psycopg.AsyncConnection[Any], query: Any, params: _Params) -> list[Row]:
    async with conn.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(query, params)
        return await cursor.fetchall() if cursor.description else []


async def _on_connection(conn: Any, operation: _Operation) -> Any:
    def work(blocking: Any) -> Any:
        return operation(_SqlAlchemy(blocking))

    return await conn.run_sync(work)


async def _on_session(session: Any, operation: _Operation) -> Any:
    return await _on_connection(await session.connection(), operation)


class _Bridge(_Adapter):
    """Executes statements of another thread on the event loop, with a psycopg AsyncConnection."""

    def __init__(self, conn: Any) -> None:
        super().__init__(conn)
        self._loop = asyncio.get_running_loop()
        self._statement: asyncio.Task[list[Row]] | None = None
        self._is_cancelled = False

    def _driver(self) -> Any:
        return self._conn

    def cancel(self) -> None:
        """Cancel the running statement and refuse further ones; called on the event loop."""
        self._is_cancelled = True
        if self._statement is not None:
            self._statement.cancel()

    def _rows(self, query: str, params: _Params) -> list[Row]:
        return self._await(self._execute(query, params))

    async def _execute(self, query: str, params: _Params) -> list[Row]:
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._statement = cast("asyncio.Task[list[Row]]", asyncio.current_task())
        try:
            return await _fetch(self._conn, query, params)
        finally:
            self._statement = None

    def _await(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @contextmanager
    def transaction(self) -> Generator[None]:
        block = self._conn.transaction()
        self._await(block.__aenter__())
        try:
            yield
        except BaseException as error:
            self._await(block.__aexit__(type(error), error, error.__traceback__))
            raise
        self._await(block.__aexit__(None, None, None))


async def _on_psycopg(conn: Any, operation: _Operation) -> Any:
    bridge = _Bridge(conn)
    work = asyncio.ensure_future(asyncio.to_thread(operation, bridge))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # The caller will use its connection again, so wait until this call has ended.
        bridge.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # read, so that asyncio does not report it as never retrieved
        raise


_ASYNC: dict[str, _Runner] = {
    "psycopg.AsyncConnection": _on_psycopg,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": _on_connection,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _on_session,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _on_session,
}
