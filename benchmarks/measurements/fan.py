"""Measure one node, then 1,000 at once, then their join, with two workers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench, until
from benchmarks.measurements import drain
from queue_workflows import db, run_store

ABOUT = """A run of one node, N nodes that depend on it and one that depends on all of them, with
`queue-orchestrator` and two cpu workers: from the COMMIT of `insert_run` to the start of the join's
handler. Bare: two processes drain N rows inserted at once; the one that finds them all done inserts
the join, and one of the two runs it. The time is from the COMMIT of the rows to the start of the
join. A run of 10,000 (not with `--quick`) shows that a node costs no more in a larger fan: its
ratio is the time per node at 10,000 divided by the time per node at 1,000."""
SMALL = 1000
LARGE = 10_000
_JOIN = (
    "SELECT (context_delta ->> 'ns')::bigint FROM workflow_node_jobs"
    " WHERE run_id = %s AND node_id = 'w/join' AND status = 'completed'"
)
_BARE_JOIN = "SELECT (result ->> 'ns')::bigint FROM bare_jobs WHERE id = -1 AND status = 'done'"
_OVER = "SELECT finished_at IS NOT NULL FROM workflow_runs WHERE id = %s"


def seconds(
    conn: baseline.Connection, nodes: int, watched: list[processes.Process], shape: str = "fan"
) -> float:
    """Return the engine's time for a fan, or with `shape` "map" for a map of as many items."""
    drain.empty_runs(conn)
    with db.connect(autocommit=False) as own:
        run_id = run_store.insert_run(workflow_name=f"{shape}:{nodes}", conn=own)["id"]
        begun = time.monotonic_ns()
        own.commit()
    until(
        lambda: drain.is_true(conn, _OVER, run_id),
        f"a {shape} of {nodes} done",
        watched,
        every_s=0.1,
    )
    return (drain.rate(conn, _JOIN, run_id) - begun) / 1e9


def bare_seconds(conn: baseline.Connection, nodes: int, watched: list[processes.Process]) -> float:
    """Return the bare loop's time for a fan."""
    conn.execute("TRUNCATE bare_jobs RESTART IDENTITY")
    with conn.transaction():
        conn.execute(
            "INSERT INTO bare_jobs (queue, task_name) SELECT 'load', 'fan'"
            " FROM generate_series(1, %s)",
            (nodes,),
        )
        conn.execute("ANALYZE bare_jobs")
        conn.execute("SELECT pg_notify('bare_ready', 'load')")
        begun = time.monotonic_ns()
    done = "SELECT EXISTS (SELECT FROM bare_jobs WHERE id = -1 AND status = 'done')"
    until(lambda: drain.is_true(conn, done), f"a bare fan of {nodes} done", watched, every_s=0.1)
    return (drain.rate(conn, _BARE_JOIN) - begun) / 1e9


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield the fan, and a larger one."""
    commands = (
        ("bare", processes.bare("listen", "load")),
        ("bare", processes.bare("listen", "load")),
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu")),
        ("cpu", processes.worker("cpu")),
    )
    ours: list[float] = []
    bare: list[float] = []
    big: list[float] = []
    big_bare: list[float] = []
    with (
        bench.server.database("fan") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, *commands) as started,
    ):
        seconds(conn, 20, started)
        bare_seconds(conn, 20, started)
        for _ in bench.rounds(5, 3, full_s=20, quick_s=5):
            bare.append(bare_seconds(conn, SMALL, started))
            ours.append(seconds(conn, SMALL, started))
        yield results.Row(
            f"fan 1 to {SMALL:,} to join, 2 workers",
            results.middle(ours),
            "s",
            results.middle(bare),
            results.paired(ours, bare),
            results.at_most(1.6),
        )
        if bench.quick:
            return
        for _ in bench.rounds(3, 0, full_s=40, quick_s=0):
            big_bare.append(bare_seconds(conn, LARGE, started))
            big.append(seconds(conn, LARGE, started))
    scale = SMALL / LARGE
    yield results.Row(
        f"fan 1 to {LARGE:,} to join, 2 workers",
        results.middle(big),
        "s",
        results.middle(big_bare),
        [one * scale / results.middle(ours) for one in big],
        results.at_most(1.3),
        f"the ratio is the time a node to that at {SMALL:,}; to the bare loop it is"
        f" {results.middle(results.paired(big, big_bare)):.2f}",
    )
