"""Measure how fast an ingest queue is drained in batches of 100."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import drain
from queue_workflows import db
from queue_workflows.claim import claims, job_tables, outcomes

ABOUT = """As `drain`, with 20,000 ingest jobs and `queue-claim-worker --batch 100`, which runs the
handlers itself; and with `--supervise`, where one executor runs them. Bare is a process that
finishes 100 jobs by `unnest` and claims the next 100, in one round trip and one commit.

The CPU of the server is what its process for one connection takes while that connection records and
claims 6,000 jobs in such batches, without a worker. No worker can be faster. It is measured only if
the benchmark has started the server. Decision 0052 rests on it."""
JOBS = 20_000
QUICK_JOBS = 10_000
SERVER_JOBS = 6_000
SIZE = 100
_FILL = (
    "INSERT INTO ingest_jobs (task_name, queue) SELECT 'noop', 'load' FROM generate_series(1, %s)"
)


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield the rows of a worker that runs the handlers itself, of one with a parent, of none."""
    count = bench.pick(JOBS, QUICK_JOBS)
    inline = _row(bench, count, f"drain ingest jobs, batches of {SIZE}", at_least=0.45)
    yield inline
    yield _row(bench, count, f"the same with --supervise: batches of {SIZE}", "--supervise")
    if bench.server.is_own:
        yield server_cpu(bench, SERVER_JOBS)
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


def server_cpu(bench: Bench, count: int) -> results.Row:
    """Return the row of the CPU time that the server's process takes for a job."""
    bare: list[float] = []
    ours: list[float] = []
    with bench.server.database("batch_cpu"), db.connect(limited=False) as conn:
        pid = conn.info.backend_pid
        for _ in bench.rounds(4, 3, full_s=20, quick_s=4):
            baseline.fill(conn, "load", count)
            begun = processes.cpu_s(pid)
            baseline.drain_batches(conn, "load", SIZE)
            bare.append((processes.cpu_s(pid) - begun) / count * 1e6)
            drain.empty_ingest(conn)
            conn.execute(_FILL, (count,))
            conn.execute("ANALYZE ingest_jobs")
            begun = processes.cpu_s(pid)
            _drain_batches(conn)
            ours.append((processes.cpu_s(pid) - begun) / count * 1e6)
    return results.Row(
        f"the server's CPU for a job, batches of {SIZE}",
        results.middle(ours),
        "µs",
        results.middle(bare),
        results.paired(ours, bare),
    )


def _drain_batches(conn: db.Connection) -> None:
    """Record jobs and claim the next, with the worker's statement, until there is none."""
    who = claims.Claimant("bench", "bench", "load")
    done: list[claims.Done] = []
    while True:
        claim = claims.claim(job_tables.INGEST_JOBS, who, count=SIZE, done=done)
        found = [row for row in db.run(conn, claim) if row["id"]]
        if not found:
            return
        done = [
            claims.Done(
                job_tables.Lease(job_tables.INGEST_JOBS, row["id"], who.worker_id, row["claim_no"]),
                outcomes.Outcome("completed", 0.0),
            )
            for row in found
        ]
