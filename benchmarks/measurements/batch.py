"""Measure how fast an ingest queue is drained in batches of 100."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import drain
from queue_workflows import db

ABOUT = """As `drain`, with 20,000 ingest jobs and `queue-claim-worker --batch 100`. Bare is a
process that finishes 100 jobs by `unnest` and claims the next 100, in one round trip and one
commit."""
JOBS = 20_000
QUICK_JOBS = 10_000
SIZE = 100


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield one row."""
    count = bench.pick(JOBS, QUICK_JOBS)
    bare: list[float] = []
    ours: list[float] = []
    with (
        bench.server.database("batch") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, ("load", processes.worker("load", "--batch", str(SIZE)))) as started,
    ):
        conn.execute("SET enable_seqscan = off")
        drain.drain_ingest(conn, "load", 500, started)
        for _ in bench.rounds(5, 3, full_s=25, quick_s=4):
            bare.append(_bare(bench, conn, dsn, count))
            ours.append(drain.drain_ingest(conn, "load", count, started))
        bare.append(_bare(bench, conn, dsn, count))
    yield results.Row(
        f"drain ingest jobs, batches of {SIZE}",
        results.middle(ours),
        "/s",
        results.middle(bare),
        results.against(ours, bare),
        results.at_least(0.45),
        f"{count:,} jobs" if bench.quick else "",
    )
    for peer in bench.peers("batch"):
        value = peer.call("batch", count)
        work = f"drain, batches of {SIZE}"
        yield results.PeerRow(work, peer.title, value, "/s", results.middle(ours))


def _bare(bench: Bench, conn: baseline.Connection, dsn: str, count: int) -> float:
    baseline.fill(conn, "load", count)
    bench.finish(dsn, "bare-batch", processes.bare("batch", "load", str(SIZE)))
    return drain.rate(conn, drain.RATE_BARE)
