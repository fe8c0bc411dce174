"""Measure finishing a job and claiming the next, with long queues and a long history."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg

from benchmarks import baseline, results
from benchmarks.bench import Bench
from queue_workflows import db
from queue_workflows.claim import claims, job_tables, outcomes
from queue_workflows.db import statements

ABOUT = """The worker's own statement, which finishes one job and claims the next, on an open
connection: the median of 300 calls (`--quick`: 90). The calls alternate between a small database
with 1,000 queued jobs and a large one with more rows. For each block of 30 calls, the median on the
large database is divided by the median on the small one. The large database has one of these:

- more queued jobs
- 1,000 queued jobs, and 100,000 that are not due
- 1,000 queued jobs behind 100,000 older ones that wait for a lock key of a running job
- 1,000 queued jobs behind 100,000 older ones of a paused partition (ingest jobs only)
- 1,000 queued jobs, and 1,000,000 finished ones

Each is measured twice, on new connections without cached plans: first with the statistics of the
empty tables, then after ANALYZE. Autovacuum is off for these tables, so that the statistics do not
change. Rows are loaded by INSERT … SELECT generate_series; 1,000 nodes belong to each run. Bare is
the statement of the bare loop on the same number of rows, after ANALYZE. The orchestrator's poll is
the one statement by which it finds out whether there is anything to do. It runs on 40 pairs of new
connections, one to each database. The two connections of a pair are opened in alternating order,
because the core on which a server process runs matters for a statement of 0.1 ms."""
BASE = 1000
BLOCK = 30
_TABLES = (
    "ingest_jobs, ingest_job_events, bare_jobs, workflow_runs, workflow_node_jobs,"
    " workflow_dispatch_events, workflow_node_events"
)
Conn = psycopg.Connection[Any]
Step = Callable[[], None]


class Case(NamedTuple):
    """What lies in the tables besides the base's queued jobs."""

    name: str
    queued: int = 0
    not_due: int = 0
    locked: int = 0
    """Those of one lock key, the first of which runs."""
    limited: int = 0
    """Those of a paused partition, of ingest jobs alone."""
    finished: int = 0
    limit: float = 1.3


def cases(bench: Bench) -> list[Case]:
    """Return the cases of this run; --quick has 100,000 where the others have 1,000,000."""
    many = bench.pick(1_000_000, 100_000)
    sizes = sorted({100_000, many})
    return [
        *(Case(f"at {size:,} queued", queued=size - BASE) for size in sizes),
        Case("at 100,000 not due", not_due=100_000),
        Case("behind 100,000 of a busy lock key", locked=100_000),
        Case("behind 100,000 of a paused partition", limited=100_000),
        Case(f"beside {many:,} finished", finished=many, limit=1.1),
    ]


class Family(NamedTuple):
    """How to load and to step one kind of job."""

    name: str
    load: Callable[[Conn, int, str], None]
    """How many, and `queued`, `not_due`, `locked`, `limited` or `finished`."""
    step: Callable[[db.Connection], Step]


_STATE = {
    "queued": ("queued", None),
    "not_due": ("queued", "not_due"),
    "locked": ("queued", "locked"),
    "limited": ("queued", "limited"),
    "finished": ("completed", None),
}


def load_ingest(conn: Conn, count: int, state: str) -> None:
    """Insert ingest jobs."""
    if state == "limited" and count:
        conn.execute(
            "INSERT INTO queue_partitions (queue, partition_key, paused_at)"
            " VALUES ('load', 'paused', now())"
        )
    status, blocked = _STATE[state]
    conn.execute(
        "INSERT INTO ingest_jobs"
        " (task_name, queue, status, blocked_reason, available_at, finished_at, lock_key,"
        " partition_key)"
        " SELECT 'noop', 'load', %(status)s::text, %(blocked)s::text,"
        " CASE WHEN %(blocked)s::text = 'not_due' THEN now() + interval '1 day' END,"
        " CASE WHEN %(status)s::text = 'completed' THEN now() END,"
        " CASE WHEN %(blocked)s::text = 'locked' THEN 'busy' END,"
        " CASE WHEN %(blocked)s::text = 'limited' THEN 'paused' END"
        " FROM generate_series(1, %(count)s::int)",
        {"status": status, "blocked": blocked, "count": count},
    )
    if state == "locked":
        _run_first(conn, "ingest_jobs")


def load_nodes(conn: Conn, count: int, state: str) -> None:
    """Insert nodes, and a run for each 1,000 of them."""
    status, blocked = _STATE[state]
    values = {"status": status, "blocked": blocked, "count": count, "per_run": BASE}
    conn.execute(
        "WITH run AS (INSERT INTO workflow_runs (workflow_name, status, started_at)"
        " SELECT 'bench', CASE WHEN %(status)s::text = 'completed' THEN 'completed'"
        " ELSE 'running' END, now()"
        " FROM generate_series(1, greatest(1, %(count)s::int / %(per_run)s::int)) RETURNING id)"
        " INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, ref_heads,"
        " blocked_reason, available_at, finished_at, lock_key)"
        " SELECT run.id, 'n' || n, 'noop', 'cpu', %(status)s::text, '{}', %(blocked)s::text,"
        " CASE WHEN %(blocked)s::text = 'not_due' THEN now() + interval '1 day' END,"
        " CASE WHEN %(status)s::text = 'completed' THEN now() END,"
        " CASE WHEN %(blocked)s::text = 'locked' THEN 'busy' END"
        " FROM run CROSS JOIN generate_series(1, least(%(count)s::int, %(per_run)s::int)) n",
        values,
    )
    if state == "locked":
        _run_first(conn, "workflow_node_jobs")
    if state == "finished":
        conn.execute(
            "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, processed_at)"
            " SELECT run_id, node_id, 'completed', now() FROM workflow_node_jobs"
            " WHERE status = 'completed'"
        )


def _run_first(conn: Conn, table: str) -> None:
    """Claim the first job of a lock key, which keeps running."""
    conn.execute(
        f"UPDATE {table} SET status = 'running', blocked_reason = NULL, claim_no = 1,"
        " worker_id = 'busy', claimed_by = 'busy', started_at = now(), heartbeat_at = now(),"
        " lease_expires_at = now() + interval '1 day' WHERE seq ="
        f" (SELECT min(seq) FROM {table} WHERE lock_key = 'busy')"
        f" AND NOT EXISTS (SELECT FROM {table} WHERE lock_key = 'busy'"
        " AND status = 'running')".encode()
    )


def load_bare(conn: Conn, count: int, state: str) -> None:
    """Insert bare jobs; what is not due has its own status, which keeps it out of the index."""
    status = {"finished": "done", "queued": "queued"}.get(state, "not_due")
    conn.execute(
        "INSERT INTO bare_jobs (queue, status) SELECT 'load', %s FROM generate_series(1, %s)",
        (status, count),
    )


def _claiming(conn: db.Connection, table: job_tables.JobTable, queue: str) -> Step:
    """Return what completes the held job and claims the next one in one statement."""
    who = claims.Claimant("bench", "bench", queue)
    held = db.run(conn, claims.claim(table, who))

    def step() -> None:
        lease = job_tables.Lease(table, held[0]["id"], who.worker_id, held[0]["claim_no"])
        done = claims.Done(lease, outcomes.Outcome("completed", 0.0))
        held[:] = db.run(conn, claims.claim(table, who, done=[done]))

    return step


def _ingest_step(conn: db.Connection) -> Step:
    return _claiming(conn, job_tables.INGEST_JOBS, "load")


def _node_step(conn: db.Connection) -> Step:
    return _claiming(conn, job_tables.NODE_JOBS, "cpu")


def _bare_step(conn: db.Connection) -> Step:
    held = [baseline.step(conn, None, None, "load")]

    def step() -> None:
        job = held[0]
        assert job is not None
        held[0] = baseline.step(conn, job["id"], "{}", "load")

    return step


def _look_step(conn: db.Connection) -> Step:
    def step() -> None:
        statements.pending.work(conn, within_s=0.0)

    return step


def load_nothing(conn: Conn, count: int, state: str) -> None:
    """Load nothing, for a case without changes."""
    del conn, count, state


INGEST = Family("ingest", load_ingest, _ingest_step)
NODES = Family("nodes", load_nodes, _node_step)
BARE = Family("bare", load_bare, _bare_step)
LOOK = Family("look", load_nothing, _look_step)


def _timed_ms(step: Step) -> float:
    begun = time.perf_counter()
    step()
    return (time.perf_counter() - begun) * 1000


def _block(steps: Sequence[Step]) -> list[list[float]]:
    """Return the times of each step; steps alternate, and take turns at going first."""
    times: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for _ in range(BLOCK):
        for i in order:
            times[i].append(_timed_ms(steps[i]))
        order.reverse()
    return times


class _Pair:
    """Two databases, one with the base alone and one with the case, and the steps on both."""

    def __init__(self, urls: tuple[str, str], stack: ExitStack, blocks: int) -> None:
        self._urls = urls
        self._blocks = blocks
        self.loaders = [stack.enter_context(psycopg.connect(u, autocommit=True)) for u in urls]
        for conn in self.loaders:
            # Loading is not measured, and twice as fast without triggers and foreign keys.
            with suppress(psycopg.errors.InsufficientPrivilege):
                conn.execute("SET session_replication_role = replica")

    def compare(self, family: Family) -> tuple[list[float], list[float], list[float]]:
        """Return costs in ms at the base and in the case, and the ratio of each pair of blocks."""
        every: tuple[list[float], list[float]] = ([], [])
        ratios: list[float] = []
        sessions, blocks = (4 * self._blocks, 1) if family is LOOK else (1, self._blocks)
        for session in range(sessions):
            order = self._urls if session % 2 == 0 else self._urls[::-1]
            with db.connect(url=order[0]) as one, db.connect(url=order[1]) as other:
                steps = [family.step(one), family.step(other)]
                if order is not self._urls:
                    steps.reverse()
                _block(steps)
                for _ in range(blocks):
                    for loader in self.loaders:
                        family.load(loader, BLOCK, "queued")
                    base, case = _block(steps)
                    every[0].extend(base)
                    every[1].extend(case)
                    ratios.append(results.middle(case) / results.middle(base))
        return every[0], every[1], ratios


@contextmanager
def _loaded(bench: Bench, case: Case, families: Sequence[Family]) -> Generator[_Pair]:
    """Return the pair with loaded rows, and statistics of its tables while they were empty."""
    with (
        ExitStack() as stack,
        bench.server.database("claim_base") as base,
        bench.server.database("claim_case") as loaded,
    ):
        pair = _Pair((base, loaded), stack, bench.pick(10, 3))
        for conn in pair.loaders:
            for table in _TABLES.split(", "):
                conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)".encode())
            conn.execute(f"ANALYZE {_TABLES}".encode())
        for family in families:
            family.load(pair.loaders[1], case.not_due, "not_due")
            family.load(pair.loaders[1], case.locked, "locked")
            if family is not NODES:
                family.load(pair.loaders[1], case.limited, "limited")
            family.load(pair.loaders[1], case.finished, "finished")
            family.load(pair.loaders[1], case.queued, "queued")
            for conn in pair.loaders:
                family.load(conn, BASE, "queued")
        pair.loaders[0].execute("CHECKPOINT")
        yield pair
        stack.close()


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield two rows per case and family, and the orchestrator's check in the last case."""
    families = (INGEST, NODES, BARE)
    for case in cases(bench):
        with _loaded(bench, case, families) as pair:
            bench.say(f"{case.name}: loaded")
            stale = {family.name: pair.compare(family) for family in (INGEST, NODES)}
            for conn in pair.loaders:
                conn.execute(f"ANALYZE {_TABLES}".encode())
            fresh = {family.name: pair.compare(family) for family in (*families, LOOK)}
        bare = results.middle(fresh["bare"][1])
        for family in (INGEST,) if case.limited else (INGEST, NODES):
            for when, found in (("before", stale), ("after", fresh)):
                base, costs, ratios = found[family.name]
                yield results.Row(
                    f"claim + finish, {family.name}, {case.name}, {when} ANALYZE",
                    results.middle(costs),
                    "ms",
                    bare,
                    ratios,
                    results.at_most(case.limit),
                    f"the ratio is to {results.number(results.middle(base))} ms at {BASE:,}",
                )
        _, costs, ratios = fresh["look"]
        yield results.Row(
            f"orchestrator's poll, {case.name}",
            results.middle(costs),
            "ms",
            None,
            ratios,
            results.at_most(case.limit),
            f"the ratio is to its own at {BASE:,}",
        )
