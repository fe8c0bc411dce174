"""What a plain worker imports: its start-up costs as much as its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 185
"""Modules of this package that `import queue_workflows.claim_worker` loads, which are 185."""
UNUSED = (
    "queue_workflows.admin",
    "queue_workflows.declare",
    "queue_workflows.executor",
    "queue_workflows.history",
    "queue_workflows.runtime.supervisor",
    "queue_workflows.service",
    "queue_workflows.worker.crash_recovery",
    "queue_workflows.worker.executors",
    "queue_workflows.worker.parent",
    "queue_workflows.worker.pool_config",
    "queue_workflows.worker.slot_start",
    "queue_workflows.worker.slot_worker",
    "queue_workflows.worker.slots",
)
"""A worker needs them with slots, under a parent, or for what apps call."""
_CODE = """
import sys
import psycopg
known = set(sys.modules)
from queue_workflows import claim_worker
from queue_workflows.worker import command_line
assert command_line.is_plain(command_line.parser().parse_args(["--queue", "load"]))
print(*(set(sys.modules) - known))
"""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", UNUSED)
def test_a_plain_worker_does_not_import(module: str, loaded: set[str]) -> None:
    assert module not in loaded


@pytest.mark.parametrize(
    "module", ["email", "http", "multiprocessing", "unittest", "urllib.request"]
)
def test_a_plain_worker_imports_no_heavy_library(module: str, loaded: set[str]) -> None:
    assert module not in loaded


def test_a_plain_worker_imports_few_modules(loaded: set[str]) -> None:
    own = [name for name in loaded if name.split(".")[0] == "queue_workflows"]
    assert len(own) <= MOST, sorted(own)
