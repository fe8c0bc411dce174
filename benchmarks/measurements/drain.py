"""Measure how fast one worker drains a queue of ingest jobs, and the nodes of one run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench, until
from queue_workflows import db, jobs, run_store

if TYPE_CHECKING:
    from typing_extensions import LiteralString

ABOUT = """3,000 jobs whose handlers do nothing are all in the queue when one worker process begins
to claim them. The rate is computed from the times that the database stored: the first start and the
last finish (for nodes: the end of the run). `queue-claim-worker`, whose handlers run in one
executor, runs ingest jobs one by one. For nodes, it and `queue-orchestrator` work on one run of
3,000 independent nodes, and then on 500 runs of one node, from the start of the first node to the
end of the last run. Bare is a process with one connection. It calls one SQL function for each job,
which finishes the current job and claims the next one. So each job costs one round trip and one
commit. Bare has no events and no fence. The ratio compares with the mean of the bare rounds before
and after."""
JOBS = 3000
QUICK_JOBS = 1000
RUNS = 500
TRUNCATE_TRIES = 10
RATE_BARE = (
    "SELECT count(*) / extract(epoch FROM max(finished_at) - min(started_at)) FROM bare_jobs"
)
_INGEST = (
    "SELECT count(*) / extract(epoch FROM max(finished_at) - min(started_at)) FROM ingest_jobs"
    " WHERE status = 'completed'"
)
_NODES = (
    "SELECT count(*) / extract(epoch FROM r.finished_at - min(j.started_at))"
    " FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id"
    " WHERE r.id = %s AND j.status = 'completed' GROUP BY r.finished_at"
)
_RUNS = (
    "SELECT count(*) / extract(epoch FROM max(finished_at)"
    " - (SELECT min(started_at) FROM workflow_node_jobs)) FROM workflow_runs"
    " WHERE status = 'completed' HAVING count(*) = %s"
)
_LEFT = (
    "SELECT EXISTS (SELECT FROM ingest_jobs WHERE queue IN ('fetch', 'load') AND status = 'queued'"
    " AND blocked_reason IS NULL) OR EXISTS (SELECT FROM ingest_jobs WHERE status = 'running')"
)
"""Looked up while the workers work: by index, or it would cost them time."""


def rate(conn: baseline.Connection, query: LiteralString, *values: object) -> float:
    """Return the number that a query returns."""
    row = conn.execute(query, values or None).fetchone()
    assert row is not None
    return float(next(iter(row.values())))


def is_true(conn: baseline.Connection, query: LiteralString, *values: object) -> bool:
    """Return the boolean that a query returns."""
    row = conn.execute(query, values or None).fetchone()
    return bool(row and next(iter(row.values())))


def empty_ingest(conn: psycopg.Connection[dict[str, object]]) -> None:
    """Delete all ingest jobs and their history."""
    _truncate(conn, "TRUNCATE ingest_jobs, ingest_job_events")


def empty_runs(conn: psycopg.Connection[dict[str, object]]) -> None:
    """Delete all runs and their history."""
    _truncate(conn, "TRUNCATE workflow_runs, workflow_node_events CASCADE")


def _truncate(conn: psycopg.Connection[dict[str, object]], statement: LiteralString) -> None:
    """Truncate tables that idle workers query, whose transactions lock them in another order."""
    for _ in range(TRUNCATE_TRIES - 1):
        try:
            conn.execute(statement)
        except psycopg.errors.DeadlockDetected:
            continue
        return
    conn.execute(statement)


def drain_ingest(
    conn: baseline.Connection, queue: str, count: int, watched: list[processes.Process]
) -> float:
    """Return the jobs per second of the running worker of that queue."""
    empty_ingest(conn)
    args: list[dict[str, object]] = [{}] * count
    with conn.transaction():
        jobs.enqueue_many(task_name="noop", queue=queue, args=args, conn=conn)
        conn.execute("ANALYZE ingest_jobs")
    until(lambda: not is_true(conn, _LEFT), f"{count} ingest jobs done", watched, every_s=0.05)
    return rate(conn, _INGEST)


def drain_nodes(conn: baseline.Connection, count: int, watched: list[processes.Process]) -> float:
    """Return the nodes per second of the running worker and orchestrator."""
    empty_runs(conn)
    run_id = run_store.insert_run(workflow_name=f"wide:{count}")["id"]
    over = "SELECT finished_at IS NOT NULL FROM workflow_runs WHERE id = %s"
    until(lambda: is_true(conn, over, run_id), f"a run of {count} nodes done", watched)
    if not is_true(conn, "SELECT status = 'completed' FROM workflow_runs WHERE id = %s", run_id):
        raise RuntimeError(f"the run ended otherwise: {run_store.get_run(run_id)}")
    return rate(conn, _NODES, run_id)


def drain_runs(conn: baseline.Connection, count: int, watched: list[processes.Process]) -> float:
    """Return the runs of one node per second of the running worker and orchestrator."""
    empty_runs(conn)
    with db.connect(autocommit=False) as own:
        for _ in range(count):
            run_store.insert_run(workflow_name="chain:1", conn=own)
        own.commit()
    over = "SELECT bool_and(finished_at IS NOT NULL) FROM workflow_runs"
    until(lambda: is_true(conn, over), f"{count} runs done", watched, every_s=0.05)
    return rate(conn, _RUNS, count)


def drain_bare(bench: Bench, conn: baseline.Connection, dsn: str, count: int) -> float:
    """Return the jobs per second of the bare loop."""
    baseline.fill(conn, "load", count)
    bench.finish(dsn, "bare-drain", processes.bare("drain", "load"))
    return rate(conn, RATE_BARE)


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield a row for ingest jobs, one for nodes and one for runs."""
    commands = (
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu")),
        ("load", processes.worker("load")),
    )
    bare: list[float] = []
    ingest: list[float] = []
    nodes: list[float] = []
    runs: list[float] = []
    with (
        bench.server.database("drain") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, *commands) as started,
    ):
        conn.execute("SET enable_seqscan = off")
        drain_ingest(conn, "load", 50, started)
        drain_nodes(conn, 50, started)
        drain_runs(conn, 50, started)
        count = bench.pick(JOBS, QUICK_JOBS)
        for _ in bench.rounds(5, 3, full_s=45, quick_s=7):
            bare.append(drain_bare(bench, conn, dsn, count))
            ingest.append(drain_ingest(conn, "load", count, started))
            nodes.append(drain_nodes(conn, count, started))
            runs.append(drain_runs(conn, RUNS, started))
        bare.append(drain_bare(bench, conn, dsn, count))
    for name, rates, limit in (("ingest jobs", ingest, 0.6), ("DAG nodes", nodes, 0.5)):
        yield results.Row(
            f"drain {name}, one by one",
            results.middle(rates),
            "/s",
            results.middle(bare),
            results.against(rates, bare),
            results.at_least(limit),
            f"{count:,} jobs" if bench.quick else "",
        )
    yield results.Row(
        "drain runs of one node",
        results.middle(runs),
        "/s",
        results.middle(bare),
        results.against(runs, bare),
    )
    for peer in bench.peers("drain"):
        value = peer.call("drain", count)
        work = "drain, one by one"
        yield results.PeerRow(work, peer.title, value, "/s", results.middle(ingest))
