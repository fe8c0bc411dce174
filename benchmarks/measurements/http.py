"""Measure triggers of the HTTP service beside a bare endpoint that inserts a row."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench, until

ABOUT = """`queue-workflows serve` without workers, and a bare endpoint of FastAPI and uvicorn that
inserts a row into a plain table through a pool of psycopg. In the second row the bare endpoint
inserts the job into our table instead, by plain SQL. So it has the cost of our triggers and lock
keys, but not that of our service. Both are one process each. Four threads of one client send
triggers over kept connections, in blocks that take turns. Each job has a lock key of its own. Ours
also checks token, host, origin, size and time of the request, validates the job against the task,
writes its event, looks for its idempotency key and returns its state. Health is the time of one
request, while nothing else is asked."""
TOKEN = "a-token-of-the-benchmark"
THREADS = 4
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
_TRIGGER = "/api/v1/jobs/trigger"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _answers(port: int) -> bool:
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        conn.request("GET", "/health", headers=HEADERS)
        return conn.getresponse().status == 200
    except OSError:
        return False
    finally:
        conn.close()


def _send(conn: http.client.HTTPConnection, path: str, key: str) -> None:
    body = {"queue": "load", "task": "noop", "args": {"number": 1}, "lock_key": key}
    conn.request("POST", path, json.dumps(body), HEADERS)
    reply = conn.getresponse()
    text = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {text[:300]!r}")


def _rate(port: int, path: str, prefix: str, each: int) -> float:
    """Return the triggers a second of THREADS clients that send `each` one after the other."""
    failed: list[BaseException] = []

    def client(number: int) -> None:
        conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(conn):
            try:
                for count in range(each):
                    _send(conn, path, f"{prefix}-{number}-{count}")
            except BaseException as error:  # noqa: BLE001  raised below, on the main thread
                failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return THREADS * each / (time.perf_counter() - begun)


def _health_ms(port: int, count: int) -> list[float]:
    took: list[float] = []
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(conn):
        for _ in range(count):
            begun = time.perf_counter()
            conn.request("GET", "/health", headers=HEADERS)
            conn.getresponse().read()
            took.append((time.perf_counter() - begun) * 1000)
    return took


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield a row for triggers, and one for the time of /health."""
    ours, bare = _free_port(), _free_port()
    serve = [
        *("env", f"QUEUE_WORKFLOWS_TOKEN={TOKEN}", sys.executable, "-m", "queue_workflows"),
        *("serve", "--port", str(ours), "--app", processes.APP, "--log-level", "warning"),
    ]
    with (
        bench.server.database("http") as dsn,
        baseline.connect(dsn) as conn,
        bench.running(
            dsn,
            ("service", serve),
            ("bare", [sys.executable, "-m", "benchmarks.bare_http", str(bare)]),
        ) as started,
    ):
        for port in (ours, bare):
            until(lambda port=port: _answers(port), f"port {port} answers", started)
        ways = {"ours": (ours, _TRIGGER), "bare": (bare, _TRIGGER), "plain SQL": (bare, "/job")}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for port, path in ways.values():
            _rate(port, path, "warm", 20)
        each = bench.pick(150, 60)
        for number in bench.rounds(9, 4, full_s=60.0, quick_s=14.0):
            conn.execute("TRUNCATE bare_jobs, ingest_jobs")
            for name, (port, path) in ways.items():
                rates[name].append(_rate(port, path, f"{name} {number}", each))
        health = _health_ms(ours, bench.pick(500, 100))
    targets = {"bare": results.at_least(0.5), "plain SQL": None}
    for name, target in targets.items():
        yield results.Row(
            f"trigger over HTTP, beside {name}",
            results.middle(rates["ours"]),
            "/s",
            results.middle(rates[name]),
            results.paired(rates["ours"], rates[name]),
            target,
        )
    yield results.Row(
        "GET /health, p50",
        results.middle(health),
        "ms",
        target=results.own_at_most(20),
        note=f"p99 {results.number(results.percentile(health, 99))} ms",
    )
