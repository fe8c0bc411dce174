"""The connections of hosts that a job may be queued on: whose transaction is joined, never ended.

Frameworks are known by the names of their classes and reached through the host's own imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg.rows import tuple_row

from queue_workflows import errors
from queue_workflows.engine import ingest_jobs
from queue_workflows.tasks import job_validation
from queue_workflows.types import JobId

T = TypeVar("T")
_Rows: TypeAlias = "Sequence[Sequence[Any]]"
_AS_TEXT = ingest_jobs.PUT.replace("%(prefix)s", ":prefix").replace("%(jobs)s", ":jobs")
"""The statement as SQLAlchemy's `text()` takes it, for any driver."""


def is_own(conn: Any) -> bool:
    """Whether it is a connection of psycopg's, which the engine's own statements run on as well."""
    return isinstance(conn, psycopg.Connection)


def put(conn: Any, call: job_validation.Call) -> list[JobId]:
    """Insert the jobs of a call on a host's connection; their ids in order.

    Raises `UnknownConnection` before any write, and what `ingest_jobs.put` raises.
    """
    if is_own(conn):
        return ingest_jobs.put(conn, call)
    ask = known(conn, _SYNC)
    if ask is None:
        instead = "; its kind takes enqueue_ingest_job_async()" if known(conn, _ASYNC) else ""
        raise errors.UnknownConnection(
            "conn= takes a connection of psycopg, SQLAlchemy (a Session too) or Django, not a "
            f"{class_name(conn)}{instead}"
        )
    return call.ids(ask(conn, {"prefix": call.prefix, "jobs": call.jobs}))


async def put_async(conn: Any, call: job_validation.Call) -> list[JobId]:
    """`put` on an asynchronous connection."""
    ask = known(conn, _ASYNC)
    if ask is None:
        blocks = is_own(conn) or known(conn, _SYNC) is not None
        instead = "; one that blocks takes enqueue_ingest_job()" if blocks else ""
        raise errors.UnknownConnection(
            "conn= takes an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession, not a "
            f"{class_name(conn)}{instead}"
        )
    return call.ids(await ask(conn, {"prefix": call.prefix, "jobs": call.jobs}))


_Ask: TypeAlias = "Callable[[Any, dict[str, Any]], Any]"


def known(conn: Any, by_class: Mapping[str, T]) -> T | None:
    """Return the member for the connection's class or its nearest base; None if there is none."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(conn).__mro__)
    return next((by_class[name] for name in names if name in by_class), None)


def class_name(conn: Any) -> str:
    """Return the name of the connection's class, with its module."""
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _text(conn: Any) -> Any:
    """The statement for a SQLAlchemy connection; `UnknownConnection` for another database."""
    if conn.dialect.name != "postgresql":
        raise errors.UnknownConnection(f"conn= leads to {conn.dialect.name}, not to PostgreSQL")
    return sys.modules["sqlalchemy"].text(_AS_TEXT)


def _connection(conn: Any, values: dict[str, Any]) -> _Rows:
    return conn.execute(_text(conn), values).fetchall()


def _session(conn: Any, values: dict[str, Any]) -> _Rows:
    # Not its execute(), which SQLModel's and others' sessions have taken for their own.
    return _connection(conn.connection(), values)


def _django(conn: Any, values: dict[str, Any]) -> _Rows:
    if conn.vendor != "postgresql":
        raise errors.UnknownConnection(f"conn= leads to {conn.vendor}, not to PostgreSQL")
    with conn.cursor() as cursor:
        cursor.execute(ingest_jobs.PUT, values)
        return cursor.fetchall()


async def _psycopg_async(conn: Any, values: dict[str, Any]) -> _Rows:
    async with conn.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(ingest_jobs.PUT, values)
        return await cursor.fetchall()


async def _connection_async(conn: Any, values: dict[str, Any]) -> _Rows:
    return (await conn.execute(_text(conn), values)).fetchall()


async def _session_async(conn: Any, values: dict[str, Any]) -> _Rows:
    return await _connection_async(await conn.connection(), values)


_SYNC: dict[str, _Ask] = {
    "sqlalchemy.engine.base.Connection": _connection,
    "sqlalchemy.orm.session.Session": _session,
    "sqlalchemy.orm.scoping.scoped_session": _session,
    "django.db.backends.base.base.BaseDatabaseWrapper": _django,
    "django.utils.connection.ConnectionProxy": _django,
}
_ASYNC: dict[str, _Ask] = {
    "psycopg.AsyncConnection": _psycopg_async,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": _connection_async,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _session_async,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _session_async,
}
