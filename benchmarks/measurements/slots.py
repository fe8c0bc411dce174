"""Measure how fast a worker with slots, and one without executors, drains jobs and nodes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import drain
from queue_workflows import db

ABOUT = """As `drain`, with `queue-claim-worker --slots N`: N executors run the handlers, one
process claims and records. With `--inline` the worker runs the handlers itself. Bare is the loop of
`drain`, one job at a time."""
JOBS = 3000
QUICK_JOBS = 1000
MANY = 4
LIMITS = {("--inline",): (0.68, 0.58), ("--slots", str(MANY)): (1.0, 1.0)}
"""The least ratio of ingest jobs and of nodes, by the options of the worker."""


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield a row for ingest jobs and one for nodes per kind of worker, then those of peers."""
    ingest = 0.0
    for options in LIMITS:
        rows = [*_rows(bench, options)]
        ingest = rows[0].ours
        yield from rows
    for peer in bench.peers("slots"):
        value = peer.call("slots", bench.pick(1000, 300))
        yield results.PeerRow(f"drain, {MANY} at once", peer.title, value, "/s", ingest)


def _rows(bench: Bench, options: tuple[str, ...]) -> Iterator[results.Row]:
    commands = (
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu", *options)),
        ("load", processes.worker("load", *options)),
    )
    bare: list[float] = []
    ingest: list[float] = []
    nodes: list[float] = []
    with (
        bench.server.database(f"slots_{options[-1].lstrip('-')}") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, *commands) as started,
    ):
        conn.execute("SET enable_seqscan = off")
        drain.drain_ingest(conn, "load", 50, started)
        drain.drain_nodes(conn, 50, started)
        count = bench.pick(JOBS, QUICK_JOBS)
        for _ in bench.rounds(5, 3, full_s=40, quick_s=6):
            bare.append(drain.drain_bare(bench, conn, dsn, count))
            ingest.append(drain.drain_ingest(conn, "load", count, started))
            nodes.append(drain.drain_nodes(conn, count, started))
        bare.append(drain.drain_bare(bench, conn, dsn, count))
    name = f"one worker, {' '.join(options)}"
    limits = LIMITS[options]
    for what, rates, limit in zip(("ingest", "nodes"), (ingest, nodes), limits, strict=True):
        yield results.Row(
            f"{name}: {what}",
            results.middle(rates),
            "/s",
            results.middle(bare),
            results.against(rates, bare),
            results.at_least(limit),
            f"{count:,} jobs" if bench.quick else "",
        )
