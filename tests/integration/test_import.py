"""A bare `import queue_workflows` is fast, and every public module is reachable from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tabled

ROOT = Path(__file__).resolve().parents[2]
OF_PSYCOPG = 0.2
"""Share of psycopg's import, which takes 122 ms where ours may take 30; measured: 0.13."""
MODULES = 40
"""Loaded by a bare import beyond what an interpreter starts with; 29 on Python 3.11."""
HEAVY = frozenset(
    {
        "asyncio",
        "concurrent",
        "ctypes",
        "dataclasses",
        "datetime",
        "decimal",
        "email",
        "http",
        "importlib",
        "inspect",
        "json",
        "logging",
        "multiprocessing",
        "pathlib",
        "random",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "traceback",
        "urllib",
        "uuid",
        "zoneinfo",
    }
)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_module_is_an_attribute() -> None:
    cases: list[Any] = [
        "runs", "jobs", "queues", "workers", "schedules", "models", "history",
        "db", "claim_worker", "node_queue", "run_store", "dispatcher", "node_executor",
        "ingest_executor", "node_pool", "input_listener", "scheduler", "worker_control",
        "model_registry", "model_cache", "gpu_model_cache", "refs", "config", "migrations",
        "orchestrator", "errors",
    ]  # fmt: skip
    for name in cases:
        with tabled.case(name):
            import queue_workflows

            assert getattr(queue_workflows, name).__name__ == f"queue_workflows.{name}"


def test_modules_and_operations_resolve_after_a_bare_import() -> None:
    code = (
        "import queue_workflows as q; print(q.node_queue.enqueue_node_job is q.runs.add_node,"
        " q.claim_worker.ClaimWorker.__name__, q.db.bootstrap.__name__,"
        " q.cancel_run is q.runs.cancel)"
    )
    assert python(code) == "True ClaimWorker bootstrap True"


def test_a_missing_name_is_an_attribute_error() -> None:
    import queue_workflows

    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = queue_workflows.nope
    assert not hasattr(queue_workflows, "psycopg")


def test_everything_public_is_there() -> None:
    import queue_workflows

    for name in queue_workflows.__all__:
        assert getattr(queue_workflows, name) is not None


def test_a_bare_import_loads_three_modules_of_ours_and_little_of_the_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import queue_workflows;"
        " print(*sorted(set(sys.modules) - before))"
    )
    loaded = set(python(code).split())
    ours = {name for name in loaded if name.split(".")[0] == "queue_workflows"}
    assert ours == {"queue_workflows", "queue_workflows.config", "queue_workflows.errors"}
    others = {name.split(".")[0] for name in loaded - ours}
    assert others <= sys.stdlib_module_names
    assert not others & HEAVY
    assert len(loaded) <= MODULES


def test_a_bare_import_stays_in_its_budget() -> None:
    # Both in one process: a slow or busy machine stretches both. psycopg comes second, so that what
    # they share is counted as ours. Time of the processor; the benchmark has the clock's.
    code = (
        "import time; clock = time.process_time; a = clock(); import queue_workflows;"
        " b = clock(); import psycopg; print(b - a, clock() - b)"
    )
    measured = [tuple(map(float, python(code).split())) for _ in range(6)]
    ours, theirs = (min(each) for each in zip(*measured, strict=True))
    assert ours <= OF_PSYCOPG * theirs, f"{ours * 1000:.1f} ms, psycopg {theirs * 1000:.1f} ms"
