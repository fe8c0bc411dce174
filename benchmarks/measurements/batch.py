"""Measure how fast an ingest queue is drained in batches of 100."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import drain
from queue_workflows import db

ABOUT = """As `drain`, with 20,000 ingest jobs and `queue-claim-worker --batch 100`, which runs the
handlers itself; and with `--supervise`, where one executor runs them. Bare is a process that
finishes 100 jobs by `unnest` and claims the next 100, in one round trip and one commit."""
JOBS = 20_000
QUICK_JOBS = 10_000
SIZE = 100


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield a row of a worker that runs the handlers itself, and one of a worker with a parent."""
    count = bench.pick(JOBS, QUICK_JOBS)
    inline = _row(bench, count, f"drain ingest jobs, batches of {SIZE}", at_least=0.45)
    yield inline
    yield _row(bench, count, f"the same with --supervise: batches of {SIZE}", "--supervise")
    for peer in bench.peers("batch"):
        value = peer.call("batch", count)
        yield results.PeerRow(f"drain, batches of {SIZE}", peer.title, value, "/s", inline.ours)


def _row(
    bench: Bench, count: int, name: str, *options: str, at_least: float | None = None
) -> results.Row:
    bare: list[float] = []
    ours: list[float] = []
    worker = processes.worker("load", "--batch", str(SIZE), *options)
    with (
        bench.server.database("batch" + "".join(options).replace("--", "_")) as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, ("load", worker)) as started,
    ):
        conn.execute("SET enable_seqscan = off")
        drain.drain_ingest(conn, "load", 500, started)
        for _ in bench.rounds(5, 3, full_s=25, quick_s=4):
            bare.append(_bare(bench, conn, dsn, count))
            ours.append(drain.drain_ingest(conn, "load", count, started))
        bare.append(_bare(bench, conn, dsn, count))
    return results.Row(
        name,
        results.middle(ours),
        "/s",
        results.middle(bare),
        results.against(ours, bare),
        None if at_least is None else results.at_least(at_least),
        f"{count:,} jobs" if bench.quick else "",
    )


def _bare(bench: Bench, conn: baseline.Connection, dsn: str, count: int) -> float:
    baseline.fill(conn, "load", count)
    bench.finish(dsn, "bare-batch", processes.bare("batch", "load", str(SIZE)))
    return drain.rate(conn, drain.RATE_BARE)
