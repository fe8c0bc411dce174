"""Measure a hop from one node to the next in a chain of 100 nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench, until
from benchmarks.measurements import drain
from queue_workflows import db, run_store

ABOUT = """A run of 100 nodes, each of which depends on the previous one, with `queue-orchestrator`
and two idle cpu workers. A hop is the time between the starts of two handlers that follow each
other, over the whole chain. In the second row each node also gets the result of the previous node.
Bare is two processes that LISTEN. The one that claims a job ends it, inserts the next and notifies,
in one transaction. Then it waits for a notification like the other one."""
NODES = 100
_CHAIN = (
    "SELECT (max((context_delta ->> 'ns')::bigint) - min((context_delta ->> 'ns')::bigint)) / 1e6"
    " / (count(*) - 1) FROM workflow_node_jobs WHERE run_id = %s"
)
_BARE = (
    "SELECT (max((result ->> 'ns')::bigint) - min((result ->> 'ns')::bigint)) / 1e6"
    " / (count(*) - 1) FROM bare_jobs WHERE status = 'done'"
)
_OVER = "SELECT finished_at IS NOT NULL FROM workflow_runs WHERE id = %s"


def hop_ms(
    conn: baseline.Connection, nodes: int, watched: list[processes.Process], shape: str = "chain"
) -> float:
    """Return the engine's time per hop."""
    run_id = run_store.insert_run(workflow_name=f"{shape}:{nodes}")["id"]
    until(lambda: drain.is_true(conn, _OVER, run_id), f"a chain of {nodes} done", watched)
    return drain.rate(conn, _CHAIN, run_id)


def bare_hop_ms(conn: baseline.Connection, nodes: int, watched: list[processes.Process]) -> float:
    """Return the bare loop's time per hop."""
    conn.execute("TRUNCATE bare_jobs")
    conn.execute(
        "WITH first AS (INSERT INTO bare_jobs (queue, args)"
        " VALUES ('load', jsonb_build_object('left', %s::int)))"
        " SELECT pg_notify('bare_ready', 'load')",
        (nodes - 1,),
    )
    done = "SELECT count(*) = %s FROM bare_jobs WHERE status = 'done'"
    until(lambda: drain.is_true(conn, done, nodes), f"a bare chain of {nodes} done", watched)
    return drain.rate(conn, _BARE)


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield both rows."""
    commands = (
        ("bare", processes.bare("listen", "load")),
        ("bare", processes.bare("listen", "load")),
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu")),
        ("cpu", processes.worker("cpu")),
    )
    ours: list[float] = []
    linked: list[float] = []
    bare: list[float] = []
    with (
        bench.server.database("chain") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, *commands) as started,
    ):
        for _ in range(2):
            hop_ms(conn, 20, started)
            hop_ms(conn, 20, started, "linked")
            bare_hop_ms(conn, 20, started)
        time.sleep(1.0)  # both workers have found the queue empty
        for _ in bench.rounds(15, 5, full_s=20, quick_s=4):
            bare.append(bare_hop_ms(conn, NODES, started))
            ours.append(hop_ms(conn, NODES, started))
            linked.append(hop_ms(conn, NODES, started, "linked"))
    yield results.Row(
        f"chain of {NODES} nodes, per hop",
        results.middle(ours),
        "ms",
        results.middle(bare),
        results.paired(ours, bare),
        results.at_most(2.5),
    )
    yield results.Row(
        "the same, each with the result of the node before",
        results.middle(linked),
        "ms",
        results.middle(bare),
        results.paired(linked, bare),
    )
