"""A bare `import queue_workflows` costs next to nothing and still reaches everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET_MS = 30.0


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


@pytest.mark.parametrize(
    "name",
    [
        "db", "claim_worker", "node_queue", "run_store", "dispatcher", "node_executor",
        "ingest_executor", "node_pool", "input_listener", "scheduler", "worker_control",
        "model_registry", "model_cache", "gpu_model_cache", "refs", "config", "migrations",
        "orchestrator", "errors",
    ],
)  # fmt: skip
def test_a_module_is_an_attribute(name: str) -> None:
    import queue_workflows

    assert getattr(queue_workflows, name).__name__ == f"queue_workflows.{name}"


def test_modules_and_operations_resolve_after_a_bare_import() -> None:
    code = (
        "import queue_workflows as q; print(q.node_queue.enqueue_node_job.__name__,"
        " q.claim_worker.ClaimWorker.__name__, q.db.bootstrap.__name__, q.cancel_run.__name__)"
    )
    assert python(code) == "enqueue_node_job ClaimWorker bootstrap cancel_run"


def test_what_does_not_exist_is_an_attribute_error() -> None:
    import queue_workflows

    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = queue_workflows.nope
    assert not hasattr(queue_workflows, "psycopg")


def test_everything_public_is_there() -> None:
    import queue_workflows

    for name in queue_workflows.__all__:
        assert getattr(queue_workflows, name) is not None


def test_a_bare_import_loads_neither_psycopg_nor_what_is_slow() -> None:
    code = (
        "import sys; before = set(sys.modules); import queue_workflows;"
        " print(*sorted(set(sys.modules) - before))"
    )
    loaded = set(python(code).split())
    heavy = ("psycopg", "psycopg_pool", "logging", "asyncio", "dataclasses", "pathlib", "inspect")
    assert not {name for name in loaded if name.split(".")[0] in heavy}


def test_a_bare_import_stays_in_its_budget() -> None:
    # Time of the processor, which a busy machine stretches least; the benchmark has the clock's.
    code = (
        "import time; t = time.process_time(); import queue_workflows;"
        " print((time.process_time() - t) * 1000)"
    )
    assert min(float(python(code)) for _ in range(10)) <= BUDGET_MS
