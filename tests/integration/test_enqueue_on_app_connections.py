"""Jobs queued on an app's own connection of any kind take part in its transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent import futures
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import pool

from queue_workflows import config, errors, node_queue
from queue_workflows import jobs as jobs_api
from queue_workflows.types import JobId
from tests.support import factories
from tests.support.connections import ASYNC_KINDS, KINDS, AsyncAppConnection, engine

READY = ("ingest_job_ready", "fetch")
JOB: Any = {"task_name": "t", "queue": "fetch"}


@pytest.fixture(autouse=True)
def task(clean_process: None) -> None:
    config.register_ingest_task("t", lambda reason: {})


# --- connections that block --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_exist_if_and_only_if_the_apps_transaction_commits(
    kind: str, conn: Any, dsn: str, heard: Callable[[], Any]
) -> None:
    def put() -> list[JobId]:
        kept = jobs_api.enqueue(**JOB, args={"%s": ":a"}, conn=host.conn)
        keyed = jobs_api.enqueue(**JOB, idempotency_key="k", conn=host.conn)
        again = jobs_api.enqueue(**JOB, idempotency_key="k", conn=host.conn)
        assert (again, keyed.created, again.created) == (keyed, True, False)
        jobs: Any = [{"args": {"n": 1}, "headers": {"a": "é"}}, {"idempotency_key": "l"}]
        return [kept, keyed, *jobs_api.enqueue_many(jobs, **JOB, conn=host.conn)]

    with KINDS[kind](dsn) as host:
        put()
        host.rollback()
        assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0
        ids = put()
        with pytest.raises(errors.IdempotencyClash):
            jobs_api.enqueue(**JOB, args={"n": 5}, idempotency_key="k", conn=host.conn)
        assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0
        assert heard() == []
        host.commit()
        assert factories.column(conn, "SELECT id FROM ingest_jobs ORDER BY seq") == ids
        assert heard() == [READY]
    assert node_queue.get_ingest_job(ids[0])["args"] == {"%s": ":a"}  # type: ignore[index]
    assert node_queue.get_ingest_job(ids[2])["headers"] == {"a": "é"}  # type: ignore[index]


def test_in_autocommit_a_job_is_there_at_once(conn: Any, dsn: str) -> None:
    with KINDS["django's connection"](dsn) as host:
        host.conn.set_autocommit(True)
        job_id = jobs_api.enqueue(**JOB, conn=host.conn)
        assert node_queue.get_ingest_job(job_id) is not None
    with engine(dsn, "psycopg2") as made, made.connect() as theirs:
        theirs = theirs.execution_options(isolation_level="AUTOCOMMIT")
        job_id = jobs_api.enqueue(**JOB, conn=theirs)
        assert node_queue.get_ingest_job(job_id) is not None


# --- connections of an event loop --------------------------------------------------------------


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_jobs_come_and_go_with_an_asynchronous_transaction(
    kind: str, conn: Any, dsn: str, heard: Callable[[], Any]
) -> None:
    one, many = jobs_api.enqueue_async, jobs_api.enqueue_many_async

    async def put(host: AsyncAppConnection) -> list[JobId]:
        kept = await one(**JOB, args={"%s": ":a"}, conn=host.conn)
        keyed = await one(**JOB, idempotency_key="k", conn=host.conn)
        again = await one(**JOB, idempotency_key="k", conn=host.conn)
        assert (again, keyed.created, again.created) == (keyed, True, False)
        return [kept, keyed, *await many(args=[{"n": 1}, {"n": 2}], **JOB, conn=host.conn)]

    async def story() -> list[JobId]:
        async with ASYNC_KINDS[kind](dsn) as host:
            await put(host)
            await host.rollback()
            assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0
            ids = await put(host)
            with pytest.raises(errors.IdempotencyClash):
                await one(**JOB, args={"n": 5}, idempotency_key="k", conn=host.conn)
            assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0
            await host.commit()
            return ids

    ids = asyncio.run(story())
    assert factories.column(conn, "SELECT id FROM ingest_jobs ORDER BY seq") == ids
    assert heard() == [READY]


WAITS = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


def test_a_call_that_waits_for_a_key_holds_no_thread_of_the_loop(conn: Any, dsn: str) -> None:
    """The transaction that has the key may need one to end."""

    async def story() -> tuple[JobId, JobId]:
        asyncio.get_running_loop().set_default_executor(futures.ThreadPoolExecutor(1))
        connect = ASYNC_KINDS["psycopg"]
        async with connect(dsn) as mine, connect(dsn) as other:
            first = await jobs_api.enqueue_async(**JOB, idempotency_key="k", conn=mine.conn)
            await other.conn.execute("SET LOCAL lock_timeout = '20s'")
            second = jobs_api.enqueue_async(**JOB, idempotency_key="k", conn=other.conn)
            asked = asyncio.ensure_future(second)
            while not factories.one(conn, WAITS):
                await asyncio.sleep(0.01)
            found = await jobs_api.get_async(first, conn=mine.conn)
            assert found is not None and not asked.done()
            await mine.commit()
            return first, await asked

    first, second = asyncio.run(asyncio.wait_for(story(), 60))
    assert (second, second.created) == (first, False)


def test_without_a_connection_the_loop_goes_on(conn: Any, db: ModuleType) -> None:
    async def story() -> tuple[JobId, JobId, list[JobId]]:
        with conn.transaction():
            first = jobs_api.enqueue(**JOB, idempotency_key="k", conn=conn)
            asked = asyncio.ensure_future(jobs_api.enqueue_async(**JOB, idempotency_key="k"))
            with db.connect() as other:
                while not factories.one(other, WAITS):
                    await asyncio.sleep(0.01)
            assert not asked.done()
        return first, await asked, await jobs_api.enqueue_many_async(args=[{}, {}], **JOB)

    first, second, more = asyncio.run(asyncio.wait_for(story(), 30))
    assert (second, second.created) == (first, False)
    assert len({first, *more}) == 3


def test_what_cannot_be_is_refused_on_the_loop_as_well(conn: Any, dsn: str) -> None:
    async def story() -> None:
        async with ASYNC_KINDS["psycopg"](dsn) as host:
            for theirs in (None, host.conn):
                with pytest.raises(errors.InvalidJob, match="'timeout_s'"):
                    await jobs_api.enqueue_async(**JOB, timeout_s=-1, conn=theirs)
                with pytest.raises(errors.InvalidJob, match="job 1: 'que' is none"):
                    await jobs_api.enqueue_many_async(
                        [{}, {"que": 1}],
                        **JOB,
                        conn=theirs,  # type: ignore[list-item]
                    )
                with pytest.raises(TypeError, match="que"):
                    await jobs_api.enqueue_async(**JOB, que=1, conn=theirs)
            await host.commit()

    asyncio.run(story())
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0


# --- what is no connection ---------------------------------------------------------------------


def test_an_object_that_is_no_connection_is_refused(db: ModuleType, dsn: str) -> None:
    lite = sqlalchemy.create_engine("sqlite://", poolclass=pool.NullPool)

    async def story() -> None:
        async with ASYNC_KINDS["sqlalchemy session, asyncpg"](dsn) as host:
            with pytest.raises(errors.UnknownConnection, match=r"jobs\.enqueue_async\(\)"):
                jobs_api.enqueue(**JOB, conn=host.conn)
        refused = pytest.raises(errors.UnknownConnection, match=r"takes jobs\.enqueue\(\)")
        with KINDS["sqlalchemy session, psycopg2"](dsn) as host, refused:
            await jobs_api.enqueue_async(**JOB, conn=host.conn)
        with pytest.raises(errors.UnknownConnection, match=r"not a builtins\.object$"):
            await jobs_api.enqueue_many_async(args=[{}], **JOB, conn=object())

    asyncio.run(story())
    with lite.connect() as theirs, pytest.raises(errors.UnknownConnection, match="leads to sqlite"):
        jobs_api.enqueue(**JOB, conn=theirs)
    plain = sqlite3.connect(":memory:")
    with pytest.raises(TypeError, match=r"Django, not a sqlite3\.Connection$"):
        jobs_api.enqueue(**JOB, conn=plain)
    plain.close()
