"""Hostile clients of a running service: methods, scopes, pipelines, and connections that stay."""

from __future__ import annotations

import base64
import json
import random
import re
import select
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from queue_workflows import db
from tests.support import commands, http_service, tabled
from tests.support.http_service import bearer
from tests.support.wait import patience, until

TRIGGER = "/api/v1/jobs/trigger"
READ, SUBMIT = "r" * 20, "s" * 20
STREAM_LIMIT = 30
OPEN = ("/api/v1/events", "/stream")


@pytest.fixture(scope="module")
def service(modules_database: str) -> Generator[http_service.Service]:
    """A service without workers, with short times and few streams."""
    env = {
        "APP_HEADER_TIMEOUT_SEC": "1", "APP_REQUEST_TIMEOUT_SEC": "2",
        "APP_MAX_STREAMS": str(STREAM_LIMIT), "APP_MAX_CONNECTIONS": "1200",
        "QUEUE_WORKFLOWS_TOKEN_READ": READ, "QUEUE_WORKFLOWS_TOKEN_SUBMIT": SUBMIT,
    }  # fmt: skip
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=modules_database) as cli,
        http_service.served(cli, workers="", **env) as made,
    ):
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(service: http_service.Service) -> Generator[None]:
    """No connection stays open, and no error is logged."""
    began = len(service.command.err)
    yield
    until(lambda: not connections(service), timeout_s=20)
    logged = service.command.err[began:]
    assert "Traceback" not in logged and " ERROR " not in logged, logged[-3000:]
    assert service.command.process.poll() is None


def connections(service: http_service.Service) -> int:
    """Return how many sockets of clients the service has."""
    pid = service.command.process.pid
    mine = {
        link[8:-1]
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if (link := _link(fd)).startswith("socket:")
    }
    port = f"{service.address[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        1 for row in rows if row[1].endswith(f":{port}") and row[3] != "0A" and row[9] in mine
    )


def _link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:
        return ""


def head(
    method: str, path: str, *more: str, token: str = http_service.TOKEN, host: str = "localhost"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"authorization: Bearer {token}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def statuses(service: http_service.Service, data: bytes, count: int) -> list[int]:
    """Send bytes, and return the statuses of the first replies, fewer if the service closes."""
    found: list[bytes] = []
    text = b""
    with socket.create_connection(service.address, 10) as sock:
        sock.sendall(data)
        while len(found) < count and (part := sock.recv(65_536)):
            text += part
            found = re.findall(rb"HTTP/1\.1 (\d{3}) ", text)
    return [int(each) for each in found]


def operations(service: http_service.Service) -> Iterator[tuple[str, str]]:
    document = service.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            yield method.upper(), path


def filled(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", path)


# --- scopes and methods --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/v1/runs/x/nodes/a%0Ab/answer", {"value": 1}), ("/api/v1/jobs/a%0A/cancel", {})],
)
def test_a_line_break_in_an_id_changes_no_scope(
    service: http_service.Service, path: str, body: Any
) -> None:
    reply = service.post(path, body, headers=bearer(SUBMIT))
    assert reply.status_code == 404, reply.text


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PATCH", "PUT", "DELETE", "X-NEW"])
def test_no_endpoint_serves_a_method_that_is_not_its_own(
    service: http_service.Service, method: str
) -> None:
    known: dict[str, set[str]] = {}
    for own, path in operations(service):
        known.setdefault(path, set()).add(own)
    for path, methods in known.items():
        reply = service.client.request(method, filled(path))
        if method == "HEAD" and "GET" in methods:
            stays = path.endswith(OPEN) and path != "/api/v1/jobs/{job_id}/events"
            wanted = 405 if stays else service.get(filled(path)).status_code
            assert (reply.status_code, reply.content) == (wanted, b""), path
        else:
            # Of a path that is also an id of a GET, as `jobs/trigger`, HEAD asks for that.
            wanted = (404, 405) if method == "HEAD" else (405,)
            assert reply.status_code in wanted, (path, reply.text)
        assert reply.elapsed.total_seconds() < patience(1)


# --- requests that two readers may understand differently ----------------------------------------


@pytest.mark.parametrize(
    "name",
    ["Authorization: Bearer x", "Idempotency-Key: b", "Content-Type: text/plain", "Origin: x",
     "Sec-Fetch-Site: none", "Last-Event-ID: 2"],
)  # fmt: skip
def test_a_header_that_counts_once_is_refused_twice(
    service: http_service.Service, name: str
) -> None:
    first = {
        "Idempotency-Key: b": "Idempotency-Key: a",
        "Content-Type: text/plain": "Content-Type: application/json",
        "Sec-Fetch-Site: none": "Sec-Fetch-Site: cross-site",
        "Last-Event-ID: 2": "Last-Event-ID: 1",
        "Origin: x": "Origin: http://localhost",
    }
    given = [first[name]] if name in first else []
    data = head("POST", TRIGGER, *given, name, "content-length: 2") + b"{}"
    assert statuses(service, data, 1) == [400]


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(
    service: http_service.Service,
) -> None:
    """The rest would be a request to a proxy that reads the other length."""
    hidden = head("GET", "/status")
    body = b"0\r\n\r\n" + hidden
    more = ("content-type: application/json", "transfer-encoding: chunked")
    data = head("POST", TRIGGER, f"content-length: {len(body)}", *more) + body
    assert statuses(service, data, 2) == [400]


def test_a_length_that_is_none_is_refused(service: http_service.Service) -> None:
    cases: list[Any] = [
        ("content-length: 2", "content-length: 3"), ("content-length: +2",),
        ("content-length: 0x2",),
        ("content-length: " + "9" * 30,), ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: identity",), ("transfer-encoding : chunked",)
    ]  # fmt: skip
    for lengths in cases:
        with tabled.case(lengths):
            data = head("POST", TRIGGER, "content-type: application/json", *lengths) + b"{}"
            assert statuses(service, data, 2) in ([400], [413])


def test_a_strange_target_has_a_clean_answer_at_once(service: http_service.Service) -> None:
    cases: list[Any] = [
        ("http://localhost/api/v1/jobs", 404), ("//api/v1/jobs", 404), ("/api/v1/jobs/", 404),
        ("/api/v1/./jobs", 404), ("/api/v1/x/../jobs", 404), ("/%61pi/v1/jobs", 200),
        ("/api%2Fv1%2Fjobs", 404), ("/api/v1/jobs%2Ftrigger", 404), ("/api/v1/jobs%", 404),
        ("/api/v1/jobs/%E0%80%80/status", 404), ("/api/v1/jobs/%ff/status", 404),
        ("/api/v1/jobs//status", 404), ("/api/v1/jobs/%20/status", 404), ("/health%2F", 404),
        ("/health;x=1", 404), ("*", 404), ("/api/v1/jobs?" + "&" * 4000, 200),
        ("/api/v1/jobs?queue=%ff%fe", 200), ("/api/v1/jobs?queue=%ed%a0%80", 200),
        ("/api/v1/jobs?status=&limit=&since=", 422), ("/api/v1/jobs?cursor=", 422),
        ("/api/v1/jobs?" + "status=queued&" * 11, 422), ("/api/v1/jobs?q=" + "%25_" * 60, 200),
        ("/api/v1/jobs?since=9999-12-31T23:59:59-23:59", 200),
        ("/api/v1/jobs?since=0001-01-01T00:00:00%2B23:59", 200),
        ("/api/v1/jobs?since=1e300", 422), ("/api/v1/jobs?since=-1e11", 422),
        ("/api/v1/jobs/x/status?wait=1e999", 422), ("/api/v1/jobs/x/status?wait=-0.1", 422),
        ("/api/v1/jobs/x/status?wait=60&wait=61", 422), ("/api/v1/jobs/x/status?wait=", 422),
        ("/api/v1/jobs/x/status?wait=60", 404), ("/api/v1/runs/x?wait=60", 404),
        ("/api/v1/jobs/x/parts?cursor=999999999999999999-999999999", 404),
        ("/api/v1/jobs/x/parts?cursor=9999999999999999999-1", 422),
        ("/api/v1/jobs/x/parts?cursor=%C2%B2-1", 422),
        ("/api/v1/schedules/x/preview?days=1e-300", 404), ("/api/v1/events?kind=x", 422),
    ]  # fmt: skip
    for target, wanted in cases:
        with tabled.case(target, wanted):
            began = time.monotonic()
            assert statuses(service, head("GET", target), 1) == [wanted]
            assert time.monotonic() - began < patience(1)


def test_a_last_event_id_that_is_absurd(service: http_service.Service) -> None:
    cases: list[Any] = [
        ("0", 200), ("99999999999999999", 200), ("999999999999999999", 422), ("-1", 422),
        ("1" * 101, 422), ("²-i1", 422), ("9" * 17 + "-i99999999999999999999", 200)
    ]  # fmt: skip
    for number, wanted in cases:
        with tabled.case(number, wanted):
            data = head("GET", "/api/v1/events", f"last-event-id: {number}")
            assert statuses(service, data, 1) == [wanted]


def test_a_forged_cursor_gives_a_page_or_is_refused(service: http_service.Service) -> None:
    cases: list[Any] = [
        b"[true]", b"[1e400]", b"[NaN]", b"[-1]", b"[9223372036854775808]", b"[[]]", b"{}", b"1",
        b'["0001-01-01T00:00:00+23:59", "x"]', b'["2026-01-01T00:00:00+00:00:01.5", "x"]',
        b'["2026-01-01T00:00:00+00:00", ""]', b"[" * 700
    ]  # fmt: skip
    for place in cases:
        with tabled.case(place):
            cursor = base64.urlsafe_b64encode(place).decode().rstrip("=")
            for path in ("/api/v1/jobs", "/api/v1/runs"):
                reply = service.get(path, params={"cursor": cursor})
                assert reply.status_code in (200, 422), reply.text
                assert reply.elapsed.total_seconds() < patience(1)


BODY: dict[str, Any] = {"queue": "load.a", "task": "load.chunks", "lock_key": "k"}
LONE = "\ud800"
LONG = "".join(map(chr, random.Random(1).sample(range(0x20000, 0x2A000), 1000)))
"""1,000 characters of 4 bytes, which an index cannot hold compressed either."""


def test_a_body_with_a_strange_value(service: http_service.Service) -> None:
    cases: list[Any] = [
        (TRIGGER, json.dumps(BODY | {"args": {LONE: 1}}), 422),
        (TRIGGER, json.dumps(BODY | {"args": {"a": [LONE]}}), 422),
        (TRIGGER, json.dumps(BODY)[:-1] + ', "args": {"x": 1e999}}', 422),
        (TRIGGER, json.dumps(BODY)[:-1] + ', "args": {"x": -1e-999}}', 200),
        (TRIGGER, json.dumps(BODY)[:-1] + ', "lock_key": "other"}', 200),
        (TRIGGER, json.dumps(BODY | {"lock_key": LONG, "partition_key": LONG}), 422),
        (TRIGGER, json.dumps(BODY | {"idempotency_key": LONG}), 422),
        (TRIGGER, json.dumps(BODY | {"idempotency_key": ""}), 422),
        (TRIGGER, json.dumps(BODY | {"lock_key": ""}), 422),
        (TRIGGER, json.dumps(BODY | {"queue": " "}), 422),
        (TRIGGER, json.dumps(BODY | {"priority": 2**31}), 422),
        (TRIGGER, json.dumps(BODY | {"max_attempts": 2**31}), 422),
        (TRIGGER, json.dumps(BODY | {"max_attempts": True}), 422),
        (TRIGGER, json.dumps(BODY | {"available_at": "9999-12-31T23:59:59-23:59"}), 422),
        (TRIGGER, json.dumps(BODY | {"available_at": 1e18}), 422),
        (TRIGGER, json.dumps(BODY | {"available_at": "2026-01-01T00:00:00"}), 422),
        ("/api/v1/runs", json.dumps({"workflow": "w", "inputs": {LONE: LONE}}), 422),
        ("/api/v1/runs", json.dumps({"workflow": LONE}), 422),
        ("/api/v1/runs", json.dumps({"workflow": "w", "idempotency_key": LONE}), 422),
        ("/api/v1/runs/x/nodes/n/answer", '{"value": "\\ud800"}', 422),
        ("/api/v1/runs/x/nodes/n/answer", '{"value": ' + "[" * 900 + "]" * 900 + "}", 422),
        ("/api/v1/runs/x/nodes/n/answer", '{"value": ' + "[" * 200_000 + "}", 400),
        ("/api/v1/workers/h/load.a/on", json.dumps({"for_s": 60}), 422),
        ("/api/v1/workers/h/load.a/off", json.dumps({"reason": LONE}), 422),
        ("/api/v1/workers/h/load.a/off", json.dumps({"reason": "\0"}), 422),
        ("/api/v1/workers/h/load.a/off", json.dumps({"for_s": 1e-300}), 422),
        ("/api/v1/workers/h/load.a/off", '{"for_s": NaN}', 422),
        ("/api/v1/workers/h/load.a/off", '{"for_s": 1e999}', 422),
        ("/api/v1/queues/load.a/pause", json.dumps({"for_s": 1e-9}), 422),
        ("/api/v1/queues/load.a/pause", json.dumps({"partition": ""}), 422),
        ("/api/v1/queues/load.a/pause", json.dumps({"partition": "\0"}), 422),
        ("/api/v1/queues/load.a/limits", json.dumps({"max_running": 2**63}), 422),
        ("/api/v1/queues/load.a/limits", json.dumps({"max_running": -1}), 422),
        ("/api/v1/queues/load.a/limits", json.dumps({"rate": "9" * 40}), 422),
        ("/api/v1/queues/load.a/limits", json.dumps({"rate": "1e999/s"}), 422),
    ]  # fmt: skip
    for path, text, wanted in cases:
        with tabled.case(path, text, wanted):
            headers = {"content-type": "application/json"}
            reply = service.client.post(path, content=text.encode(), headers=headers)
            assert reply.status_code == wanted, reply.text
            assert reply.elapsed.total_seconds() < patience(1)
            assert not re.search(r"SELECT|INSERT|UPDATE |Traceback|\.py", reply.text)


@pytest.mark.parametrize("path", [TRIGGER, "/api/v1/runs"])
def test_an_empty_key_in_the_header_is_refused(service: http_service.Service, path: str) -> None:
    body = BODY if path == TRIGGER else {"workflow": "w"}
    reply = service.post(path, body, headers={"idempotency-key": ""})
    assert reply.status_code == 422, reply.text
    assert "idempotency-key" in reply.text


def test_one_of_many_tags_matches(service: http_service.Service) -> None:
    path = f"/api/v1/jobs/{service.trigger(lock_key='tags')['job_id']}/status"
    tag = service.get(path).headers["etag"]
    tags = ", ".join([*(f'"{n}"' for n in range(1000)), tag])
    assert service.get(path, headers={"if-none-match": tags}).status_code == 304
    twice = [("if-none-match", '"x"'), ("if-none-match", tag)]
    assert service.get(path, headers=twice).status_code == 304


# --- connections that stay -----------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(service: http_service.Service) -> None:
    body = json.dumps(BODY).encode()
    some = [
        head("GET", "/health"), head("GET", "/nothing"),
        head("POST", TRIGGER, "content-type: application/json", f"content-length: {len(body)}")
        + body,
        head("GET", "/api/v1/jobs", token="x"), head("HEAD", "/status"),
    ]  # fmt: skip
    assert statuses(service, b"".join(some * 40), 200) == [200, 404, 200, 401, 200] * 40


@pytest.mark.parametrize("end", [b"", b"GET /heal"], ids=["nothing", "half a head"])
def test_a_client_that_takes_no_responses_is_cut_off(
    service: http_service.Service, end: bytes
) -> None:
    """Nor does it need a token: the responses to pipelined requests fill all buffers."""
    pipeline = head("GET", "/nothing", token="x") * 100
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(service.address)
        sock.setblocking(False)
        sent_at = time.monotonic()
        while time.monotonic() - sent_at < 1:
            try:
                sock.send(pipeline)
                sent_at = time.monotonic()
            except BlockingIOError:
                select.select([], [sock], [], 0.1)
            except OSError:
                break
        assert connections(service) == 1
        until(lambda: connections(service) == 0, timeout_s=15)


def test_a_client_that_takes_a_page_too_slowly_is_cut_off(
    service: http_service.Service, modules_database: str
) -> None:
    with db.connect(url=modules_database) as conn:
        conn.execute(
            "INSERT INTO ingest_jobs (id, task_name, queue, lock_key)"
            " SELECT 'slow ' || n, repeat('t', 900), 'load.b', repeat('k', 900)"
            " FROM generate_series(1, 1000) AS n"
        )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(service.address)
        for _ in range(10):
            sock.sendall(head("GET", "/api/v1/jobs?queue=load.b&limit=1000"))
        until(lambda: connections(service) == 1)
        until(lambda: connections(service) == 0, timeout_s=15)


def test_event_streams_beyond_the_limit_are_refused_and_leave_nothing(
    service: http_service.Service,
) -> None:
    with ExitStack() as stack:

        def asked() -> socket.socket:
            sock = stack.enter_context(socket.create_connection(service.address, 20))
            sock.sendall(head("GET", "/api/v1/events"))
            return sock

        def status(sock: socket.socket) -> int:
            return int(sock.recv(12)[9:12])

        # One after the other: a stream that takes long to begin is refused, too.
        for _ in range(STREAM_LIMIT):
            until(lambda: status(asked()) == 200)
        socks = [asked() for _ in range(800)]
        assert {status(sock) for sock in socks} == {503}
        began = time.monotonic()
        assert service.get("/health").status_code == service.get("/api/v1/jobs").status_code == 200
        assert time.monotonic() - began < patience(1)

    def served() -> bool:
        with service.client.stream("GET", "/api/v1/events") as reply:
            return reply.status_code == 200

    until(served)


def test_a_request_for_an_upgrade_stays_http(service: http_service.Service) -> None:
    more = ("connection: upgrade", "upgrade: websocket", "sec-websocket-key: eA==")
    assert statuses(service, head("GET", "/health", *more), 1) == [200]
    assert statuses(service, head("CONNECT", "localhost:1"), 1) in ([400], [405], [404])
    assert httpx.get(f"{service.url}/health").status_code == 200
