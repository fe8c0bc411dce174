"""Measure what a worker and an orchestrator cost when there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks import processes, results
from benchmarks.bench import Bench, until

ABOUT = """Two `queue-claim-worker`s, a `queue-orchestrator` and a bare process that LISTENs and
polls for a job every second. Each is alone on an empty database of its own. All are measured in the
same window, after they have settled. One worker of a machine samples the hardware: every 5 s it
stores a sample and notifies, and its LISTEN connection receives that too. So one of the two workers
has its sampler, and the other has none, as all further workers of a machine. Transactions a second
are the commits and rollbacks that `pg_stat_database` counts for that database. Each statement of a
process is one transaction. The benchmark reads the counters over a connection to another database,
so it adds none. The few transactions of autovacuum are included. CPU is the processes' own time
from the kernel, not the server's. Memory is VmRSS, which counts shared pages of libraries too."""
WITHOUT_SAMPLES = "QUEUE_WORKFLOWS_DISABLE_HW_METRICS=1"
_COUNT = (
    "SELECT datname, xact_commit + xact_rollback FROM pg_stat_database WHERE datname = ANY (%s)"
)
_CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


class Cost(NamedTuple):
    """Transactions a second, CPU seconds a minute, resident MB."""

    rate: float
    cpu_s: float
    rss_mb: float


def _costs(bench: Bench, started: list[processes.Process], names: list[str]) -> list[Cost]:
    admin = bench.server.admin
    window = bench.pick(60.0, 8.0)
    cpu = [process.cpu_s() for process in started]
    before = dict(admin.execute(_COUNT, (names,)).fetchall())
    begun = time.monotonic()
    time.sleep(window)
    spent = time.monotonic() - begun
    after = dict(admin.execute(_COUNT, (names,)).fetchall())
    return [
        Cost(
            (after[name] - before[name]) / spent,
            (process.cpu_s() - cpu[i]) / spent * 60,
            process.rss_mb(),
        )
        for i, (name, process) in enumerate(zip(names, started, strict=True))
    ]


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield three rows each for a worker, a worker that samples the hardware, an orchestrator."""
    server = bench.server
    commands = {
        "worker": ["env", WITHOUT_SAMPLES, *processes.worker("load")],
        "sampler": processes.worker("load"),
        "orchestrator": processes.orchestrator(),
        "bare": processes.bare("listen", "load"),
    }
    with ExitStack() as stack:
        dsns = {name: stack.enter_context(server.database(f"idle_{name}")) for name in commands}
        started = [
            stack.enter_context(bench.running(dsns[name], (name, argv)))[0]
            for name, argv in commands.items()
        ]
        names = [server.name_of(dsn) for dsn in dsns.values()]
        for name in names:
            until(
                lambda name=name: (server.admin.execute(_CONNECTED, (name,)).fetchone() or (0,))[0],
                f"somebody on {name}",
                started,
            )
        time.sleep(bench.pick(15.0, 2.0))
        worker_cost, sampler_cost, orchestrator_cost, bare_cost = _costs(bench, started, names)
    yield from _rows("idle worker", worker_cost, bare_cost, (1.2, 0.12, 42))
    yield from _rows("idle worker that samples", sampler_cost, bare_cost, (None, None, None))
    yield from _rows("idle orchestrator", orchestrator_cost, bare_cost, (2.0, None, None))


def _rows(
    name: str, ours: Cost, bare: Cost, limits: tuple[float | None, ...]
) -> Iterator[results.Row]:
    parts = (("transactions", "/s"), ("CPU", "s/min"), ("memory", "MB"))
    for (part, unit), own, other, limit in zip(parts, ours, bare, limits, strict=True):
        target = None if limit is None else results.own_at_most(limit)
        ratios = [own / other] if other else []
        yield results.Row(f"{name}, {part}", own, unit, other, ratios, target)
