"""Measure the dashboard over many rows: `python -m benchmarks.pages [--runs 1000000]`.

A database of its own gets so many runs, jobs of both families, and their events, of 30 days, and a
map of 100,000 items. Each page is opened again and again in this process, as a browser does. The
table has its times, its statements, the most rows that one scan of them reads, and its size, each
beside the limit of the design. Then come the statements a second for viewers of Now while nothing
happens, and the growth of the process over more pages.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg

from benchmarks import processes, report, server
from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.service import application, settings
from queue_workflows.service.dashboard import view

TOKEN = "a-token-of-the-benchmark"
STATEMENTS = 6
ROWS = 2_500
"""Rows that a scan may read: a tenth of the runs of one workflow among a million runs is more."""
EXAMINED = 15_000
"""The same where the newest 10,000 are counted or grouped."""
OF_MAP = 200_000
"""Rows that a scan may read for a page that counts all items of a map."""
RAW_KB, GZIP_KB = 150.0, 30.0
GROWTH_MB = 40.0
VIEWERS, RATE = 50, 8.0
"""Open pages of Now, and the statements a second that all of them may cost."""
POLL_S = 5.0
"""How often a page fetches the parts that no event tells of."""
NODES = 500
SPREAD = "now() - interval '30 days' + i * interval '30 days' / RUNS"
"""When run or job `i` of RUNS was made."""
FILL = f"""
SET session_replication_role = replica;
SET synchronous_commit = off;
INSERT INTO workflow_runs (id, workflow_name, status, context, error, created_at, updated_at,
                           queued_at, started_at, finished_at, definition, definition_hash)
SELECT md5('r' || i), 'workflow_' || i % 12,
       CASE WHEN i > RUNS - 500 THEN 'queued' WHEN i > RUNS - 700 THEN 'running'
            WHEN i % 33 = 0 THEN 'failed' WHEN i % 97 = 0 THEN 'cancelled' ELSE 'completed' END,
       jsonb_build_object('text', 'input number ' || i, 'tenant', i % 500),
       CASE WHEN i <= RUNS - 700 AND i % 33 = 0
            THEN 'node s/a failed: ValueError: row ' || i || ' has no price' END,
       t, t, t, CASE WHEN i <= RUNS - 500 THEN t + interval '1 s' END,
       CASE WHEN i <= RUNS - 700 THEN t + interval '20 s' END,
       '{{"nodes": [{{"id": "s/a", "node": "a"}}, {{"id": "s/b", "node": "b"}}]}}', 'small'
  FROM (SELECT i, {SPREAD} AS t FROM generate_series(1, RUNS) i) x;
INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status, inputs, error,
                                seconds, created_at, started_at, finished_at, seq, claim_no,
                                attempts, generation, worker_id, claimed_by, lease_expires_at)
SELECT md5('n' || i), md5('r' || i), 's/a', 'a', CASE WHEN i % 5 = 0 THEN 'gpu' ELSE 'cpu' END,
       CASE WHEN i > RUNS - 500 THEN 'queued' WHEN i > RUNS - 700 THEN 'running'
            WHEN i % 33 = 0 THEN 'failed' WHEN i % 97 = 0 THEN 'cancelled' ELSE 'completed' END,
       '{{"x": 1}}',
       CASE WHEN i <= RUNS - 700 AND i % 33 = 0 THEN (ARRAY[
            'ValueError: row ' || i || ' has no price', 'TimeoutError: read timed out',
            'KeyError: ''sku_' || i % 7 || '''',
            'OutOfMemoryError: CUDA out of memory. Tried to allocate ' || i % 900 || ' MiB'
            ])[1 + i % 4] END,
       18, t, CASE WHEN i <= RUNS - 500 THEN t END,
       CASE WHEN i <= RUNS - 700 THEN t + interval '18 s' END, i, 1, 1, 0,
       CASE WHEN i > RUNS - 700 AND i <= RUNS - 500 THEN 'box-' || i % 8 || ':1:a' END,
       CASE WHEN i <= RUNS - 500 THEN 'box-' || i % 8 END,
       CASE WHEN i > RUNS - 700 AND i <= RUNS - 500 THEN now() + interval '1 day' END
  FROM (SELECT i, {SPREAD} AS t FROM generate_series(1, RUNS) i) x;
INSERT INTO workflow_node_events (id, run_id, node_id, job_id, attempt, event_type, host_label,
                                  queue, elapsed_s, error, created_at, worker_id, claim_no, xid)
SELECT i * 3 + k, md5('r' || i), 's/a', md5('n' || i), 1,
       (ARRAY['claimed', 'progress_beat', CASE WHEN i % 33 = 0 THEN 'failed' ELSE 'completed' END])
       [k + 1], 'box-' || i % 8, 'cpu', CASE WHEN k = 2 THEN 18 END,
       CASE WHEN k = 2 AND i % 33 = 0 THEN 'ValueError: row ' || i || ' has no price' END,
       {SPREAD} + k * interval '1 s', 'box-' || i % 8 || ':1:a', 1, 1000 + i
  FROM generate_series(1, RUNS) i, generate_series(0, 2) k ORDER BY 1;
INSERT INTO ingest_jobs (id, task_name, queue, status, args, error, seconds, created_at, started_at,
                         finished_at, seq, claim_no, attempts, max_attempts, worker_id, claimed_by,
                         lease_expires_at)
SELECT md5('j' || i), 'task_' || i % 20, 'queue_' || i % 6,
       CASE WHEN i > RUNS - 1000 THEN 'queued' WHEN i > RUNS - 1050 THEN 'running'
            WHEN i % 50 = 0 THEN 'failed' ELSE 'completed' END,
       '{{"a": 1}}',
       CASE WHEN i <= RUNS - 1050 AND i % 50 = 0 THEN (ARRAY[
            'ConnectionError: host db-' || i % 9 || ' refused', 'ValueError: bad row ' || i
            ])[1 + i / 50 % 2] END,
       3, t, CASE WHEN i <= RUNS - 1000 THEN t END,
       CASE WHEN i <= RUNS - 1050 THEN t + interval '3 s' END, i, 1, 1, 5,
       CASE WHEN i > RUNS - 1050 AND i <= RUNS - 1000 THEN 'box-' || i % 8 || ':1:a' END,
       CASE WHEN i <= RUNS - 1000 THEN 'box-' || i % 8 END,
       CASE WHEN i > RUNS - 1050 AND i <= RUNS - 1000 THEN now() + interval '1 day' END
  FROM (SELECT i, {SPREAD} AS t FROM generate_series(1, RUNS) i) x;
INSERT INTO ingest_job_events (id, job_id, attempt, event_type, claim_no, worker_id, host_label,
                               queue, elapsed_s, created_at, xid)
SELECT i * 2 + k, md5('j' || i), 1,
       CASE WHEN k = 0 THEN 'claimed' WHEN i % 50 = 0 THEN 'failed' ELSE 'completed' END,
       1, 'box-' || i % 8 || ':1:a', 'box-' || i % 8, 'queue_' || i % 6, 3,
       {SPREAD} + k * interval '3 s', 1000 + i
  FROM generate_series(1, RUNS) i, generate_series(0, 1) k ORDER BY 1;
INSERT INTO workflow_runs (id, workflow_name, status, created_at, queued_at, started_at, definition,
                           definition_hash)
VALUES ('map', 'map', 'running', now() - interval '2 hours', now() - interval '2 hours',
        now() - interval '2 hours', '{{"version": 2, "workflow": "map", "nodes": [
         {{"id": "list", "module": "l", "deps": []}},
         {{"id": "each", "module": "__map__", "deps": ["list"],
          "map": {{"body": [{{"id": "work", "module": "m", "deps": []}}]}}}}]}}', 'map');
INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status, inputs,
                                context_delta, error, seconds, created_at, started_at, finished_at,
                                seq, claim_no, attempts)
SELECT 'map ' || i, 'map', 'each[k' || i || ']/work', 'm', 'cpu',
       CASE WHEN i % 500 = 0 THEN 'failed' WHEN i > ITEMS * 0.99 THEN 'queued' ELSE 'completed' END,
       jsonb_build_object('item', i, 'text', repeat('x', 200)), '{{"r": 1}}',
       CASE WHEN i % 500 = 0 THEN 'ValueError: item ' || i END, 1.5, t,
       CASE WHEN i <= ITEMS * 0.99 THEN t END, CASE WHEN i <= ITEMS * 0.99 THEN t END,
       2 * RUNS + i, 1, 1
  FROM (SELECT i, now() - interval '2 hours' + i * interval '100 minutes' / ITEMS AS t
          FROM generate_series(1, ITEMS) i) x;
INSERT INTO workflow_node_events (id, run_id, node_id, job_id, attempt, event_type, host_label,
                                  queue, elapsed_s, error, created_at, worker_id, claim_no, xid)
SELECT 9 * RUNS + i * 2 + k, 'map', 'each[k' || i || ']/work', 'map ' || i, 1,
       CASE WHEN k = 0 THEN 'claimed' WHEN i % 500 = 0 THEN 'failed' ELSE 'completed' END,
       'box-' || i % 8, 'cpu', 1.5,
       CASE WHEN k = 1 AND i % 500 = 0 THEN 'ValueError: item ' || i END,
       now() - interval '2 hours' + i * interval '100 minutes' / ITEMS, 'box-1:1:a', 1, 1000
  FROM generate_series(1, (ITEMS * 0.99)::int) i, generate_series(0, 1) k;
INSERT INTO workflow_run_maps (run_id, node_id, generation, at_once, refill, may_fail, total,
                               done_items, failed_items, open_items, next_position, nodes)
VALUES ('map', 'each', 0, 64, 32, ITEMS, ITEMS, (ITEMS * 0.988)::int, ITEMS / 500,
        (ITEMS * 0.01)::int, ITEMS, 1);
INSERT INTO workflow_map_items (run_id, map_id, position, key, item, state, error)
SELECT 'map', 'each', i - 1, 'k' || i, to_jsonb(i),
       CASE WHEN i % 500 = 0 THEN 'failed' WHEN i > ITEMS * 0.99 THEN 'waiting' ELSE 'done' END,
       CASE WHEN i % 500 = 0 THEN 'ValueError: item ' || i END
  FROM generate_series(1, ITEMS) i;
INSERT INTO operator_acts (at, actor, via, action, kind, subject, reason)
SELECT now() - i * interval '1 minute', 'person ' || i % 9, 'http', 'retry', 'run', md5('r' || i),
       'reason ' || i FROM generate_series(1, least(RUNS, 20000)) i;
INSERT INTO workers (worker_id, host_label, queue, pid)
SELECT 'box-' || i || ':' || k || ':a', 'box-' || i, (ARRAY['cpu', 'gpu', 'queue_1'])[k], k
  FROM generate_series(0, 7) i, generate_series(1, 3) k;
INSERT INTO schedules (name, expression, task_name, queue)
SELECT 'schedule ' || i, '0 3 * * *', 'task_1', 'queue_1' FROM generate_series(1, 60) i;
SET session_replication_role = origin;
"""
LARGE = (
    "workflow_runs", "workflow_node_jobs", "workflow_node_events", "ingest_jobs",
    "ingest_job_events", "workflow_map_items", "operator_acts",
)  # fmt: skip


class Page(NamedTuple):
    """A page with its address, and what it may take."""

    name: str
    path: str
    limit_ms: float
    gzip_kb: float = GZIP_KB
    rows: int = ROWS


def _id(text: str) -> str:
    """Return the id of a row, as `md5` of PostgreSQL does."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


PAGES = (
    Page("Now", "/", 100), Page("Runs", "/runs", 50),
    Page("Runs of a workflow", "/runs?workflow=workflow_3", 50),
    Page("failed Runs", "/runs?status=failed", 50), Page("Run", f"/runs/{_id('r33')}", 50),
    Page("a node", f"/runs/{_id('r33')}?node=s%2Fa", 50),
    Page(f"Run of {NODES} nodes", "/runs/graph", 50),
    Page("its graph", "/runs/graph?show=graph", 50, gzip_kb=40.0),
    Page("Run with a map", "/runs/map", 100, rows=OF_MAP),
    Page("the map", "/runs/map/map?node=each", 100, rows=OF_MAP),
    Page("Failures", "/failures", 100, rows=EXAMINED), Page("Waiting", "/waiting", 100),
    Page("Inbox", "/inbox", 50), Page("Machines", "/machines", 50),
    Page("a machine", "/machines/box-3", 50, rows=EXAMINED), Page("Jobs", "/jobs", 50),
    Page("failed Jobs", "/jobs?status=failed", 50), Page("a job", f"/jobs/{_id('j50')}", 50),
    Page("Queues", "/queues", 50), Page("Schedules", "/schedules", 50), Page("Acts", "/acts", 50),
    Page("Health", "/health", 50),
)  # fmt: skip


class Figure(NamedTuple):
    """What a page took."""

    page: Page
    first_ms: float
    """The first time, for a graph with its layout."""
    p50_ms: float
    p95_ms: float
    statements: int
    rows: int
    """The most rows that one scan of its statements reads."""
    raw_kb: float
    gzip_kb: float

    def faults(self) -> list[str]:
        """Return in what it is over its limits, apart from time, which depends on the machine."""
        found = {
            f"{self.statements} statements": self.statements > STATEMENTS,
            f"a scan of {self.rows:,} rows": self.rows > self.page.rows,
            f"{self.raw_kb:.0f} KB": self.raw_kb > RAW_KB,
            f"{self.gzip_kb:.1f} KB compressed": self.gzip_kb > self.page.gzip_kb,
        }
        return [text for text, over in found.items() if over]

    def cells(self) -> tuple[str, ...]:
        """Return it as the table shows it."""
        verdict = "; ".join(self.faults() + ["slow"] * (self.p95_ms > self.page.limit_ms))
        return (
            self.page.name, f"{self.first_ms:.1f}", f"{self.p50_ms:.1f}", f"{self.p95_ms:.1f}",
            f"{self.page.limit_ms:g}", str(self.statements), f"{self.rows:,}",
            f"{self.raw_kb:.0f}", f"{self.gzip_kb:.1f}", verdict or "ok",
        )  # fmt: skip


HEAD = ("page", "first ms", "p50 ms", "p95 ms", "limit", "statements", "rows", "KB", "gzip KB", "")


def fill(conn: db.Connection, runs: int, items: int) -> None:
    """Insert so many runs and jobs of each family, a map of so many items, and a large graph."""
    text = FILL.replace("RUNS", str(runs)).replace("ITEMS", str(items))
    for statement in text.split(";\n"):
        if statement.strip():
            conn.execute(statement.encode())
    deps = [[f"n{i - 20}", f"n{i - 7}"] if i >= 20 else [] for i in range(NODES)]
    rest = {"module": "m", "queue": "cpu", "model": None, "inputs": {}, "skip_if": None}
    nodes = [{"id": f"n{i}", "deps": deps[i], **rest} for i in range(NODES)]
    definition = json.dumps({"version": 2, "workflow": "graph", "nodes": nodes})
    conn.execute(
        b"INSERT INTO workflow_runs (id, workflow_name, status, started_at, definition,"
        b" definition_hash) VALUES ('graph', 'graph', 'running', now(), %s, 'graph')",
        [definition],
    )
    conn.execute(
        b"INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, claim_no,"
        b" started_at, finished_at) SELECT 'graph', 'n' || i, 'm', 'cpu', 'completed', 1, now(),"
        b" now() FROM generate_series(0, %s) i",
        [NODES - 1],
    )
    for table in LARGE:
        conn.execute(f"VACUUM (ANALYZE) {table}".encode())


@contextmanager
def _head_kept() -> Generator[None]:
    """Let the facts in the head of every page, read once in 5 s for all viewers, stay as they are.

    Else a page would have their statements, too, by chance. They were read by an earlier page.
    """
    real = view.Pages.head

    async def head(self: Any, _: Any) -> Any:
        return self.last_head

    view.Pages.head = head  # type: ignore[method-assign]
    try:
        yield
    finally:
        view.Pages.head = real  # type: ignore[method-assign]


@contextmanager
def _recorded() -> Generator[list[tuple[Any, dict[str, Any]]]]:
    """Yield a list that gets each named statement that is executed, with its parameters."""
    found: list[tuple[Any, dict[str, Any]]] = []
    real = statements.Named.__call__

    def call(self: Any, conn: Any, /, **given: Any) -> Any:
        found.append((self, given))
        return real(self, conn, **given)

    statements.Named.__call__ = call  # type: ignore[method-assign]
    try:
        yield found
    finally:
        statements.Named.__call__ = real  # type: ignore[method-assign]


def _most_rows(conn: db.Connection, text: bytes, given: dict[str, Any]) -> int:
    """Return how many rows the scan of a statement that reads most of them reads."""
    explained = b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + text
    (row,) = conn.execute(explained, *([given] if given else [])).fetchall()
    open_ = [row["QUERY PLAN"][0]["Plan"]]
    most = 0.0
    while open_:
        node = open_.pop()
        open_ += node.get("Plans", [])
        if "Relation Name" in node:
            read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            most = max(most, read * node["Actual Loops"])
    return int(most)


async def _measured(http: httpx.AsyncClient, conn: db.Connection, page: Page, times: int) -> Figure:
    took: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        reply = await http.get(f"/ui{page.path}")
        took.append(1000 * (time.perf_counter() - begun))
        if reply.status_code != 200:
            raise RuntimeError(f"{page.path}: {reply.status_code} {reply.text[:500]}")
    with _recorded() as calls:
        content = (await http.get(f"/ui{page.path}")).content
    own = [(each.text, given) for each, given in calls if b"set_config" not in each.text]
    first, later = took[0], sorted(took[1:]) or took
    return Figure(
        page, first, statistics.median(later), later[min(len(later) - 1, len(later) * 95 // 100)],
        len(own), max((_most_rows(conn, *each) for each in own), default=0), len(content) / 1024,
        len(gzip.compress(content)) / 1024,
    )  # fmt: skip


@contextmanager
def _counted() -> Generator[list[int]]:
    """Yield a list with the number of statements that all connections of this process execute."""
    count = [0]
    real: Any = psycopg.Cursor.execute

    def execute(self: Any, query: Any, *args: Any, **more: Any) -> Any:
        count[0] += "set_config" not in str(query)
        return real(self, query, *args, **more)

    psycopg.Cursor.execute = execute  # type: ignore[method-assign]
    try:
        yield count
    finally:
        psycopg.Cursor.execute = real  # type: ignore[method-assign]


async def _rate(made: Any, http: httpx.AsyncClient, viewers: int, seconds: float) -> float:
    """Return the statements a second while so many pages of Now are open and nothing happens."""
    over = asyncio.Event()
    cookie = "; ".join(f"{each.name}={each.value}" for each in http.cookies.jar)
    stream = {
        "type": "http", "method": "GET", "path": "/ui/live", "raw_path": b"/ui/live",
        "query_string": b"", "headers": [(b"host", b"localhost"), (b"cookie", cookie.encode())],
        "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def receive() -> Any:
        await over.wait()
        return {"type": "http.disconnect"}

    async def drop(_: Any) -> None:
        pass

    async def poll(number: int) -> None:
        await asyncio.sleep(POLL_S * number / viewers)
        while not over.is_set():
            for path in ("/ui/", "/ui/head"):
                reply = await http.get(path, headers={"hx-request": "true"})
                if reply.status_code != 200:
                    raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:500]}")
            await asyncio.sleep(POLL_S)

    open_ = [asyncio.ensure_future(made({**stream}, receive, drop)) for _ in range(viewers)]
    open_ += [asyncio.ensure_future(poll(number)) for number in range(viewers)]
    await asyncio.sleep(POLL_S)
    with _counted() as count:
        await asyncio.sleep(seconds)
        found = count[0] / seconds
    over.set()
    await asyncio.gather(*open_)
    return found


def rss_mb() -> float:
    """Return the resident memory of this process, in MB of 1,024 kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Found(NamedTuple):
    """What all pages took, the statements a second for viewers, and the growth of the process."""

    figures: list[Figure]
    rate: float
    growth_mb: float


async def _visit(times: int, more: int, watched_s: float) -> Found:
    found = settings.load(token=TOKEN, workers_json="", app_dashboard=True)
    settings.apply(found)
    made = application.build(found, upkeep=False)
    gc.freeze()  # as `server.run` does
    transport = httpx.ASGITransport(app=made)
    async with (
        made.router.lifespan_context(made),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
    ):
        reply = await http.post("/ui/login", data={"token": TOKEN, "name": "ann"})
        if reply.status_code != 303:
            raise RuntimeError(f"login: {reply.status_code} {reply.text[:500]}")
        await http.get("/ui/")  # reads what is in the head of each page
        with _head_kept(), db.connect(limited=False) as conn:
            figures = [await _measured(http, conn, page, times) for page in PAGES]
        rate = await _rate(made, http, VIEWERS, watched_s)
        before = rss_mb()
        for number in range(more):
            await http.get(f"/ui{PAGES[number % len(PAGES)].path}")
        return Found(figures, rate, rss_mb() - before)


def measure(times: int = 40, more: int = 0, watched_s: float = 20.0) -> Found:
    """Return what the pages take on the database of the environment.

    Each page is opened so many `times`. Then VIEWERS follow Now for `watched_s` seconds, and `more`
    pages are opened, over which the memory of the process grows.
    """
    return asyncio.run(_visit(times, more, watched_s))


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every page is within its limits, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="also of jobs of each family")
    parser.add_argument("--items", type=int, default=100_000, help="of the map")
    parser.add_argument("--times", type=int, default=40, help="how often each page is opened")
    parser.add_argument("--more", type=int, default=10_000, help="pages for the growth of memory")
    parser.add_argument("--dsn", help="a server to use; its database must be named *_bench")
    given = parser.parse_args(argv)
    processes.forget_knobs()
    with server.scratch_folder() as scratch, server.running(given.dsn, scratch) as where:
        begun = time.monotonic()
        with where.database("pages"):
            with db.connect(limited=False) as conn:
                fill(conn, given.runs, given.items)
            sys.stderr.write(f"{given.runs:,} runs after {time.monotonic() - begun:.0f} s\n")
            found = measure(given.times, given.more)
    lines = [HEAD, *(each.cells() for each in found.figures)]
    sys.stdout.write(report.plain(lines, range(1, len(HEAD) - 1)) + "\n")
    sys.stdout.write(
        f"{VIEWERS} viewers of Now: {found.rate:.1f} statements/s (at most {RATE:g})\n"
        f"{given.more:,} more pages: {found.growth_mb:+.1f} MB (at most {GROWTH_MB:g})\n"
    )
    bad = found.rate > RATE or found.growth_mb > GROWTH_MB
    bad |= any(each.faults() or each.p95_ms > each.page.limit_ms for each in found.figures)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
