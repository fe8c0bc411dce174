"""Measure the import time in fresh interpreters."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import processes, results
from benchmarks.bench import Bench
from queue_workflows import config

ABOUT = """Each `import` runs in a fresh interpreter, which measures its time. The three imports
alternate, and the figure is the smallest of several. The modules are compiled to bytecode before,
as pip does it. The bare figure is `import psycopg`, which every worker needs. The worker's target
is a ratio to that figure, 1.31: the design measured 160 ms and 122 ms."""
_CODE = (
    "import sys, time; begun = time.perf_counter(); __import__(sys.argv[1]);"
    " print(time.perf_counter() - begun)"
)
WORKER_TO_PSYCOPG = 1.31
"""The design's 160 ms for a worker where `import psycopg` took 122 ms."""
MODULES = ("psycopg", "queue_workflows", "queue_workflows.claim_worker")


def seconds(module: str) -> float:
    """Return how long one import took."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, module],
        env=processes.environment(os.environ.get("QUEUE_WORKFLOWS_DB_URL", "")),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield two rows: the package alone in ms, and a worker beside its dependencies."""
    compileall.compile_dir(Path(config.__file__).parent, quiet=1)
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(bench.pick(12, 3)):
        for module in MODULES:
            times[module].append(seconds(module) * 1000)
    psycopg = times["psycopg"]
    limits = {
        "queue_workflows": results.own_at_most(30.0),
        "queue_workflows.claim_worker": results.at_most(WORKER_TO_PSYCOPG),
    }
    for module, limit in limits.items():
        yield results.Row(
            f"import {module}",
            min(times[module]),
            "ms",
            min(psycopg),
            results.paired(times[module], psycopg),
            limit,
        )
