"""What a worker imports: its start-up costs as much as its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 74
"""Modules of this package that `import queue_workflows.claim_worker` loads, which are 72."""
MOST_OF_A_WORKER = 191
"""Those that a worker of a queue loads, which are 188."""
HEAVY = ("asyncio", "email", "http", "multiprocessing", "unittest", "urllib.request")
UNUSED = (
    "queue_workflows.admin",
    "queue_workflows.declare",
    "queue_workflows.history",
    "queue_workflows.run.async_jobs",
    "queue_workflows.runtime.supervisor",
    "queue_workflows.service",
    "queue_workflows.worker.parent",
)
"""A worker needs them under a parent, for async jobs, or for what apps call."""
_CODE = """
import sys
import psycopg
known = set(sys.modules)
from queue_workflows import claim_worker
print(*(set(sys.modules) - known))
from queue_workflows.worker import process
print(*(set(sys.modules) - known))
"""


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """What the module of the command loads, and what a worker loads."""
    done = subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True, text=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("module", [*UNUSED, *HEAVY])
def test_a_worker_does_not_import(module: str, loaded: list[set[str]]) -> None:
    assert module not in loaded[-1]


def test_a_worker_imports_few_modules(loaded: list[set[str]]) -> None:
    for found, most in zip(loaded, (MOST, MOST_OF_A_WORKER), strict=True):
        own = [name for name in found if name.split(".")[0] == "queue_workflows"]
        assert len(own) <= most, sorted(own)
