"""The streams of handlers over HTTP: pages, server-sent events, resumption, marks and the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from queue_workflows import db, service, streams
from tests.support import asgi_service, factories, http_service, timeouts, transitions, wait
from tests.support.asgi_service import streamed

FETCH = transitions.who("fetch")


class Writer:
    """A claimed job that streams without a handler."""

    def __init__(self, conn: db.Connection, **columns: Any) -> None:
        self._conn = conn
        self.job_id = factories.ingest(conn, args={}, max_attempts=9, **columns)["id"]
        self.path = f"/api/v1/jobs/{quote(self.job_id, safe='')}"
        self.claim()

    def claim(self) -> None:
        self._job = transitions.claim_ingest(self._conn, FETCH)
        self._count = 0

    def send(self, *values: Any, name: str = "text") -> None:
        with db.connect() as conn:  # also from another thread
            assert transitions.stream(conn, self._job, self._count + 1, *values, name=name)
        self._count += len(values)

    def again(self) -> None:
        """Let another attempt begin."""
        self._conn.execute(
            "UPDATE ingest_jobs SET status = 'queued', worker_id = NULL, claimed_by = NULL,"
            " lease_expires_at = NULL WHERE id = %s",
            (self.job_id,),
        )
        self.claim()

    def end(self) -> None:
        with db.connect() as conn:
            conn.execute(
                "UPDATE ingest_jobs SET status = 'completed', worker_id = NULL, claimed_by = NULL,"
                " lease_expires_at = NULL, finished_at = now() WHERE id = %s",
                (self.job_id,),
            )


@pytest.fixture
def writer(conn: db.Connection) -> Writer:
    return Writer(conn)


def sse(text: str) -> list[tuple[str, str, Any]]:
    """Return id, kind and data of each event."""
    found: list[tuple[str, str, Any]] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


def brief(text: str) -> list[Any]:
    return [number or data["status"] for number, _, data in sse(text)]


def test_a_stream_has_all_parts_marks_and_the_end(writer: Writer) -> None:
    writer.send("a", {"b": 1})
    writer.again()
    writer.send("c\n\nevent: forged")
    writer.end()
    status, text = streamed(path=f"{writer.path}/stream")
    assert status == 200 and text.startswith("retry: 2000\n\n")
    found = sse(text)
    assert [(number, kind) for number, kind, _ in found] == [
        ("1-1", "part"), ("1-2", "part"), ("2-0", "reset"), ("2-1", "part"), ("", "end"),
    ]  # fmt: skip
    assert [data["value"] for *_, data in found[:-1]] == [
        "a", {"b": 1}, None, "c\n\nevent: forged",
    ]  # fmt: skip
    assert found[-1][2] == {"job_id": writer.job_id, "status": "succeeded"}


@pytest.mark.parametrize("last", ["1-1", "1-2", "2-0", "2-1"])
def test_a_stream_goes_on_behind_any_event_without_loss_or_repeats(
    writer: Writer, last: str
) -> None:
    writer.send("a", "b")
    writer.again()
    writer.send("c")
    writer.end()
    whole = ["1-1", "1-2", "2-0", "2-1", "succeeded"]
    _, text = streamed(path=f"{writer.path}/stream", last=last)
    assert brief(text) == whole[whole.index(last) + 1 :]


def test_parts_marks_and_the_end_come_while_a_stream_is_open(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only notifications and the job's events wake it: its pause is longer than the test."""
    timeouts.pause_streams(monkeypatch, 600.0)
    writer.send(0)

    texts = [""]

    def noted(text: str) -> bool:
        texts.append(text)
        return False

    def write() -> None:
        for number in (1, 2, 3):
            if number == 3:
                with db.connect() as conn:
                    writer._conn = conn
                    writer.again()
            writer.send(number)
            wait.until(lambda number=number: f'"value":{number},' in texts[-1])
        writer.end()
        with db.connect() as conn:
            conn.execute(
                "INSERT INTO ingest_job_events (job_id, event_type, queue)"
                " VALUES (%s, 'completed', 'fetch')",
                (writer.job_id,),
            )

    thread = threading.Thread(target=write)
    _, text = streamed(path=f"{writer.path}/stream", opened=thread.start, until=noted)
    thread.join()
    found = brief(text)
    assert [each for each in found if each != "2-0"] == ["1-1", "1-2", "1-3", "2-1", "succeeded"]
    assert found.count("2-0") == 1


def test_a_part_that_comes_while_a_stream_begins_is_not_missed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.pause_streams(monkeypatch, 600.0)
    read, begun = streams.read_page, []

    def and_then(*args: Any, **keywords: Any) -> Any:
        page = read(*args, **keywords)
        if not begun:
            begun.append(True)
            writer.send("between")
        return page

    monkeypatch.setattr(streams, "read_page", and_then)
    _, text = streamed(path=f"{writer.path}/stream", until=lambda text: "between" in text)
    assert brief(text) == ["1-1"]


def test_a_part_that_comes_before_the_service_listens_is_not_missed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.pause_streams(monkeypatch, 600.0)
    begun, over = threading.Event(), threading.Event()

    class Late:
        """Its connection takes until the stream has begun."""

        def __iter__(self) -> Iterator[db.Wake]:
            yield db.Wake("wake")
            begun.wait(30)
            writer.send("before")
            yield db.Wake("connected")
            over.wait(30)

        def wake(self) -> None:
            pass

        def close(self) -> None:
            over.set()

    monkeypatch.setattr(db, "listen", lambda *_, **__: Late())
    _, text = streamed(
        path=f"{writer.path}/stream", opened=begun.set, until=lambda text: "before" in text
    )
    assert brief(text) == ["1-1"]


def test_an_error_of_the_database_loses_and_repeats_no_part(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.pause_streams(monkeypatch, 0.1)
    read, calls = streams.read_page, []

    def failing(*args: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        if len(calls) in (2, 3):
            raise db.OperationalError("the server was restarted")
        return read(*args, **keywords)

    def opened() -> None:
        writer.send("b")
        writer.end()

    monkeypatch.setattr(streams, "read_page", failing)
    writer.send("a")
    _, text = streamed(path=f"{writer.path}/stream", opened=opened)
    assert brief(text) == ["1-1", "1-2", "succeeded"]


def test_a_stream_of_a_deleted_job_ends(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts.pause_streams(monkeypatch, 0.1)

    def opened() -> None:
        with db.connect() as conn:
            conn.execute("DELETE FROM ingest_jobs")

    _, text = streamed(path=f"{writer.path}/stream", opened=opened)
    assert sse(text)[-1][1:] == ("end", {"job_id": writer.job_id, "status": None})


def test_a_part_that_cannot_be_read_ends_a_stream_and_is_named(writer: Writer) -> None:
    def opened() -> None:
        with db.connect() as conn:
            conn.execute(
                "INSERT INTO job_parts VALUES ('ingest_jobs', %s, 1, 1, 'text', %s::jsonb)",
                (writer.job_id, "9" * 5000),
            )
            conn.execute("SELECT pg_notify('job_parts', %s)", (writer.job_id,))

    status, text = streamed(path=f"{writer.path}/stream", opened=opened)
    assert (status, sse(text)) == (200, [])
    status, text = streamed(path=f"{writer.path}/stream")
    assert (status, "part 1-1 of job" in json.loads(text)["detail"]) == (422, True)


def test_a_node_of_a_run_has_a_stream_and_pages(conn: db.Connection) -> None:
    row = factories.node(conn, node_id="cut[clip-7]/encode", inputs={})
    job = transitions.claim_node(conn)
    for number, name in ((1, "text"), (2, "log")):
        assert transitions.stream(conn, job, number, number, name=name)
    path = f"/api/v1/runs/{row['run_id']}/nodes/cut[clip-7]/encode"
    _, text = streamed("name=log", path=f"{path}/stream", until=lambda text: "1-2" in text)
    assert brief(text) == ["1-2"]
    status, text = streamed(path=f"{path}/parts")
    assert (status, [item["value"] for item in json.loads(text)["items"]]) == (200, [1, 2])
    for more in ("parts", "stream"):
        assert streamed(path=f"/api/v1/runs/{row['run_id']}/nodes/none/{more}")[0] == 404


def test_pages_have_every_part_once_in_order(writer: Writer) -> None:
    writer.send(*range(5))
    writer.send("x", name="log")
    writer.again()
    writer.send(5)
    writer.end()
    found: list[str] = []
    query = "limit=2"
    while True:
        page = json.loads(streamed(query, path=f"{writer.path}/parts")[1])
        found += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        query = f"limit=2&cursor={page['next']}"
    assert found == ["1-1", "1-2", "1-3", "1-4", "1-5", "1-6", "2-0", "2-1"]
    assert page["over"] is True and page["items"][-1]["value"] == 5
    named = json.loads(streamed("name=log", path=f"{writer.path}/parts")[1])
    assert [item["id"] for item in named["items"]] == ["1-6", "2-0"]
    assert named["items"][1]["reset"] is True


@pytest.mark.parametrize("last", ["x", "1", "1--1", "1-99999999999", "9" * 99, "9" * 101])
def test_a_place_that_no_part_has_is_refused(writer: Writer, last: str) -> None:
    status, text = streamed(path=f"{writer.path}/stream", last=last)
    assert (status, json.loads(text)["status"]) == (422, 422)
    assert streamed(f"cursor={last}", path=f"{writer.path}/parts")[0] == 422


def test_what_does_not_exist_or_is_no_name_is_refused(writer: Writer) -> None:
    for more in ("parts", "stream"):
        assert streamed(path=f"/api/v1/jobs/none/{more}")[0] == 404
        assert streamed("name=", path=f"{writer.path}/{more}")[0] == 422
        assert streamed(f"name={'n' * 401}", path=f"{writer.path}/{more}")[0] == 422
    assert streamed("limit=1001", path=f"{writer.path}/parts")[0] == 422


def test_streams_have_their_own_limit_of_connections(writer: Writer) -> None:
    statuses, bodies = list[int](), list[bytes]()

    async def run() -> None:
        app = service.app(token=http_service.TOKEN, workers_json="", app_max_streams=1)
        opened, over = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif message.get("body"):
                bodies.append(message["body"])
                opened.set()

        async with app.router.lifespan_context(app):
            stream = asgi_service.scope_of(f"{writer.path}/stream")
            first = asyncio.ensure_future(app(stream, receive, send))
            await asyncio.wait_for(opened.wait(), 30)
            await app(stream, receive, send)
            await app(asgi_service.scope_of(f"{writer.path}/parts"), receive, send)
            over.set()
            await asyncio.wait_for(first, 30)

    asyncio.run(run())
    assert statuses == [200, 503, 200]
    assert any(
        b"limit of 1 request at once is reached (APP_MAX_STREAMS)" in body for body in bodies
    )
