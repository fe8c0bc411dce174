"""Measure from the commit of an enqueue to the start of the handler, on an idle worker."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks import baseline, processes, results
from benchmarks.bench import Bench, until
from queue_workflows import db, jobs, run_store

if TYPE_CHECKING:
    from typing_extensions import LiteralString

ABOUT = """One job at a time into an idle system, with a random pause of 10 to 30 ms (`--quick`: 5
to 15) after each. The time begins when COMMIT is sent, and ends at the first line of the handler.
The handler reads the monotonic clock there, and returns the value. Ours is a `queue-claim-worker`
on an ingest queue; bare is a process that LISTENs, claims on a notification and notes the time.
Then the same for a whole run: from the COMMIT of `insert_run` to the handler of its first node,
with `queue-orchestrator` and a cpu worker, against the bare pickup's median. The samples of all
take turns."""
WARM = 15
_INGEST = "SELECT result ->> 'ns' AS ns FROM ingest_jobs WHERE id = %s AND status = 'completed'"
_NODE = (
    "SELECT context_delta ->> 'ns' AS ns FROM workflow_node_jobs"
    " WHERE run_id = %s AND status = 'completed'"
)
_BARE = "SELECT result ->> 'ns' AS ns FROM bare_jobs WHERE id = %s AND status = 'done'"
Sample = tuple[str, int]


class _Kind:
    """One way to hand in work, and how to ask when its handler started."""

    def __init__(
        self,
        conn: db.Connection,
        insert: Callable[[db.Connection], str],
        query: LiteralString,
        pause_s: tuple[float, float],
    ) -> None:
        self._conn = conn
        self._insert = insert
        self._query: LiteralString = query
        self._pause_s = pause_s
        self.samples: list[Sample] = []

    def submit(self) -> None:
        """Hand one in, commit, and let the system become idle again."""
        name = self._insert(self._conn)
        begun = time.monotonic_ns()
        self._conn.commit()
        self.samples.append((name, begun))
        time.sleep(random.uniform(*self._pause_s))

    def times_ms(
        self, reader: baseline.Connection, watched: Sequence[processes.Process]
    ) -> list[float]:
        """Return how long each took, in the order of their submission."""

        def stamp(name: str) -> int | None:
            row = reader.execute(self._query, (name,)).fetchone()
            return int(row["ns"]) if row else None

        found: list[float] = []
        for name, begun in self.samples:
            until(lambda name=name: stamp(name) is not None, f"job {name} ran", watched)
            found.append(((stamp(name) or 0) - begun) / 1e6)
        return found


def _bare(conn: db.Connection) -> str:
    row = conn.execute(
        baseline.ENQUEUE, ("stamp", "load", "tick", 100, json.dumps({})), prepare=True
    ).fetchone()
    conn.execute("SELECT pg_notify('bare_ready', 'load')", prepare=True)
    assert row is not None
    return str(row["id"])


def _ingest(conn: db.Connection) -> str:
    return jobs.enqueue(task_name="stamp", queue="load", conn=conn)


def _run(conn: db.Connection) -> str:
    return run_store.insert_run(workflow_name="chain:1", conn=conn)["id"]


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield pickup at p50 and p99, and the first node of a run."""
    pause_s = bench.pick((0.010, 0.030), (0.005, 0.015))
    one_kind = (("bare", processes.bare("listen", "load")), ("load", processes.worker("load")))
    for_runs = (("orchestrator", processes.orchestrator()), ("cpu", processes.worker("cpu")))
    with (
        bench.server.database("pickup") as dsn,
        baseline.connect(dsn) as reader,
        db.connect(autocommit=False) as one,
        db.connect(autocommit=False) as two,
        db.connect(autocommit=False) as three,
        bench.running(dsn, *one_kind) as first,
    ):
        bare = _Kind(one, _bare, _BARE, pause_s)
        ingest = _Kind(two, _ingest, _INGEST, pause_s)
        bare_ms, ingest_ms = _times(bench.pick(600, 200), (bare, ingest), reader, first)
        yield from _pickup_rows(bare_ms, ingest_ms)
        with bench.running(dsn, *for_runs) as second:
            runs = _Kind(three, _run, _NODE, pause_s)
            watched = [*first, *second]
            beside_ms, runs_ms = _times(bench.pick(300, 100), (bare, runs), reader, watched)
        yield _run_row(beside_ms, runs_ms)
    for peer in bench.peers("pickup"):
        latencies = peer.pickup_ms(len(ingest_ms))
        for pct in (50, 99):
            yield results.PeerRow(
                f"pickup p{pct}",
                peer.title,
                results.percentile(latencies, pct),
                "ms",
                results.percentile(ingest_ms, pct),
            )


def _times(
    count: int,
    kinds: Sequence[_Kind],
    reader: baseline.Connection,
    watched: Sequence[processes.Process],
) -> list[list[float]]:
    """Return the times of each kind, whose samples alternate, after some that do not count."""
    found: list[list[float]] = []
    for number in (WARM, count):
        for kind in kinds:
            kind.samples.clear()
        for _ in range(number):
            for kind in kinds:
                kind.submit()
        found = [kind.times_ms(reader, watched) for kind in kinds]
    return found


def _pickup_rows(bare: list[float], ingest: list[float]) -> Iterator[results.Row]:
    """Return the rows; a percentile's ratio is the median of the ratios of three thirds."""
    for pct, limit in ((50, 1.8), (99, 1.3)):
        parts = zip(_thirds(ingest), _thirds(bare), strict=True)
        ratios = [results.percentile(a, pct) / results.percentile(b, pct) for a, b in parts]
        yield results.Row(
            f"pickup by an idle worker, p{pct}",
            results.percentile(ingest, pct),
            "ms",
            results.percentile(bare, pct),
            ratios,
            results.at_most(limit),
        )


def _run_row(bare: list[float], runs: list[float]) -> results.Row:
    middle = results.middle
    return results.Row(
        "run inserted to first node, p50",
        middle(runs),
        "ms",
        middle(bare),
        [middle(a) / middle(b) for a, b in zip(_thirds(runs), _thirds(bare), strict=True)],
        results.at_most(3.0),
        f"p99 {results.number(results.percentile(runs, 99))} ms",
    )


def _thirds(values: list[float]) -> list[list[float]]:
    size = len(values) // 3
    return [values[i * size : (i + 1) * size] for i in range(3)]
