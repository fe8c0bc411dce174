"""Measure claims of a long queue while a limit is set on it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg

from benchmarks import results
from benchmarks.bench import Bench
from queue_workflows import db, queues
from queue_workflows.claim import claims, job_tables, outcomes

ABOUT = """A limit of one job at once for each partition is set on a queue of 100,000 jobs
(`--quick`: 10,000), which belong to one partition or to a hundred. After that a worker's statement
runs 300 times; it finishes one job and claims the next. The figure is the longest time until the
worker has the next job. The note has the time for setting the limit. There is no bare figure,
because the bare loop has no limits."""
STEPS = 300


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield a row for one partition and one for a hundred."""
    count = bench.pick(100_000, 10_000)
    for partitions in (1, 100):
        with bench.server.database("limits") as url, db.connect(url=url) as conn:
            _load(url, count, partitions)
            longest_ms, set_ms = _longest(conn)
        yield results.Row(
            f"longest claim after a limit was set, {count:,} queued, partitions: {partitions}",
            longest_ms,
            "ms",
            note=f"setting it took {set_ms:.0f} ms",
        )


def _load(url: str, count: int, partitions: int) -> None:
    with psycopg.connect(url, autocommit=True) as loader:
        loader.execute(
            "INSERT INTO ingest_jobs (task_name, queue, partition_key)"
            " SELECT 'noop', 'load', 'p' || n %% %s FROM generate_series(1, %s) n",
            (partitions, count),
        )
        loader.execute("ANALYZE ingest_jobs")


def _longest(conn: db.Connection) -> tuple[float, float]:
    """Return the longest step after the limit, and the time to set it, in ms."""
    who = claims.Claimant("bench", "bench", "load")
    (job,) = db.run(conn, claims.claim(job_tables.INGEST_JOBS, who))
    begun = time.perf_counter()
    queues.limit("load", partition_max_running=1)
    set_s = time.perf_counter() - begun
    longest_s = 0.0
    for _ in range(STEPS):
        lease = job_tables.Lease(job_tables.INGEST_JOBS, job["id"], "bench", job["claim_no"])
        done = claims.Done(lease, outcomes.Outcome("completed", 0.0))
        begun = time.perf_counter()
        found = db.run(conn, claims.claim(lease.table, who, done=[done]))
        while not found or not found[0]["id"]:  # what it looked at went to its line
            found = db.run(conn, claims.claim(lease.table, who))
        longest_s = max(longest_s, time.perf_counter() - begun)
        job = found[0]
    return longest_s * 1000, set_s * 1000
