"""Draining a queue with one worker that has four slots: ingest jobs and the nodes of one run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import drain
from queue_workflows import db

ABOUT = """As `drain`, with `queue-claim-worker --slots 4`: four executors run the handlers, one
process claims and records. Bare is the loop of `drain`, one job at a time."""
JOBS = 3000
QUICK_JOBS = 1000
SLOTS = "4"


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """A row for ingest jobs and one for nodes."""
    commands = (
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu", "--slots", SLOTS)),
        ("load", processes.worker("load", "--slots", SLOTS)),
    )
    bare: list[float] = []
    ingest: list[float] = []
    nodes: list[float] = []
    with (
        bench.server.database("slots") as dsn,
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
    for name, rates in (("ingest", ingest), ("nodes", nodes)):
        yield results.Row(
            f"one worker, {SLOTS} slots: {name}",
            results.middle(rates),
            "/s",
            results.middle(bare),
            results.against(rates, bare),
            results.at_least(1.0),
            f"{count:,} jobs" if bench.quick else "",
        )
    for peer in bench.peers("slots"):
        value = peer.call("slots", bench.pick(1000, 300))
        work = f"drain, {SLOTS} at once"
        yield results.PeerRow(work, peer.title, value, "/s", results.middle(ingest))
