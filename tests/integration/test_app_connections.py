"""Runs submitted, answered, retried and cancelled on the app's own connection, of any kind."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import pool

import queue_workflows
from queue_workflows import errors, node_queue, run_store
from queue_workflows import runs as runs_api
from tests.support import factories, flow
from tests.support.connections import ASYNC_KINDS, KINDS, AsyncAppConnection, engine
from tests.support.database import environment

CONTEXT = {"%s": ":a", "words": ["é", {"n": None}], "n": 1.5}


pytestmark = pytest.mark.usefixtures("invariants_hold")


@pytest.fixture
def app(toy: flow.Flow) -> flow.Flow:
    queue_workflows.config.register_ingest_task("t", lambda reason, args: {})
    toy.define(
        flow.ask("q"),
        flow.step("s", depends_on=["q"]),
        s=flow.nodes(a=""),
    )
    return toy


def asking(app: flow.Flow) -> str:
    """A run whose node `q` waits for its answer; its id."""
    run_id = app.started()
    assert node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"]) is not None
    app.look()
    return run_id


def over(app: flow.Flow) -> str:
    """A cancelled run; its id."""
    run_id = app.started()
    queue_workflows.cancel_run(run_id)
    return run_id


def answers(conn: Any) -> list[Any]:
    return factories.column(
        conn, "SELECT value FROM workflow_input_submissions ORDER BY created_at"
    )


# --- connections that block --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_comes_and_goes_with_the_apps_transaction(
    kind: str, app: flow.Flow, conn: Any, dsn: str
) -> None:
    def insert() -> dict[str, Any]:
        return run_store.insert_run(
            workflow_name="w", context=CONTEXT, parcel_id="p", out_dir="/x", conn=host.conn
        )

    with KINDS[kind](dsn) as host:
        insert()
        host.rollback()
        assert factories.one(conn, "SELECT count(*) FROM workflow_runs") == 0
        row = insert()
        assert run_store.get_run(row["id"]) is None
        host.commit()
    assert row == run_store.get_run(row["id"])
    assert row["context"] == CONTEXT
    assert row["steps_done"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_comes_and_goes_with_the_apps_transaction(
    kind: str, app: flow.Flow, conn: Any, dsn: str
) -> None:
    run_id = asking(app)
    with KINDS[kind](dsn) as host:
        queue_workflows.submit_input(run_id, "q", {"f": ":x %s"}, conn=host.conn)
        host.rollback()
        assert answers(conn) == []
        queue_workflows.submit_input(run_id, "q", "x.csv", check=True, conn=host.conn)
        with pytest.raises(errors.InputRefused, match="answered already"):
            queue_workflows.submit_input(run_id, "q", "y.csv", conn=host.conn)
        with pytest.raises(errors.InputRefused):
            queue_workflows.submit_input(run_id, "q", 5, check=True, conn=host.conn)
        with pytest.raises(errors.UnknownJob):
            queue_workflows.submit_input(run_id, "nope", 1, conn=host.conn)
        host.commit()
    assert answers(conn) == ["x.csv"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_cancelled_and_retried_with_the_apps_transaction(
    kind: str, app: flow.Flow, dsn: str
) -> None:
    run_id = app.started()
    with KINDS[kind](dsn) as host:
        queue_workflows.cancel_run(run_id, conn=host.conn)
        host.rollback()
        assert flow.status(run_id) == "running"
        row = queue_workflows.cancel_run(run_id, conn=host.conn)
        assert row is not None
        assert (row["status"], row["definition"]["workflow"]) == ("cancelled", "w")
        assert queue_workflows.cancel_run(run_id, conn=host.conn) is None
        host.commit()
        assert flow.status(run_id) == "cancelled"
        assert queue_workflows.retry_run(run_id, conn=host.conn)["status"] == "queued"
        host.rollback()
        assert flow.status(run_id) == "cancelled"
        row = queue_workflows.retry_run(run_id, from_node="q", conn=host.conn)
        assert (row["status"], row["generation"]) == ("queued", 2)
        with pytest.raises(errors.InvalidConfig, match="only a finished one is retried"):
            queue_workflows.retry_run(run_id, conn=host.conn)
        host.commit()
    assert flow.status(run_id) == "queued"


def test_in_autocommit_each_call_takes_effect_at_once_and_whole(
    app: flow.Flow, conn: Any, dsn: str
) -> None:
    run_id = asking(app)
    app.define({"id": "m", "kind": "map", "over": [1], "pipeline": "s"}, name="mapped")
    with KINDS["django's connection"](dsn) as host:
        host.conn.set_autocommit(True)
        queue_workflows.submit_input(run_id, "q", "x", conn=host.conn)
        assert answers(conn) == ["x"]
        given = {"workflow_name": "mapped", "run_id": "own", "conn": host.conn}
        assert run_store.insert_run(**given)["id"] == "own"
        assert run_store.get_run("own") is not None
        app.look()
        queue_workflows.cancel_run("own", conn=host.conn)
        assert flow.status("own") == "cancelled"
        before = flow.jobs("own")
        conn.execute(
            "CREATE FUNCTION app_guard() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'after the write'; END $$;"
            "CREATE TRIGGER app_guard BEFORE DELETE ON workflow_run_maps FOR EACH ROW"
            " EXECUTE FUNCTION app_guard()"
        )
        try:
            with pytest.raises(Exception, match="after the write"):
                queue_workflows.retry_run("own", from_node="m", conn=host.conn)
        finally:
            conn.execute("DROP FUNCTION app_guard() CASCADE")
        assert (flow.status("own"), flow.jobs("own")) == ("cancelled", before)
        queue_workflows.retry_run("own", from_node="m", conn=host.conn)
        assert flow.status("own") == "queued"


# --- settings of the app's session -------------------------------------------------------------

STRANGE = "-c DateStyle=German -c IntervalStyle=sql_standard -c standard_conforming_strings=off"
EURO = {"price": "5 \N{EURO SIGN}"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_an_apps_session_change_nothing(
    kind: str, app: flow.Flow, conn: Any, dsn: str
) -> None:
    run_id, waiting = over(app), asking(app)
    encoding = {} if "2" in kind else {"PGCLIENTENCODING": "LATIN1"}
    with environment(PGOPTIONS=STRANGE, **encoding), KINDS[kind](dsn) as host:
        job_id = queue_workflows.jobs.enqueue(
            task_name="t", queue="fetch", args=EURO, conn=host.conn
        )
        job = queue_workflows.jobs.get(job_id, conn=host.conn)
        made = runs_api.submit("w", inputs=EURO, conn=host.conn)
        assert runs_api.get(made["id"], conn=host.conn) == made
        runs_api.answer(waiting, "q", EURO, conn=host.conn)
        assert runs_api.retry(run_id, conn=host.conn)["status"] == "queued"
        assert (runs_api.cancel(made["id"], conn=host.conn) or {})["status"] == "cancelled"
        host.commit()
    assert job == queue_workflows.jobs.get(job_id)
    assert (job or {})["args"] == EURO == answers(conn)[0]


def with_json(conn: Any) -> str:
    """A job with texts in its JSON that look like other JSON; its id."""
    job_id = factories.ingest(conn, args={"n": [1]}, headers={"a": "b"})["id"]
    conn.execute(
        "UPDATE ingest_jobs SET result = %s, progress = %s WHERE id = %s",
        ('"[not JSON"', '"[1/3] load"', job_id),
    )
    return job_id


@pytest.mark.parametrize("kind", KINDS)
def test_json_comes_back_as_it_is_on_every_kind_of_connection(
    kind: str, app: flow.Flow, conn: Any, dsn: str
) -> None:
    job_id = with_json(conn)
    with KINDS[kind](dsn) as host:
        assert queue_workflows.jobs.get(job_id, conn=host.conn) == queue_workflows.jobs.get(job_id)


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_and_on_every_asynchronous_kind(kind: str, app: flow.Flow, conn: Any, dsn: str) -> None:
    job_id = with_json(conn)

    async def read() -> dict[str, Any] | None:
        async with ASYNC_KINDS[kind](dsn) as host:
            return await queue_workflows.jobs.get_async(job_id, conn=host.conn)

    assert asyncio.run(read()) == queue_workflows.jobs.get(job_id)


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_nor_do_those_of_an_asynchronous_one(kind: str, app: flow.Flow, dsn: str) -> None:
    async def story() -> dict[str, Any] | None:
        with environment(PGOPTIONS=STRANGE, PGCLIENTENCODING="LATIN1"):
            async with ASYNC_KINDS[kind](dsn) as host:
                made = await queue_workflows.jobs.enqueue_async(
                    task_name="t", queue="fetch", args=EURO, conn=host.conn
                )
                job = await queue_workflows.jobs.get_async(made, conn=host.conn)
                await host.commit()
                return job

    job = asyncio.run(story())
    assert job is not None
    assert job == queue_workflows.jobs.get(job["id"])


@pytest.mark.parametrize("autocommit", [True, False])
def test_the_app_has_its_own_settings_after_each_call(
    autocommit: bool, app: flow.Flow, dsn: str
) -> None:
    def shown() -> list[Any]:
        names = ("DateStyle", "IntervalStyle", "client_encoding", "standard_conforming_strings")
        return [own.execute(f"SHOW {name}").fetchone() for name in names]

    with psycopg.connect(dsn, autocommit=autocommit, options=STRANGE) as own:
        own.execute("SET client_encoding TO LATIN1")
        own.commit()
        before = shown()
        runs_api.submit("w", run_id="r", inputs=EURO, conn=own)
        assert shown() == before
        with pytest.raises(errors.UnknownJob):
            runs_api.retry("none", conn=own)
        assert shown() == before
        with pytest.raises(psycopg.errors.UniqueViolation):
            runs_api.submit("w", run_id="r", conn=own)
        own.rollback()
        assert shown() == before


# --- connections of an event loop --------------------------------------------------------------


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_all_four_join_an_asynchronous_transaction(
    kind: str, app: flow.Flow, conn: Any, dsn: str
) -> None:
    waiting, ended, live = asking(app), over(app), app.started()

    async def work(host: AsyncAppConnection) -> dict[str, Any]:
        row = await runs_api.submit_async(workflow_name="w", inputs=CONTEXT, conn=host.conn)
        await runs_api.answer_async(waiting, "q", "x", check=True, conn=host.conn)
        with pytest.raises(errors.InputRefused, match="answered already"):
            await runs_api.answer_async(waiting, "q", "y", conn=host.conn)
        again = await runs_api.retry_async(ended, from_node="q", conn=host.conn)
        assert again["status"] == "queued"
        gone = await runs_api.cancel_async(live, conn=host.conn)
        assert gone is not None
        return row

    async def story() -> dict[str, Any]:
        async with ASYNC_KINDS[kind](dsn) as host:
            await work(host)
            await host.rollback()
            assert answers(conn) == []
            assert factories.one(conn, "SELECT count(*) FROM workflow_runs") == 3
            assert (flow.status(ended), flow.status(live)) == (
                "cancelled",
                "running",
            )
            row = await work(host)
            await host.commit()
            return row

    row = asyncio.run(story())
    assert row == run_store.get_run(row["id"])
    assert answers(conn) == ["x"]
    assert (flow.status(ended), flow.status(live)) == ("queued", "cancelled")


def test_without_a_connection_they_work_beside_the_loop(app: flow.Flow, conn: Any) -> None:
    waiting = asking(app)

    async def story() -> str:
        row = await runs_api.submit_async(workflow_name="w", run_id="own")
        assert await runs_api.cancel_async("own") is not None
        assert (await runs_api.retry_async("own"))["status"] == "queued"
        await runs_api.answer_async(waiting, "q", "x")
        return row["id"]

    assert asyncio.run(story()) == "own"
    assert (flow.status("own"), answers(conn)) == ("queued", ["x"])


def test_a_call_that_is_cancelled_leaves_the_connection_usable(
    app: flow.Flow, conn: Any, dsn: str, db: ModuleType
) -> None:
    run_id = over(app)
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )

    async def story() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            with conn.transaction():
                conn.execute("SELECT FROM workflow_runs WHERE id = %s FOR UPDATE", (run_id,))
                asked = asyncio.ensure_future(runs_api.retry_async(run_id, conn=mine))
                with db.connect() as other:
                    while not factories.one(other, waits):
                        await asyncio.sleep(0.01)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            await mine.rollback()
            assert (await runs_api.retry_async(run_id, conn=mine))["status"] == "queued"

    asyncio.run(asyncio.wait_for(story(), 30))
    assert flow.status(run_id) == "queued"


# --- what is no connection ---------------------------------------------------------------------


def test_an_object_that_is_no_connection_is_refused(app: flow.Flow, dsn: str) -> None:
    async def story() -> None:
        async with ASYNC_KINDS["sqlalchemy session, asyncpg"](dsn) as host:
            with pytest.raises(errors.UnknownConnection, match="whose name ends in _async"):
                queue_workflows.cancel_run("r", conn=host.conn)
        refused = pytest.raises(errors.UnknownConnection, match=r"takes runs\.retry\(\)$")
        with KINDS["sqlalchemy session, psycopg2"](dsn) as host, refused:
            await runs_api.retry_async("r", conn=host.conn)
        with pytest.raises(errors.UnknownConnection, match=r"not a builtins\.object$"):
            await runs_api.submit_async(workflow_name="w", conn=object())

    asyncio.run(story())
    lite = sqlalchemy.create_engine("sqlite://", poolclass=pool.NullPool)
    with lite.connect() as theirs, pytest.raises(errors.UnknownConnection, match="leads to sqlite"):
        run_store.insert_run(workflow_name="w", conn=theirs)
    with pytest.raises(TypeError, match=r"Django, not a builtins\.object$"):
        queue_workflows.submit_input("r", "q", 1, conn=object())
    with engine(dsn, "psycopg2") as made, made.connect() as theirs:
        alone = theirs.execution_options(isolation_level="AUTOCOMMIT")
        assert run_store.insert_run(workflow_name="w", run_id="own", conn=alone)["id"] == "own"
        assert run_store.get_run("own") is not None
