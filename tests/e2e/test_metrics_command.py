"""`queue-workflows metrics`: printed, served, and its counters through kills and restarts."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from queue_workflows import config, history, jobs
from tests.support import commands, constants, factories, transitions
from tests.support.commands import Command, Commands
from tests.support.metrics_page import Series, falls, read, value
from tests.support.wait import until

APP = "tests.support.hanging_app:setup"
QUEUE = "work"


@contextmanager
def listening(
    cli: Commands, where: str = "127.0.0.1:0", **env: str
) -> Generator[tuple[Command, Any]]:
    """Start the command, and yield it and the parts of its URL."""
    started = cli.start("queue-workflows", "metrics", "--listen", where, **env)
    found = until(lambda: re.search(r"metrics on (http://\S+)", started.err))
    yield started, urlsplit(found[1])
    started.send(signal.SIGTERM)
    assert started.wait() == 0, started.err


def get(at: Any, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    conn = http.client.HTTPConnection(at.hostname, at.port, timeout=30)
    try:
        conn.request(
            method, path, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )
        reply = conn.getresponse()
        return reply.status, reply.read().decode()
    finally:
        conn.close()


def test_the_page_is_printed_once(cli: Commands, conn: Any) -> None:
    for _ in range(3):
        transitions.run_ingest(conn)
    done = cli.run("queue-workflows", "metrics")
    assert done.process.returncode == 0, done.err
    assert value(read(done.out), "jobs_total", queue="fetch", outcome="completed") == 3


def test_the_page_is_served_with_its_type_and_counts_by_itself(cli: Commands, conn: Any) -> None:
    with listening(cli, **constants.env({"history.COUNT_EVERY_S": 0.1})) as (_, at):
        transitions.run_ingest(conn)
        counted = "SELECT coalesce(sum(n), 0)::bigint FROM metric_totals WHERE metric = 'jobs'"
        until(lambda: factories.one(conn, counted) == 1)
        status, text = get(at)
        assert status == 200 and value(read(text), "jobs_total") == 1
        assert get(at, method="HEAD") == (200, "")


@pytest.mark.parametrize(
    ("wanted", "path", "method", "headers"),
    [
        (404, "/", "GET", {}),
        (404, "/metrics/../status", "GET", {}),
        (405, "/metrics", "POST", {}),
        (403, "/metrics", "GET", {"Host": "evil.example"}),
        (200, "/metrics", "GET", {"Host": "localhost:1"}),
        (431, "/metrics", "GET", {"X-Long": "x" * 100_000}),
    ],
)
def test_requests_that_are_refused(
    cli: Commands, wanted: int, path: str, method: str, headers: dict[str, str]
) -> None:
    with listening(cli) as (_, at):
        assert get(at, path, method, **headers)[0] == wanted


def test_idle_and_broken_clients_keep_nobody_out(cli: Commands, conn: Any) -> None:
    with listening(cli) as (_, at):
        idle = [socket.create_connection((at.hostname, at.port), timeout=30) for _ in range(31)]
        idle[0].sendall(b"\x00\xff\r\n\r\n")
        assert idle[0].recv(100).startswith(b"HTTP/1.1 400")
        idle[1].sendall(b"GET /metrics HTTP/1.1\r\nHost")
        assert get(at)[0] == 200
        # They are closed when their time is up, so that there is room again.
        assert idle[1].recv(100) == b""
        for each in idle:
            each.close()
        assert get(at)[0] == 200


def test_without_a_database_the_reply_is_503_and_no_secret(cli: Commands, conn: Any) -> None:
    dsn = "postgresql://u:c4nary-password@127.0.0.1:1/nothing_test?connect_timeout=1"
    with listening(cli, QUEUE_WORKFLOWS_DB_URL=dsn) as (started, at):
        status, text = get(at)
        assert status == 503 and "c4nary" not in text
        assert "c4nary" not in started.err


@pytest.mark.parametrize(
    "where",
    [
        *("9187", "localhost", "::1:9187", "h:70000", "h:-1", "h:x"),
        pytest.param(f"h:{'9' * 5000}", id="5,000 digits"),
    ],
)
def test_a_bad_address_is_one_line(cli: Commands, where: str) -> None:
    done = cli.run("queue-workflows", "metrics", "--listen", where)
    assert "--listen" in commands.refused(done)


def test_a_host_that_no_name_can_be_is_one_line(cli: Commands) -> None:
    done = cli.run("queue-workflows", "metrics", "--listen", "a..b:9187")
    assert done.process.returncode == 2
    warning, refusal = done.err.splitlines()
    assert "is not this machine's loopback" in warning
    assert "cannot listen on a..b:9187" in refusal


def test_an_address_in_use_is_one_line(cli: Commands) -> None:
    with listening(cli) as (_, at):
        done = cli.run("queue-workflows", "metrics", "--listen", f"127.0.0.1:{at.port}")
        assert "cannot listen" in commands.refused(done)


def test_another_address_than_loopback_is_reported(cli: Commands) -> None:
    with listening(cli, "0.0.0.0:0") as (started, at):
        assert "without a token" in started.err
        assert get(at, Host="worker-1")[0] == 200


# --- counters through faults -------------------------------------------------------------------


def worker(cli: Commands, *more: str) -> Command:
    return cli.start("queue-claim-worker", f"--queue={QUEUE}", "--app", APP, *more)


def completed(conn: Any) -> int:
    return factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'completed'")


def test_no_counter_falls_or_misses_an_end_through_kill_prune_and_restart(
    cli: Commands, conn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("lingers_once", print)
    config.register_ingest_task("lasts", print)
    quick = {"seconds": 0, "folder": str(tmp_path)}
    ids = [jobs.enqueue(task_name="lasts", queue=QUEUE, args=quick) for _ in range(5)]
    first = worker(cli)
    until(lambda: completed(conn) == 5)
    pages: list[Series] = [read()]
    (tmp_path / "own").mkdir()
    jobs.enqueue(task_name="lingers_once", queue=QUEUE, args={"folder": str(tmp_path / "own")})
    until(lambda: [*tmp_path.glob("*/started")])
    first.send(signal.SIGKILL)
    first.wait()
    pages.append(read())
    orchestrator = cli.start("queue-orchestrator", "--app", APP)
    second = worker(cli)
    until(lambda: completed(conn) == 6, timeout_s=90)
    pages.append(read())
    conn.execute("UPDATE ingest_jobs SET finished_at = now() - interval '999 days'")
    assert history.prune()["jobs"] == len(ids) + 1
    pages.append(read())
    for process in (second, orchestrator):
        process.send(signal.SIGTERM)
        process.wait()
    pages.append(read())
    for before, after in pairwise(pages):
        assert not falls(before, after)
    last = pages[-1]
    assert value(last, "jobs_total", queue=QUEUE, outcome="completed") == 6
    assert value(last, "job_crashes_total", queue=QUEUE) == 0  # nobody saw why it ended
    assert value(last, "leases_reclaimed_total", queue=QUEUE) == 1
    assert value(last, "job_wait_seconds_count", queue=QUEUE, why="crash") == 1


def test_a_pool_counts_the_ends_waits_and_crashes_of_its_queues(
    cli: Commands, conn: Any, tmp_path: Path
) -> None:
    config.configure(ingest_queues={QUEUE, "load"})
    config.register_ingest_task("lingers_once", print)
    config.register_ingest_task("lasts", print)
    quick = {"seconds": 0, "folder": str(tmp_path)}
    for queue in [QUEUE] * 5 + ["load"] * 3:
        jobs.enqueue(task_name="lasts", queue=queue, args=quick)
    entries = [{"queue": queue, "concurrency": 2} for queue in (QUEUE, "load")]
    running = cli.start(
        "queue-claim-worker", "--workers", json.dumps(entries), "--app", APP,
    )  # fmt: skip
    until(lambda: completed(conn) == 8)
    before = read()
    own = tmp_path / "own"
    own.mkdir()
    jobs.enqueue(task_name="lingers_once", queue=QUEUE, args={"folder": str(own)})
    until(lambda: [*tmp_path.glob("*/started")])
    os.kill(int((own / "started").read_text()), signal.SIGKILL)
    until(lambda: completed(conn) == 9, timeout_s=90)
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err
    after = read()
    assert not falls(before, after)
    assert value(after, "jobs_total", queue=QUEUE, outcome="completed") == 6
    assert value(after, "jobs_total", queue="load", outcome="completed") == 3
    assert value(after, "job_run_seconds_count", queue="load") == 3
    assert value(after, "job_crashes_total", queue=QUEUE) == 1
    assert value(after, "job_crashes_total", queue="load") == 0
    assert value(after, "job_wait_seconds_count", queue=QUEUE, why="crash") == 1
    assert value(after, "job_wait_seconds_count", queue="load") == 3
