"""Open connections of every kind that an app may pass as `conn=`, on the test's database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import asyncpg
import django
import django.db
import psycopg
import psycopg2
import sqlalchemy
from django import conf
from psycopg import conninfo
from sqlalchemy import orm, pool
from sqlalchemy.ext import asyncio as sa


class AppConnection(NamedTuple):
    """An app's connection, and how it ends its transaction."""

    conn: Any
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


class OwnSession(orm.Session):
    """A session whose `execute` is another's, as SQLModel's is."""

    def execute(self, *args: Any, **keywords: Any) -> Any:
        raise AssertionError("not for us")


@contextmanager
def _psycopg(dsn: str) -> Iterator[AppConnection]:
    with psycopg.connect(dsn) as conn:
        yield AppConnection(conn, conn.commit, conn.rollback)


@contextmanager
def engine(dsn: str, driver: str) -> Iterator[sqlalchemy.Engine]:
    connect = {"psycopg": psycopg, "psycopg2": psycopg2}[driver].connect
    made = sqlalchemy.create_engine(
        f"postgresql+{driver}://", creator=lambda: connect(dsn), poolclass=pool.NullPool
    )
    yield made
    made.dispose()


def _connection(driver: str) -> Callable[[str], Any]:
    @contextmanager
    def opened(dsn: str) -> Iterator[AppConnection]:
        with engine(dsn, driver) as made, made.connect() as conn:
            yield AppConnection(conn, conn.commit, conn.rollback)

    return opened


def _session(driver: str, cls: type[orm.Session] = orm.Session) -> Callable[[str], Any]:
    @contextmanager
    def opened(dsn: str) -> Iterator[AppConnection]:
        with engine(dsn, driver) as made, cls(made) as session:
            yield AppConnection(session, session.commit, session.rollback)

    return opened


@contextmanager
def _scoped(dsn: str) -> Iterator[AppConnection]:
    with engine(dsn, "psycopg") as made:
        session = orm.scoped_session(orm.sessionmaker(made))
        yield AppConnection(session, session.commit, session.rollback)
        session.remove()


def _settings(dsn: str) -> dict[str, Any]:
    parts: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    names = {
        "dbname": "NAME",
        "user": "USER",
        "password": "PASSWORD",
        "host": "HOST",
        "port": "PORT",
    }
    given = {name: str(parts[key]) for key, name in names.items() if key in parts}
    return {"ENGINE": "django.db.backends.postgresql", **given}


def _django(choose: Callable[[], Any]) -> Callable[[str], Any]:
    @contextmanager
    def opened(dsn: str) -> Iterator[AppConnection]:
        if not conf.settings.configured:
            conf.settings.configure(USE_TZ=True, DATABASES={"default": _settings(dsn)})
            django.setup()
        conn = choose()
        conn.set_autocommit(False)
        yield AppConnection(conn, conn.commit, conn.rollback)
        django.db.connections.close_all()

    return opened


KINDS: dict[str, Callable[[str], Any]] = {
    "psycopg": _psycopg,
    "sqlalchemy connection, psycopg": _connection("psycopg"),
    "sqlalchemy connection, psycopg2": _connection("psycopg2"),
    "sqlalchemy session, psycopg": _session("psycopg"),
    "sqlalchemy session, psycopg2": _session("psycopg2"),
    "sqlalchemy session of a kind of its own": _session("psycopg", OwnSession),
    "sqlalchemy scoped session": _scoped,
    "django's connection": _django(lambda: django.db.connection),
    "django's connections": _django(lambda: django.db.connections["default"]),
}


class AsyncAppConnection(NamedTuple):
    """As `AppConnection`, to be awaited."""

    conn: Any
    commit: Callable[[], Awaitable[Any]]
    rollback: Callable[[], Awaitable[Any]]


@asynccontextmanager
async def _psycopg_async(dsn: str) -> AsyncIterator[AsyncAppConnection]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield AsyncAppConnection(conn, conn.commit, conn.rollback)


@asynccontextmanager
async def _async_engine(dsn: str, driver: str) -> AsyncIterator[sa.AsyncEngine]:
    parts: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    names = {"dbname": "database"}
    given = {
        names.get(k, k): v for k, v in parts.items() if k in ("dbname", "user", "host", "port")
    }

    async def connect() -> Any:
        if driver == "psycopg":
            return await psycopg.AsyncConnection.connect(dsn)
        return await asyncpg.connect(**given, password=parts.get("password"))

    engine = sa.create_async_engine(
        f"postgresql+{driver}://", async_creator=connect, poolclass=pool.NullPool
    )
    yield engine
    await engine.dispose()


def _async_connection(driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[AsyncAppConnection]:
        async with _async_engine(dsn, driver) as engine, engine.connect() as conn:
            yield AsyncAppConnection(conn, conn.commit, conn.rollback)

    return opened


def _async_session(driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[AsyncAppConnection]:
        async with _async_engine(dsn, driver) as engine, sa.AsyncSession(engine) as session:
            yield AsyncAppConnection(session, session.commit, session.rollback)

    return opened


@asynccontextmanager
async def _async_scoped(dsn: str) -> AsyncIterator[AsyncAppConnection]:
    async with _async_engine(dsn, "asyncpg") as engine:
        made = sa.async_sessionmaker(engine)
        session = sa.async_scoped_session(made, scopefunc=asyncio.current_task)
        yield AsyncAppConnection(session, session.commit, session.rollback)
        await session.remove()


ASYNC_KINDS: dict[str, Callable[[str], Any]] = {
    "psycopg": _psycopg_async,
    "sqlalchemy connection, psycopg": _async_connection("psycopg"),
    "sqlalchemy connection, asyncpg": _async_connection("asyncpg"),
    "sqlalchemy session, psycopg": _async_session("psycopg"),
    "sqlalchemy session, asyncpg": _async_session("asyncpg"),
    "sqlalchemy scoped session": _async_scoped,
}
