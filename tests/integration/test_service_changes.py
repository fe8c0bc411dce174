"""The stream of changes: after an error, and behind many others."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any, NamedTuple

import psycopg
import pytest

import queue_workflows
from queue_workflows import db, history, jobs, service
from tests.support import http_service, wait
from tests.support.asgi_service import streamed


@pytest.fixture(autouse=True)
def _queues(db: Any) -> None:
    queue_workflows.configure(ingest_queues={"load.a", "load.b"})
    queue_workflows.register_ingest_task("load", lambda args: None)


class Read(NamedTuple):
    """A statement of the thread that follows changes."""

    at: float
    is_first: bool
    """Whether it reads the first page of what is new."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    found: list[Read] = []
    execute = psycopg.Connection.execute

    def counted(self: Any, query: Any, given: Any = None, **keywords: Any) -> Any:
        if threading.current_thread().name == "service-changes":
            is_first = given is not None and given.get("at", "") is None
            found.append(Read(time.monotonic(), is_first))
        return execute(self, query, given, **keywords)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    return found


def enqueue(queue: str = "load.a") -> str:
    return jobs.enqueue_once("load", queue=queue, by="a test")[0]


def place(ago_s: float = 0.0) -> str:
    return f"{int((history.feed().now.timestamp() - ago_s) * 1_000_000)}-i1"


def test_an_error_of_the_database_loses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    feed, failed = history.feed, []
    begun: list[bool] = []

    def once(*args: Any, **keywords: Any) -> Any:
        if begun and not failed:
            failed.append(True)
            raise db.OperationalError("the server was restarted")
        return feed(*args, **keywords)

    def opened() -> None:
        begun.append(True)  # before the change, which the stream may read at once
        found.append(enqueue())

    monkeypatch.setattr(history, "feed", once)
    status, text = streamed(
        opened=opened,
        until=lambda text: bool(found) and found[0] in text,
    )
    assert (status, found[0] in text, failed) == (200, True, [True])


def test_changes_of_others_do_not_put_a_reader_too_far_behind(db: Any, conn: db.Connection) -> None:
    last = place()
    mine = enqueue("load.b")
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, queue)"
        " SELECT 'other', 'note', 'load.a' FROM generate_series(1, %s)",
        (4000,),
    )
    status, text = streamed(f"job_id={mine}", last=last, until=lambda text: mine in text)
    assert (status, mine in text, "other" in text) == (200, True, False)


def test_a_run_that_was_submitted_meanwhile_is_replayed(db: Any, conn: db.Connection) -> None:
    last = place()
    conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('new', 'any')")
    status, text = streamed("kind=run", last=last, until=lambda text: '"new"' in text)
    assert (status, '"new"' in text) == (200, True)


def test_each_change_of_a_run_that_is_retried_has_an_id_of_its_own_time(
    db: Any, conn: db.Connection
) -> None:
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name, status, created_at, queued_at, started_at,"
        " finished_at) SELECT 'old', 'any', 'failed', at, at, at, at"
        " FROM (SELECT now() - interval '1 h') a(at)"
    )
    started: list[bool] = []

    def until(text: str) -> bool:
        if '"status":"queued"' in text and not started:
            started.append(True)
            conn.execute("UPDATE workflow_runs SET status = 'running' WHERE id = 'old'")
        return '"status":"running"' in text

    _, text = streamed(
        "run_id=old",
        opened=lambda: conn.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = 'old'"),
        until=until,
    )
    ids = re.findall("^id: (.*)$", text, re.MULTILINE)
    assert len({*ids}) == 2
    assert all(each > place(ago_s=600) for each in ids)


def test_a_service_that_is_started_again_has_streams_again() -> None:
    app = service.app(token=http_service.TOKEN, workers_json="")

    async def begins() -> bool:
        async with (
            app.router.lifespan_context(app),
            app.state.service.changes.reading() as reader,
        ):
            return not reader.closed

    assert [asyncio.run(begins()) for _ in range(2)] == [True, True]


def test_an_event_whose_transaction_began_before_the_last_one_is_replayed(
    db: Any, conn: db.Connection
) -> None:
    last = place()
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, queue, created_at)"
        " VALUES ('late', 'note', 'load.a', now() - interval '3 s')"
    )
    status, text = streamed("job_id=late", last=last, until=lambda text: '"late"' in text)
    assert (status, '"late"' in text) == (200, True)


def test_fifty_viewers_cost_two_statements_a_second(reads: list[Read]) -> None:
    begun: list[float] = []

    def since() -> list[float]:
        """The reads behind the first two after all have begun, which viewers may have hastened."""
        return [each.at for each in reads if each.at > begun[0]][2:]

    def opened() -> None:
        begun.append(time.monotonic())
        wait.until(lambda: len(since()) >= 6)
        enqueue()

    status, _ = streamed(opened=opened, until=lambda text: "queued" in text, others=49)
    six = since()[:6]
    assert (status, six[-1] - six[0] > 2.4) == (200, True), six


def test_many_notifications_cost_few_statements(reads: list[Read]) -> None:
    counts: list[int] = []

    def opened() -> None:
        before, began = len(reads), time.monotonic()
        while time.monotonic() - began < 1:
            enqueue()
        counts.append(len(reads) - before)

    status, text = streamed(opened=opened, until=lambda text: "queued" in text)
    assert (status, "queued" in text, counts[0] <= 13) == (200, True, True), counts


def test_a_change_comes_once_among_very_many(conn: db.Connection, reads: list[Read]) -> None:
    mine: list[str] = []

    def first_pages() -> int:
        return sum(each.is_first for each in reads)

    def opened() -> None:
        mine.append(enqueue("load.b"))
        before = first_pages()
        wait.until(lambda: first_pages() > before + 1)
        conn.execute(
            "INSERT INTO ingest_job_events (job_id, event_type, queue)"
            " SELECT 'other', 'note', 'load.a' FROM generate_series(1, 25000)"
        )
        before = first_pages()
        wait.until(lambda: first_pages() > before + 2)
        jobs.cancel(mine[0])

    status, text = streamed("queue=load.b", opened=opened, until=lambda text: "cancelled" in text)
    assert (status, text.count('"event_type":"queued"')) == (200, 1)
